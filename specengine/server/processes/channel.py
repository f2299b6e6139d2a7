"""What passes between the supervisor and each of its children."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from specengine.core import errors
from specengine.core.config import EngineConfig
from specengine.core.errors import SpecEngineError

MAX_BYTES = 2**17  # of a message: below the smallest buffer that Linux gives a socket


class StartEngine(Struct, tag="start_engine"):
    """endpoint: where it binds. alive: its file for Alive. tokenizer: the directory into which it
    writes its tokenizer, if that is not there yet."""

    config: EngineConfig
    endpoint: str
    alive: str
    tokenizer: str


class StartFrontEnd(Struct, tag="start_front_end"):
    """name: no two are the same. started: Unix time at which the server was. share: the part of
    limits on memory that is this front end's. keys: of the API."""

    config: EngineConfig
    name: str
    started: int
    num_front_ends: int
    keys: list[str]


class EngineInfo(Struct, tag="engine_info"):
    """An engine that serves. config: with every "auto" resolved."""

    endpoint: str
    tokenizer: str
    model_name: str
    context_length: int
    vocab_size: int
    config: EngineConfig


class EngineDown(Struct, tag="engine_down"):
    """The engine has ended; message: what requests are told."""

    message: str


class Connection(Struct, tag="connection"):
    """Comes with the descriptor of an accepted connection. is_surplus: refuse it."""

    is_surplus: bool


class FrontEndGone(Struct, tag="front_end_gone"):
    name: str


class Drain(Struct, tag="drain"):
    """Refuse new requests, and say Drained when none runs any more."""


class Stop(Struct, tag="stop"):
    """End now."""


class LoadFailed(Struct, tag="load_failed"):
    """The engine cannot be built. kind: a class of core/errors.py."""

    kind: str
    message: str

    def error(self) -> SpecEngineError:
        kind = getattr(errors, self.kind, SpecEngineError)
        error: SpecEngineError = kind(self.message)
        return error


class Up(Struct, tag="up"):
    """The front end takes connections."""


class Beat(Struct, tag="beat"):
    """The front end's event loop runs. num_closed: connections since the last."""

    num_closed: int


class Drained(Struct, tag="drained"):
    pass


ToChild = (
    StartEngine | StartFrontEnd | EngineInfo | EngineDown | Connection | FrontEndGone | Drain | Stop
)
ToSupervisor = EngineInfo | LoadFailed | Up | Beat | Drained
Message = ToChild | Up | Beat | Drained | LoadFailed

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


@dataclass(frozen=True)
class Received:
    message: Message
    descriptors: list[int]


class Channel:
    """One end of a pair of sockets that keep the bounds of messages."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    @classmethod
    def of_descriptor(cls, descriptor: int) -> Channel:
        return cls(socket.socket(fileno=descriptor))

    def fileno(self) -> int:
        return self._socket.fileno()

    def set_blocking(self, blocks: bool) -> None:
        self._socket.setblocking(blocks)

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> bool:
        """False where the other side is gone, or its buffer is full and this side does not
        block."""
        data = _encoder.encode(message)
        assert len(data) <= MAX_BYTES, "a message that is too large for its channel"
        try:
            socket.send_fds(self._socket, [data], descriptors)
        except OSError:
            return False
        return True

    def receive(self) -> Received | None:
        """The next message; None where the other side is gone. Raises BlockingIOError where there
        is none and this side does not block."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, MAX_BYTES, 1)
        except ConnectionError:
            return None
        if not data:
            return None
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        return Received(_decoder.decode(data), descriptors)

    def close(self) -> None:
        self._socket.close()


def channel_pair() -> tuple[Channel, socket.socket]:
    """Ours, and the child's end, which a child inherits."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(ours), theirs
