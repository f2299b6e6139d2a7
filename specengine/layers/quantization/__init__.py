"""Weights that checkpoints hold in 8 or 4 bits.

A method of quantisation is one file here and one line of core/registry.py's QUANTIZATIONS. It reads
the tensors that stand for one linear layer (method.py says what it states) and makes one of the
weights of kernels/linear/quantised.py of them. Start with method.py, then fp8.py. runner/loader
calls `open_linears` before a checkpoint is read and `close_linears` behind it (linears.py).
What a type of weight is joined and multiplied by is in its entry of LINEAR_FORMATS
(kernels/linear/linear_format.py), and of EXPERT_FORMATS.
"""
