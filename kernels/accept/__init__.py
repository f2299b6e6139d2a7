"""Decides which drafts are accepted, and moves requests on by them.

Called by `target/verify` and `engine/round`. Start with accept_chain.py (matching) and
accept_sampled.py (what the stochastic rules share); accept_path.py commits what a rule accepted.
"""
