"""Ways for ranks to meet, a file each: core.parallel.Communicator over some library.

engine/parallel makes one for an engine, and layers that are split call it. Start with
torch_distributed.py. Another way, such as an all-reduce in one kernel, is another file.
"""
