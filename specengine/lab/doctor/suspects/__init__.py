"""What a drafter may suffer from: a file a kind of mistake.

Each gives the hypotheses that fit the drafter as it stands, the likeliest first.
"""
