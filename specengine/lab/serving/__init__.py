"""Load on an OpenAI-protocol server, and what its clients see.

`run.py` is the bench: points of load one after the other. `fleet.py` runs the client processes,
`client.py` is one, `wire.py` its connections, `events.py` what an answer tells. `measures.py` makes
numbers of what requests saw. A client process imports nothing heavy: these three and `records.py`
use the standard library, msgspec, orjson and uvloop alone.
"""
