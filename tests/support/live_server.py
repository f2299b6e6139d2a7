"""A real engine behind the real server, on a socket of this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from specengine.core.config import ServerConfig, SpecConfig
from specengine.core.config_sources import config_from_flags
from specengine.engine.async_engine import AsyncEngine
from specengine.engine.build import build_engine
from specengine.engine.loop import Engine
from specengine.server.app import create_app
from specengine.server.run import background_server
from specengine.server.service import Service


@dataclass
class LiveServer:
    url: str
    engine: Engine
    asynchronous: AsyncEngine


@contextmanager
def live_server(
    flags: dict[str, Any], spec: SpecConfig | None, server: ServerConfig | None = None
) -> Iterator[LiveServer]:
    """flags: of `specengine serve`, with underscores."""
    engine = build_engine(config_from_flags(flags, spec))
    service, asynchronous = Service(), AsyncEngine(engine)
    service.engine = asynchronous
    config = server or ServerConfig(port=0)
    try:
        with background_server(create_app(service, config=config), config) as url:
            yield LiveServer(url, engine, asynchronous)
    finally:
        asynchronous.shutdown()
