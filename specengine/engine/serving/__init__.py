"""An engine and those who ask it, on two sides of a queue, a thread or a socket.

messages.py is all that passes between the sides. host.py is the engine's side: it steps, and an
Outbox (outbox.py) collects for each front end what its requests gained. streams.py is the other
side, on an event loop: it turns tokens into text, and what waits together into one output.
operations.py names what an operator may ask beside.
AsyncEngine (engine/async_engine.py) has both in one process; server/processes/ has them in two.
"""
