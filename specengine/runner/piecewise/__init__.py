"""Forwards in pieces: the model is traced once and cut at attention, and what lies between two cuts
runs as a CUDA graph for each padded number of tokens. So prompts of any length, mixed batches and
models with recurrent state run in graphs, where one graph of the whole forward cannot be.

The runner calls it (`runner/model_runner.py`). Start with forwards.py, then trace.py and pieces.py.
"""
