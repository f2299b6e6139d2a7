"""Captured graphs of single forwards: decode steps, prefills, verification and drafters' forwards.

Each kind is a small class on one GraphCache (runner/graph_cache.py) that pads a batch to a key,
fills the fixed buffers and runs. ModelRunner chooses among them; engine/forward_graphs_build.py
makes those of verification and of drafters. Start with keys.py (which batches share a graph), then
decode.py.
"""
