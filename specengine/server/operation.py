"""What an operator may add around the routes: other origins, a key for the metrics."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from specengine.core.config import ServerConfig
from specengine.server.middleware import OPEN_PATHS
from specengine.server.request_log import HEADER


def open_paths(config: ServerConfig) -> frozenset[str]:
    """Paths that need no key."""
    return OPEN_PATHS - {"/metrics"} if config.metrics_require_key else OPEN_PATHS


def allow_origins(app: FastAPI, config: ServerConfig) -> None:
    """Let pages of those origins call the server, keys in their headers included. Preflights carry
    no key: this layer is outside of the one that asks for it."""
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[HEADER, "Retry-After"],
        )
