"""The engine in another process, as a front end sees it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import zmq

from specengine.engine.serving.messages import Hello, Reply, Request
from specengine.server.distant import DistantEngine
from specengine.server.processes.channel import EngineInfo

# As plain numbers: operations on ZeroMQ's enumerations take a microsecond each.
READABLE, AT_ONCE = int(zmq.POLLIN), int(zmq.NOBLOCK)
MOST_TAKEN = 256  # messages before other work of the event loop gets its turn


class RemoteEngine(DistantEngine):
    """Made in the event loop that it serves. name: of the front end."""

    def __init__(self, info: EngineInfo, tokenizer: Any, name: str) -> None:
        super().__init__(info, tokenizer)
        self._outgoing: list[bytes] = []
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, name.encode())
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.connect(info.endpoint)
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(self._socket.get(zmq.FD))
        self._loop.add_reader(self._descriptor, self._take)
        self._post(Hello())

    def _disconnect(self) -> None:
        self._loop.remove_reader(self._descriptor)
        self._socket.close()

    def _carry(self, message: Request) -> None:
        """In the loop's next turn: requests that came together reach the engine together, which
        then runs their prompts in one forward."""
        if not self._outgoing:
            self._loop.call_soon(self._send)
        self._outgoing.append(self._encoder.encode(message))

    def _send(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        if self._end is None:
            for data in outgoing:
                self._socket.send(data, AT_ONCE)
            self._take()  # the descriptor tells of a change once

    def _take(self) -> None:
        """Note all that has come; requests go on after that, so that what waits is one event."""
        socket, decode, receive = self._socket, self._decoder.decode, self._streams.receive
        for _ in range(MOST_TAKEN):
            if self._end is not None or not int(socket.get(zmq.EVENTS)) & READABLE:
                return
            receive(decode(socket.recv(AT_ONCE)))
        self._loop.call_soon(self._take)
