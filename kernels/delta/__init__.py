"""The gated delta rule: linear attention whose memory of a text is one matrix a head.

Called by `layers` and `memory`. Start with delta_rule_ref.py, which is the definition, then
delta_rule.py, which chooses among the files below. In Triton, by case:

- prompts (`extend`), token by token: delta_tokens_triton.py makes what tokens read, then
  delta_prompt_triton.py walks along them.
- prompts, where chunks of 64 tokens are faster: delta_chunks_triton.py, which makes what tokens
  read too. float32 on CUDA goes token by token up to 4,096 tokens, beyond in chunks by PyTorch
  (delta_chunks_ref.py).
- verification (`verify`), chains and trees: delta_nodes_triton.py makes what nodes read, then
  delta_rule_triton.py walks along them, and moves states on by accepted paths (`keep`).
- plain decoding (`decode`), one token a request: delta_decode_triton.py, both steps.

What a kernel computes of one token or node is shared: `silu`, `softplus` and decays are in
delta_nodes_triton.py, the convolution of prompts in delta_tokens_triton.py, the step of the memory
(`stepped`) in delta_decode_triton.py.
"""
