"""The parts of decoder models: attention, feed-forward, experts, norms, heads, sampling, and how
weights are loaded into them, on one rank or several.

Start with compute_paths.py: a LayerSpec (layer_spec.py) describes a layer, and each path there says
which fields of it it computes. decoder.py runs a layer by the fastest path that takes it, head.py
does so for heads. quantization/ has weights of 8 and 4 bits. A family states its LayerSpec in
target/models; no file here knows one.
"""
