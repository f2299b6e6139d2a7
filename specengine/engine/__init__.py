"""From requests to their tokens: schedule, run a round, commit, hand out.

Speculative decoding itself is round/host.py, one round of it, and target/verify/match.py, why it
loses nothing: read them first. Then loop.py: `Engine.advance` schedules prefills and rounds. round/
is one round on the host and on the device, pipeline.py launches rounds on the device one ahead of
their results, adaptive/ chooses how deep to draft, and grammar/ constrains output. build.py and
the other *build.py assemble an engine, factories.py makes drafters and verifiers by name, llm.py,
async_engine.py and serving/ are what callers use. proof/ and tracing/ serve `specengine verify` and
`--trace`. The server and the laboratory may import this package.
"""
