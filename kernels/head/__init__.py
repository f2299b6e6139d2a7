"""From hidden states to the best tokens, and from tokens to the embedding's rows.

Called by `layers` alone: others ask a Head object. Start with head_best.py (the best token) and
head_topk.py (the top-k candidates, from partial results by block of columns).
"""
