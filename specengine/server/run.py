"""Running the application: listen first, load the model meanwhile."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from specengine.core.config import ServerConfig
from specengine.core.limits import LimitConfig
from specengine.server.app import create_app
from specengine.server.connection import LimitedProtocol, limited_protocol
from specengine.server.listening import ENDING, address, check_tls, listen, read_keys, ready
from specengine.server.service import ServedEngine, Service
from specengine.server.tracing import otlp_provider

logger = logging.getLogger(__name__)


def serve(
    config: ServerConfig,
    build: Callable[[], ServedEngine],
    limits: LimitConfig | None = None,
) -> None:
    """Answer HTTP until a signal; `build` runs in a thread of its own, and /ready tells when it is
    done. Raises what `build` raised, and ConfigError where the address cannot be listened on."""
    service = Service(limits)
    check_tls(config)
    listener = listen(config)
    url = address(listener, config.scheme)
    tracing = otlp_provider(config.otlp_endpoint)  # what is left of it is sent at exit
    server = make_server(create_app(service, read_keys(config), config, tracing), config)
    failures: list[BaseException] = []

    def load() -> None:
        try:
            service.engine = build()
            served = service.engine
            logger.info("%s", ready(url, served.model_name, served.sampling_defaults))
        except BaseException as failure:
            failures.append(failure)
            server.should_exit = True

    threading.Thread(target=load, name="load", daemon=True).start()
    logger.info("listening on %s", url)
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
    server = make_server(app, config, stops_engine=False)
    thread = threading.Thread(target=server.run, args=([listener],), name="http", daemon=True)
    thread.start()
    try:
        yield address(listener, config.scheme)
    finally:
        server.should_exit = True
        thread.join()


class Server(uvicorn.Server):
    """On a signal, requests that run have `shutdown_timeout` seconds to finish, while new ones
    get a 503 on a port that stays open. Then the engine ends the others with an error."""

    def __init__(
        self, config: uvicorn.Config, service: Service, seconds: float, stops_engine: bool
    ) -> None:
        super().__init__(config)
        self._service = service
        self._seconds = seconds
        self._stops_engine = stops_engine

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.is_stopping = True
        running = set(self.server_state.tasks)
        deadline = time.monotonic() + self._seconds
        while not all(task.done() for task in running) and not self.force_exit:
            if time.monotonic() >= deadline:
                break
            await asyncio.sleep(0.05)
        if self._stops_engine:
            await asyncio.to_thread(self._service.stop)
        await super().shutdown(sockets)


def make_server(app: FastAPI, config: ServerConfig, stops_engine: bool = True) -> Server:
    """stops_engine: it ends with the server."""
    service: Service = app.state.service
    settings = settings_of(app, config, limited_protocol(service.limits))
    return Server(settings, service, config.shutdown_timeout, stops_engine)


def settings_of(
    app: FastAPI, config: ServerConfig, protocol: type[LimitedProtocol]
) -> uvicorn.Config:
    service: Service = app.state.service
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,  # request_log.py's lines say more
        lifespan="off",
        ws="none",
        http=protocol,
        timeout_keep_alive=service.limits.idle_timeout,
        timeout_graceful_shutdown=ENDING,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
    )
