"""Structured output. compiler.py makes the grammars of requests, state.py follows one through its
output, masks.py makes token masks of its states, and drafts.py cuts drafts to what it allows. The
engine's loop and rounds call it. A server's grammars come through pool.py, which tries each in a
process of trial.py first. Start with state.py.
"""
