"""What passes between the supervisor and each of its children."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from specengine.core import errors
from specengine.core.config import EngineConfig
from specengine.core.errors import SpecEngineError

if TYPE_CHECKING:
    from specengine.engine.parts import EngineParts

MAX_BYTES = 2**17  # of a message: below the smallest buffer that Linux gives a socket


class StartEngine(Struct, tag="start_engine"):
    """endpoint: where it binds. alive: its file for Alive. tokenizer: the directory into which it
    writes its tokenizer, if that is not there yet. number: among the engines of the server.
    meeting: the directory in which engines meet that share experts; none where it is empty."""

    config: EngineConfig
    endpoint: str
    alive: str
    tokenizer: str
    number: int = 0
    meeting: str = ""


class EngineInfo(Struct, tag="engine_info"):
    """An engine that serves. config: with every "auto" resolved."""

    endpoint: str
    tokenizer: str
    model_name: str
    context_length: int
    vocab_size: int
    is_embedding: bool
    config: EngineConfig
    number: int = 0  # among the engines of the server
    sampling_defaults: dict[str, int | float] = {}  # a whole number stays one: top_k

    @classmethod
    def of(
        cls, parts: EngineParts, *, endpoint: str = "", tokenizer: str = "", number: int = 0
    ) -> EngineInfo:
        """endpoint, tokenizer: where front ends reach the engine and read its tokenizer; empty
        where something else carries both."""
        return cls(
            endpoint=endpoint,
            tokenizer=tokenizer,
            model_name=parts.model_name,
            context_length=parts.context_length,
            vocab_size=parts.vocab_size,
            is_embedding=parts.pooling is not None,
            config=parts.config,
            number=number,
            sampling_defaults=parts.sampling_defaults,
        )


class Keys(Struct, tag="keys"):
    """Keys of the API, before StartFrontEnd: as many of these as all keys need."""

    keys: list[str]


class StartFrontEnd(Struct, tag="start_front_end"):
    """name: no two are the same. started: Unix time at which the server was. engines: those that
    serve now."""

    config: EngineConfig
    name: str
    started: int
    num_front_ends: int
    engines: list[EngineInfo]


class EngineDown(Struct, tag="engine_down"):
    """An engine has ended; message: of the error that its requests get."""

    message: str
    number: int = 0


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


class Serves(Struct, tag="serves"):
    """The front end has met each engine once: what it answers is no longer that they load."""


class Beat(Struct, tag="beat"):
    """The front end's event loop runs. num_closed: connections since the last."""

    num_closed: int


class Drained(Struct, tag="drained"):
    pass


ToFrontEnd = Keys | StartFrontEnd | EngineInfo | EngineDown | Connection | Drain | Stop
ToChild = ToFrontEnd | StartEngine | FrontEndGone
ToSupervisor = EngineInfo | LoadFailed | Up | Serves | Beat | Drained
Message = ToChild | Up | Serves | Beat | Drained | LoadFailed

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


@dataclass(frozen=True)
class Received:
    message: Message
    descriptors: list[int]


class Channel:
    """One end of a pair of sockets that keep the bounds of messages. Its calls block."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    @classmethod
    def of_descriptor(cls, descriptor: int) -> Channel:
        return cls(socket.socket(fileno=descriptor))

    def send(self, message: Message) -> None:
        """Nothing happens where the other side is gone."""
        with suppress(ConnectionError):
            self._socket.send(_encode(message))

    def receive(self) -> Received | None:
        """The next message; None where the other side is gone. Raises BlockingIOError where there
        is none and the socket does not block."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, MAX_BYTES, 1)
        except ConnectionError:
            return None
        if not data:
            return None
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        return Received(_decoder.decode(data), descriptors)

    def watched(self, hear: Callable[[Received], object], gone: Callable[[], object]) -> Mailbox:
        """The same in the running event loop."""
        return Mailbox(self._socket, self, hear, gone)


class Mailbox:
    """A channel in an event loop: `hear` is called with each message, and `gone` when the other
    side has ended. Few messages fit into the socket: further ones wait here, in their order."""

    def __init__(
        self,
        sock: socket.socket,
        channel: Channel,
        hear: Callable[[Received], object],
        gone: Callable[[], object],
    ) -> None:
        self._socket, self._channel = sock, channel
        self._hear, self._gone = hear, gone
        self._waiting: deque[tuple[bytes, list[int]]] = deque()
        self._loop = asyncio.get_running_loop()
        sock.setblocking(False)
        self._loop.add_reader(sock.fileno(), self.read)

    def send(self, message: Message, connection: socket.socket | None = None) -> None:
        """connection: goes with the message; the other side has a copy of its own."""
        descriptors = [] if connection is None else [os.dup(connection.fileno())]
        self._waiting.append((_encode(message), descriptors))
        if len(self._waiting) == 1:
            self._write()

    def read(self) -> None:
        """Handle all messages that have come."""
        while self._socket.fileno() >= 0:
            try:
                received = self._channel.receive()
            except BlockingIOError:
                return
            if received is None:
                self._loop.remove_reader(self._socket.fileno())
                self._gone()
                return
            self._hear(received)

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        self._drop()

    def _write(self) -> None:
        while self._waiting and self._socket.fileno() >= 0:
            data, descriptors = self._waiting[0]
            try:
                socket.send_fds(self._socket, [data], descriptors)
            except BlockingIOError:
                self._loop.add_writer(self._socket.fileno(), self._write)
                return
            except ConnectionError:  # the other side has gone; `read` notices
                self._drop()
                break
            self._waiting.popleft()
            _close(descriptors)
        if self._socket.fileno() >= 0:
            self._loop.remove_writer(self._socket.fileno())

    def _drop(self) -> None:
        for _, descriptors in self._waiting:
            _close(descriptors)
        self._waiting.clear()


def messages_of(keys: Iterable[str]) -> Iterator[Keys]:
    """In their order. keys: of at most listening.MOST_KEY characters each."""
    part, num_bytes = list[str](), 0
    for key in keys:
        room = 5 + len(key.encode())  # with MessagePack's own bytes
        if part and num_bytes + room > MAX_BYTES // 2:
            yield Keys(part)
            part, num_bytes = [], 0
        part.append(key)
        num_bytes += room
    if part:
        yield Keys(part)


def _encode(message: Message) -> bytes:
    data = _encoder.encode(message)
    assert len(data) <= MAX_BYTES, "a message that is too large for its channel"
    return data


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def channel_pair() -> tuple[Channel, socket.socket]:
    """Ours, and the child's end, which a child inherits."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(ours), theirs
