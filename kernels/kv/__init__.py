"""Rows of the page table and of the KV cache: where new tokens go, and which KV is kept.

Called by `memory`, `runner`, `draft` and `engine/round`. Start with row_places.py, then kv_move.py.
"""
