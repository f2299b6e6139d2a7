"""The gated delta rule: linear attention whose memory of a text is one matrix a head.

Called by `layers` and `memory`. Start with delta_rule_ref.py, which is the definition.
"""
