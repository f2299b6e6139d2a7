"""Chooses before each round how deep to draft, and how many nodes of a tree to verify.

The engine calls `state.DepthChooser`: `choose` before a round, and `observe` after it with one
`acceptance.RoundObservation`. Start reading there. `acceptance` learns the chance of each draft
position and `costs` the seconds of a round, `estimate` makes tokens a second of both, and `choose`
holds the rules by which a choice changes. `cost_file` keeps costs from one start to the next.
`build` decides whether depth is chosen at all, and `host_rounds` runs the host's rounds so.
"""
