"""From requests to their tokens: schedule, run a round, commit, hand out.

Start with loop.py: `Engine.advance` is the algorithm. round/ is one round of speculation,
pipeline.py launches rounds on the device one ahead of their results, adaptive/ chooses how deep to
draft, and grammar/ constrains output. build.py and the other *build.py assemble an engine,
factories.py makes drafters and verifiers by name, llm.py, async_engine.py and serving/ are what
callers use. proof/ and tracing/ serve `specengine verify` and `--trace`. The server and the
laboratory may import this package.
"""
