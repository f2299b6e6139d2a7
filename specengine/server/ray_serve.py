"""Replicas on Ray Serve: `serve run specengine.server.ray_serve:build model=smollm2 replicas=4`.

Each engine is a deployment of one replica, so that a front end can choose among them by the prefix
of a prompt (routing.py); Ray Serve would choose by load alone. Front ends are replicas of one
ingress: the same application as that of `specengine serve`, behind Ray Serve's own HTTP proxy,
which has limits of its own on connections and headers. Messages are those between processes,
carried as MessagePack by one streaming call a request.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
from ray import serve

from specengine.core.config import EngineConfig
from specengine.core.config_sources import PREFIX, resolve_sources
from specengine.core.errors import ConfigError, EngineStoppedError
from specengine.engine.serving.messages import (
    Abort,
    Ask,
    Gained,
    Generate,
    Hello,
    Refused,
    Reply,
    Request,
)
from specengine.server.app import create_app
from specengine.server.distant import DistantEngine
from specengine.server.listening import read_keys
from specengine.server.processes.channel import EngineInfo
from specengine.server.processes.engine_process import save_tokenizer
from specengine.server.processes.front_end import load_tokenizer
from specengine.server.replicas import Replicas
from specengine.server.service import Service

logger = logging.getLogger(__name__)

MOST_ONGOING = 10_000  # calls of a deployment; specengine's own limits come first
OWN = {"replicas": 1, "front_ends": 1}  # arguments beside the options of `specengine serve`
ALIVE_EVERY = 2.0  # seconds between looks at a replica that has failed

_encode = msgspec.msgpack.Encoder().encode
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_infos: msgspec.msgpack.Decoder[EngineInfo] = msgspec.msgpack.Decoder(EngineInfo)
_configs: msgspec.msgpack.Decoder[EngineConfig] = msgspec.msgpack.Decoder(EngineConfig)


def build(args: Mapping[str, Any]) -> Any:
    """The application that Ray Serve runs. args: replicas, front_ends, and options of `specengine
    serve` by their keys, such as page_size. Raises ConfigError."""
    counts = {name: int(args.get(name, default)) for name, default in OWN.items()}
    if min(counts.values()) < 1:
        raise ConfigError("replicas and front_ends must be at least 1")
    options = {f"{PREFIX}{k.upper()}": str(v) for k, v in args.items() if k not in OWN}
    config = resolve_sources({}, options, None)
    encoded = _encode(config)
    num_gpus = 0 if config.model.device == "cpu" else config.parallel.tp_size
    engines = [
        serve.deployment(EngineReplica)
        .options(
            name=f"engine-{number}",
            num_replicas=1,
            max_ongoing_requests=MOST_ONGOING,
            ray_actor_options={"num_cpus": 0, "num_gpus": num_gpus},
        )
        .bind(encoded)
        for number in range(counts["replicas"])
    ]
    front_end = serve.deployment(serve.ingress()(FrontEnd)).options(
        name="front-end",
        num_replicas=counts["front_ends"],
        max_ongoing_requests=MOST_ONGOING,
        ray_actor_options={"num_cpus": 0},
    )
    return front_end.bind(encoded, engines)


class EngineReplica:
    """An engine. A call of `generate` carries one request and what comes of it."""

    def __init__(self, config: bytes) -> None:
        from specengine.engine.async_engine import AsyncEngine
        from specengine.engine.build import build_engine
        from specengine.engine.serving.pacing import pace_prompts

        engine = build_engine(_configs.decode(config))
        pace_prompts(engine.parts)
        self._parts = engine.parts
        self._engine = AsyncEngine(engine, prepares=True)

    def check_health(self) -> None:
        """Called by Ray Serve, which starts another replica where this raises."""
        if not self._engine.is_ready:
            raise RuntimeError("the engine has failed; the log of this replica says why")

    async def describe(self) -> tuple[bytes, dict[str, bytes]]:
        """EngineInfo, and the files of the tokenizer by name."""
        info = EngineInfo.of(self._parts)
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / "tokenizer"
            save_tokenizer(self._parts.tokenizer, str(place))
            files = {one.name: one.read_bytes() for one in place.iterdir()}
        return _encode(info), files

    async def generate(self, request: bytes) -> AsyncIterator[bytes]:
        """Replies, until nothing more can come. Ending it early aborts the request."""
        message = _requests.decode(request)
        loop, key = asyncio.get_running_loop(), uuid4().hex
        waiting: asyncio.Queue[Reply] = asyncio.Queue()

        def send(reply: Reply) -> bool:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(waiting.put_nowait, reply)
            return True

        self._engine.connect(key, send)
        try:
            self._engine.tell(key, message)
            num_open = message.sampling.n if isinstance(message, Generate) else 1
            while num_open > 0:
                reply = await waiting.get()
                num_open -= num_ended(reply, num_open)
                yield _encode(reply)
        finally:
            self._engine.disconnect(key)


def num_ended(reply: Reply, num_open: int) -> int:
    """How many of a request's choices end with this reply."""
    if isinstance(reply, Gained):
        return sum(one.ending is not None for one in reply.details)
    return num_open


class RayEngine(DistantEngine):
    """A replica, as a front end sees it. handle: of its deployment."""

    def __init__(self, info: EngineInfo, tokenizer: Any, handle: Any) -> None:
        super().__init__(info, tokenizer)
        self._handle = handle
        self._stream = handle.options(stream=True)
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by stream; asks have negative numbers
        self._failed: asyncio.Task[None] | None = None

    @property
    def is_ready(self) -> bool:
        return super().is_ready and self._failed is None

    def _carry(self, message: Request) -> None:
        if isinstance(message, Abort):
            if (task := self._tasks.get(message.stream)) is not None:
                task.cancel()
        elif not isinstance(message, Hello):
            number = -1 - message.number if isinstance(message, Ask) else message.stream
            task = asyncio.get_running_loop().create_task(self._run(number, message))
            self._tasks[number] = task
            task.add_done_callback(lambda _: self._tasks.pop(number, None))

    def _disconnect(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    async def _run(self, number: int, message: Generate | Ask) -> None:
        """Ray reports a replica that has ended by errors of several kinds."""
        replies = self._stream.generate.remote(_encode(message))
        try:
            async for reply in replies:
                self._streams.receive(_replies.decode(reply))
        except asyncio.CancelledError:
            replies.cancel()
            raise
        except Exception as error:
            logger.warning("a replica has failed: %s", error)
            self._note_failure()
            if isinstance(message, Generate):
                stopped = EngineStoppedError("the replica has failed and is being restarted")
                self._streams.receive(Refused.of(number, stopped))

    def _note_failure(self) -> None:
        if self._failed is None:
            self._failed = asyncio.get_running_loop().create_task(self._wait_until_back())

    async def _wait_until_back(self) -> None:
        while True:
            try:
                await self._handle.describe.remote()
            except Exception as error:
                logger.info("a replica is not back yet: %s", error)
                await asyncio.sleep(ALIVE_EVERY)
            else:
                self._failed = None
                return


class FrontEnd:
    """Ray Serve's ingress."""

    def __init__(self, config: bytes, engines: list[Any]) -> None:
        self._config = _configs.decode(config)
        self._service = Service(self._config.limits)
        self._loading = asyncio.get_running_loop().create_task(self._load(engines))

    def __serve_build_asgi_app__(self) -> Any:
        server = self._config.server
        return create_app(self._service, read_keys(server), server)

    async def _load(self, handles: list[Any]) -> None:
        """Until then, answers are 503."""
        described = await asyncio.gather(*(one.describe.remote() for one in handles))
        tokenizer = await asyncio.to_thread(_tokenizer_of, described[0][1])
        engines = []
        for (info, _), handle in zip(described, handles, strict=True):
            told = _infos.decode(info)
            # Keys are in the files and options of this process.
            config = replace(told.config, server=self._config.server)
            told.config = config
            engines.append(RayEngine(told, tokenizer, handle))
        self._service.engine = Replicas(engines)


def _tokenizer_of(files: Mapping[str, bytes]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / Path(name).name).write_bytes(content)
        return load_tokenizer(folder)
