"""An engine and its callers, on two sides of a queue, a thread or a socket.

messages.py is all that passes between the sides. host.py is the engine's side: it steps, and an
Outbox (outbox.py) collects for each front end the new output of its requests. streams.py is the
other side, on an event loop: it turns tokens into text, and what waits together into one output.
operations.py names the other calls of an operator.
AsyncEngine (engine/async_engine.py) has both in one process; server/processes/ has them in two.
"""
