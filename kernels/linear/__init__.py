"""A decoder layer's products, norms and activation, one by one and fused for few rows.

Called by `layers` and `draft`. Start with few_row.py (one product and what is fused with it), then
layer_tail.py (a wide layer after its attention) and decoder_stack.py (all layers of a small model).
"""
