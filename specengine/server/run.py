"""Running the application: listen first, load the model meanwhile."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from specengine.core.config import ServerConfig
from specengine.core.errors import ConfigError
from specengine.core.limits import LimitConfig
from specengine.server.app import create_app
from specengine.server.connection import limited_protocol
from specengine.server.service import ServedEngine, Service

logger = logging.getLogger(__name__)

# Seconds that open requests get to finish once the server is told to stop, and then to end.
GRACE = 5
ENDING = 10


def serve(
    config: ServerConfig,
    build: Callable[[], ServedEngine],
    limits: LimitConfig | None = None,
) -> None:
    """Answer HTTP until a signal; `build` runs in a thread of its own, and /ready tells when it is
    done. Raises what `build` raised, and ConfigError where the address cannot be listened on."""
    service = Service(limits)
    listener = listen(config)
    server = make_server(create_app(service, config.api_key), config, service.stop)
    failures: list[BaseException] = []

    def load() -> None:
        try:
            service.engine = build()
            logger.info("ready: %s serves %s", address(listener), service.engine.model_name)
        except BaseException as failure:
            failures.append(failure)
            server.should_exit = True

    threading.Thread(target=load, name="load", daemon=True).start()
    logger.info("listening on %s", address(listener))
    try:
        server.run(sockets=[listener])
    finally:
        service.stop()
    if failures:
        raise failures[0]


@contextmanager
def background_server(app: FastAPI, config: ServerConfig) -> Iterator[str]:
    """Serve `app` from a thread; yields its address, such as http://127.0.0.1:8000."""
    listener = listen(config)
    server = make_server(app, config, lambda: None)
    thread = threading.Thread(target=server.run, args=([listener],), name="http", daemon=True)
    thread.start()
    try:
        yield address(listener)
    finally:
        server.should_exit = True
        thread.join()


def listen(config: ServerConfig) -> socket.socket:
    """A listening socket; connections wait in it until the server runs."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port} ({error.strerror}); choose another "
            "--host or --port (0 takes any free port)"
        ) from error


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn cancels what is open when it stops; here the engine ends it first, with an error."""

    def __init__(self, config: uvicorn.Config, stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._stop = stop

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end_requests())
        await super().shutdown(sockets)
        ending.cancel()

    async def _end_requests(self) -> None:
        await asyncio.sleep(GRACE)
        await asyncio.to_thread(self._stop)


def make_server(
    app: FastAPI, config: ServerConfig, stop_engine: Callable[[], None]
) -> uvicorn.Server:
    limits: LimitConfig = app.state.service.limits
    settings = uvicorn.Config(
        app,
        log_config=None,
        access_log=config.log_level in ("debug", "info"),
        lifespan="off",
        ws="none",
        http=limited_protocol(limits),
        timeout_keep_alive=limits.idle_timeout,
        timeout_graceful_shutdown=GRACE + ENDING,
    )
    return Server(settings, stop_engine)
