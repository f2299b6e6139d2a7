"""The process that has the model: an EngineHost behind a ZeroMQ socket."""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from specengine.core.errors import EngineStoppedError, SpecEngineError
from specengine.core.trim import IdleTrim
from specengine.engine.serving.host import EngineHost
from specengine.engine.serving.messages import Hello, Reply, Request
from specengine.server.processes.alive import Alive
from specengine.server.processes.channel import (
    Channel,
    EngineInfo,
    FrontEndGone,
    LoadFailed,
    StartEngine,
    Stop,
)

if TYPE_CHECKING:
    from specengine.core.config import EngineConfig
    from specengine.engine.loop import Engine

logger = logging.getLogger(__name__)

HIGH_WATER = 64  # messages that wait for a front end before its tokens are held back here
# As plain numbers: operations on ZeroMQ's enumerations take a microsecond each.
READABLE, AT_ONCE, FIRST_PART = (
    int(one) for one in (zmq.POLLIN, zmq.NOBLOCK, zmq.SNDMORE | zmq.NOBLOCK)
)
BEAT = 1.0  # seconds between beats while there is nothing to do

Build = Callable[["EngineConfig"], "Engine"]


def run_engine(channel: Channel, start: StartEngine, build: Build) -> int:
    """Serve until a message says to stop; the exit status. Ends with the supervisor."""
    process = EngineProcess(channel, start)
    threading.Thread(target=process.obey, name="control", daemon=True).start()
    try:
        engine = build(start.config)
    except SpecEngineError as error:
        channel.send(LoadFailed(type(error).__name__, str(error)))
        return 1
    process.serve(engine)
    return 0


class EngineProcess:
    """The main thread steps and talks to front ends; another waits for the supervisor's words."""

    def __init__(self, channel: Channel, start: StartEngine) -> None:
        self._channel = channel
        self._start = start
        self._host: EngineHost | None = None
        self._stopped = self._is_told_to_stop = False
        self._gone: set[bytes] = set()
        self._wakes, self._waker = os.pipe()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
        self._router: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.SNDHWM, HIGH_WATER)
        self._router.setsockopt(zmq.RCVHWM, 0)
        self._router.setsockopt(zmq.LINGER, 1000)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._wakes, zmq.POLLIN)

    def obey(self) -> None:
        while (received := self._channel.receive()) is not None:
            message, host = received.message, self._host
            if isinstance(message, Stop):
                if host is None:  # it is still loading
                    os._exit(0)
                self._is_told_to_stop = True
                host.post(self._stop)
            elif isinstance(message, FrontEndGone) and host is not None:
                host.post(partial(self._forget, message.name.encode()))
        os._exit(1)  # the supervisor has gone

    def serve(self, engine: Engine) -> None:
        start, interval = self._start, self._start.config.server.stream_interval
        host = EngineHost(engine, self._wake, self._has_message, prepares=True, interval=interval)
        self._host = host
        self._router.bind(start.endpoint)
        save_tokenizer(engine.parts.tokenizer, start.tokenizer)
        info = EngineInfo.of(
            engine.parts, endpoint=start.endpoint, tokenizer=start.tokenizer, number=start.number
        )
        alive = Alive(start.alive)
        alive.beat()
        self._channel.send(info)
        trim = IdleTrim()
        try:
            while True:
                seconds = host.turn()
                alive.beat()
                if self._stopped:
                    break
                trim.note(works=seconds == 0.0)
                self._receive(host, BEAT if seconds is None else min(seconds, BEAT))
        except EngineStoppedError:
            if not self._is_told_to_stop:  # else another that shares experts was the first to end
                raise
        host.close()
        self._router.close()

    def _receive(self, host: EngineHost, seconds: float) -> None:
        """Take what has come; wait for it where there is nothing else to do."""
        router = self._router
        if seconds:
            ready = dict(self._poller.poll(math.ceil(seconds * 1000)))
            if self._wakes in ready:
                os.read(self._wakes, 4096)
        while self._has_message():
            name, data = router.recv_multipart(AT_ONCE)
            if name in self._gone:
                continue
            message = self._decoder.decode(data)
            if isinstance(message, Hello):
                host.connect(name, self._sender(host, name))
            else:
                host.receive(name, message)

    def _has_message(self) -> bool:
        return bool(int(self._router.get(zmq.EVENTS)) & READABLE)

    def _sender(self, host: EngineHost, name: bytes) -> Callable[[Reply], bool]:
        router, encode = self._router, self._encoder.encode

        def send(reply: Reply) -> bool:
            try:
                router.send(name, FIRST_PART)
            except zmq.Again:
                return False
            except zmq.ZMQError:  # it has gone
                host.post(lambda: self._forget(name))
                return True
            router.send(encode(reply), AT_ONCE)
            return True

        return send

    def _forget(self, name: bytes) -> None:
        self._gone.add(name)
        assert self._host is not None
        self._host.disconnect(name)

    def _wake(self) -> None:
        os.write(self._waker, b"x")

    def _stop(self) -> None:
        self._stopped = True


def save_tokenizer(tokenizer: object, directory: str) -> None:
    """Once for all engines of a server, which may come here at once: a disk that is full later
    stops no restart."""
    place = Path(directory)
    if not place.exists():
        partial = place.with_suffix(f".{os.getpid()}")
        tokenizer.save_pretrained(partial)  # type: ignore[attr-defined]
        try:
            partial.rename(place)
        except OSError:  # another was first
            if not place.exists():
                raise
