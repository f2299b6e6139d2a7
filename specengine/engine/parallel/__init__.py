"""One engine on several ranks (--tp-size): a process each, the same engine in lock-step.

build.py starts ranks here; docs/tensor_parallelism.md says what they tell each other and when.
Start with lead.py (rank 0's engine), then follower.py (what the other ranks do; their program is
program.py). Between them: messages.py, ring.py (the shared memory that they go through), links.py
(either end), ranks.py (processes: started, watched, ended).
"""
