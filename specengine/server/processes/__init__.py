"""A server of several processes.

The supervisor (supervisor.py) listens and never serves: it hands each connection to a front end
(front_end.py), which speaks HTTP, tokenizes and detokenizes. One engine process
(engine_process.py) runs the model. Front ends and engine talk over ZeroMQ (engine/serving/ has the
messages), the supervisor talks to each of its children over a channel (channel.py). A child that
ends or hangs is started again (children.py). Start with supervisor.py.
"""
