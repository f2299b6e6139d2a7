"""Draws tokens from rows of logits: edits, grammar masks, filters, random numbers.

Called by `layers`, `target/verify` and `engine/round`. Start with sample_rows.py; keyed_uniform.py
says where its random numbers come from.
"""
