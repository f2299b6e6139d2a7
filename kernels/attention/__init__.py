"""Attention over paged KV, and what belongs to it: rotary positions, masks of trees.

Called by `layers` and by the attention backends of `runner`. Start with paged_attention.py; a
backend's usual call is rope_attention.py, which rotates, writes the KV and attends.
"""
