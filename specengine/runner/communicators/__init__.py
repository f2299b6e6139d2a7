"""Ways for ranks to meet, a file each: core.parallel.Communicator over some library.

engine/parallel makes one for an engine (connect.py chooses), and layers that are split call it.
Start with torch_distributed.py; one_shot.py is faster for few rows between two GPUs.
"""
