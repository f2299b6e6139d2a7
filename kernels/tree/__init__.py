"""Draft trees on the device: a level's growth, the choice of nodes, the shape for verification.

Called by `draft` and `engine/round`. Start with tree_step.py, then tree_build.py; tree_shape.py
takes trees that come from the host.
"""
