"""One round of speculation: draft, verify, accept, observe.

host.py is the round as the host runs it, piece by piece: the algorithm in thirty lines, and the
reference of the tests. round.py is the same round on device tensors alone, composed of a source of
drafts (source.py the base class; device_draft.py, lookup.py, hybrid.py), the layout of the drafts
(layouts.py), a rule of acceptance (rules.py) and the sampling parameters of requests (sampling.py).
executor.py captures such rounds in CUDA graphs and launches them. key.py says what one graph is
captured for, kinds.py which keys there are. Start with host.py, then round.py.

build.py composes the round of an engine; engine/pipeline.py launches the rounds of requests.
Rounds without requests are launched beside engines that share experts (shared.py), and replayed
to be timed at start (timing.py).
"""
