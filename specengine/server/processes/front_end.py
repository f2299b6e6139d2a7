"""A process that speaks HTTP: the application on connections that the supervisor accepted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import uvicorn

from specengine.core.limits import LimitConfig
from specengine.core.trim import IdleTrim
from specengine.engine.garbage import freeze_objects, importing
from specengine.server.app import create_app
from specengine.server.connection import LimitedProtocol, limited_protocol
from specengine.server.processes.channel import (
    Beat,
    Channel,
    Connection,
    Drain,
    Drained,
    EngineDown,
    EngineInfo,
    Received,
    Serves,
    StartFrontEnd,
    Stop,
    Up,
)
from specengine.server.processes.remote import RemoteEngine
from specengine.server.replicas import Replicas
from specengine.server.run import settings_of
from specengine.server.service import Service
from specengine.server.tracing import otlp_provider

logger = logging.getLogger(__name__)

BEAT = 1.0  # seconds


def run_front_end(channel: Channel, start: StartFrontEnd, keys: Sequence[str]) -> int:
    """Serve until a message says to stop; the exit status. Ends with the supervisor. keys: of the
    API."""
    config = start.config.server
    service = Service(limits_of(start))
    service.started = start.started
    tracing = otlp_provider(config.otlp_endpoint)  # what is left of it is sent at exit
    app = create_app(service, keys, config, tracing)
    front_end = FrontEnd(app, service, channel, start)
    front_end.run(sockets=[])
    if tracing is not None:
        tracing.shutdown()
    return 0


def limits_of(start: StartFrontEnd) -> LimitConfig:
    """Bytes of bodies are shared out; the supervisor counts the connections."""
    limits = start.config.limits
    part = limits.max_buffered_bytes // start.num_front_ends
    return replace(limits, max_buffered_bytes=max(part, min(limits.max_body_bytes, 2**31)))


class FrontEnd(uvicorn.Server):
    """Its connections come over the channel, and so does the word to stop: signals are for the
    supervisor, which the terminal sends them to as well."""

    def __init__(self, app: Any, service: Service, channel: Channel, start: StartFrontEnd) -> None:
        self._service = service
        self._channel = channel
        self._name = start.name
        self._first_engines = start.engines
        self._engines: dict[int, RemoteEngine] = {}  # by number, each the last that served
        self._met: dict[int, EngineInfo] = {}  # by number, those not known to be down
        self._num_engines = start.config.parallel.dp_size
        self._tokenizer: Any = None
        self._loading = asyncio.Lock()
        self._num_closed = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._protocol = limited_protocol(service.limits)
        super().__init__(settings_of(app, start.config.server, self._protocol))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for one in self._first_engines:
            self._met[one.number] = one
            await self._use(one)
        self._mailbox = self._channel.watched(self._obey, lambda: os._exit(1))
        self._mailbox.send(Up())
        self._tell_whether_it_serves()
        self._do(self._beat())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.is_stopping = True
        self._service.stop()
        await super().shutdown(sockets)
        for task in self._tasks:
            task.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, signal.SIG_IGN)
        yield

    def _do(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _obey(self, received: Received) -> None:
        message = received.message
        if isinstance(message, Connection):
            self._do(self._adopt(received.descriptors[0], message.is_surplus))
        elif isinstance(message, EngineInfo):
            self._met[message.number] = message  # at once: the next message may be its end
            self._do(self._meet(message))
        elif isinstance(message, EngineDown):
            self._met.pop(message.number, None)
            self._lose(message.number, message.message)
        elif isinstance(message, Drain):
            self._do(self._drain())
        elif isinstance(message, Stop):
            self.should_exit = True

    async def _adopt(self, descriptor: int, is_surplus: bool) -> None:
        made: list[LimitedProtocol] = []

        def protocol() -> LimitedProtocol:
            one = self._protocol(config=self.config, server_state=self.server_state, app_state={})
            one.is_surplus, one.on_lost = is_surplus, self._note_closed
            made.append(one)
            return one

        sock = socket.socket(fileno=descriptor)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(protocol, sock, ssl=self.config.ssl)
        except (OSError, TimeoutError) as error:  # TLS that its client did not finish
            logger.debug("a connection came to nothing: %s", error)
            sock.close()
            if not (made and made[0] in self.server_state.connections):
                self._note_closed()

    async def _meet(self, info: EngineInfo) -> None:
        await self._use(info)
        self._tell_whether_it_serves()

    def _tell_whether_it_serves(self) -> None:
        if self._service.engine is not None:
            self._mailbox.send(Serves())

    async def _use(self, info: EngineInfo) -> None:
        async with self._loading:  # of several engines that come at once
            if self._tokenizer is None:  # that of another engine is the same
                self._tokenizer = await asyncio.to_thread(load_tokenizer, info.tokenizer)
                freeze_objects()  # a full collection would walk for 0.1 s through what is loaded
        if self._met.get(info.number) is not info:
            return  # it has ended meanwhile: requests to it would wait for nothing
        self._lose(info.number, "the engine has been replaced")
        self._engines[info.number] = engine = RemoteEngine(info, self._tokenizer, self._name)
        service = self._service
        if self._num_engines == 1:
            service.engine = engine
        elif isinstance(service.engine, Replicas):
            service.engine.replace(info.number, engine)
        elif len(self._engines) == self._num_engines:
            service.engine = Replicas([self._engines[n] for n in range(self._num_engines)])

    def _lose(self, number: int, message: str) -> None:
        if number in self._engines:
            self._engines[number].end(message)

    async def _drain(self) -> None:
        self._service.is_stopping = True
        running = set(self.server_state.tasks)
        if running:
            await asyncio.wait(running)
        self._mailbox.send(Drained())

    async def _beat(self) -> None:
        trim, seen = IdleTrim(), 0
        while True:
            self._report()
            trim.note(works=self.server_state.total_requests != seen)
            seen = self.server_state.total_requests
            await asyncio.sleep(BEAT)

    def _note_closed(self) -> None:
        if not self._num_closed:
            asyncio.get_running_loop().call_soon(self._report)
        self._num_closed += 1

    def _report(self) -> None:
        self._mailbox.send(Beat(self._num_closed))
        self._num_closed = 0


def load_tokenizer(directory: str) -> Any:
    """As the engine wrote it. Nothing of it needs PyTorch, which takes seconds to import."""
    with importing():
        from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
