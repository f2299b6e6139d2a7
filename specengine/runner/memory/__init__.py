"""How much memory an engine has: readings of the device, the plan for KV, the budget of graphs.

engine/build.py measures a forward (profile.py), plans the KV pool (plan.py) and hands one
GraphMemory (graph_memory.py) to all runners of the engine. Start with plan.py.
"""
