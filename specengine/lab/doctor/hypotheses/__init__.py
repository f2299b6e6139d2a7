"""Hypotheses about a drafter that is rarely accepted: one file per kind of mistake.

Each module yields the hypotheses that apply to the given drafter, the likeliest first.
"""
