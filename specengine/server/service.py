"""What the routes work on: the engine, once it is there, and the metrics."""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator
from typing import Any, Protocol

from specengine.core.config import EngineConfig
from specengine.core.limits import LimitConfig
from specengine.core.sampling import SamplingParams
from specengine.core.version import __version__
from specengine.engine.outputs import EngineStats, RequestOutput
from specengine.server.errors import ApiError
from specengine.server.metrics import ServerMetrics


class ServedEngine(Protocol):
    """engine.AsyncEngine, as the server sees it."""

    @property
    def tokenizer(self) -> Any: ...

    @property
    def config(self) -> EngineConfig: ...

    @property
    def model_name(self) -> str: ...

    @property
    def context_length(self) -> int: ...

    @property
    def sampling_defaults(self) -> dict[str, float]:
        """Fields of SamplingParams, by name, where a request of OpenAI's kind leaves them out."""
        ...

    @property
    def is_embedding(self) -> bool: ...

    @property
    def is_ready(self) -> bool: ...

    def generate(
        self, prompt_ids: list[int], sampling: SamplingParams, rid: str, stream: bool = True
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of all choices, interleaved; without `stream`, one of each, at its end.
        Closing the iterator early aborts the request."""
        ...

    async def embed(self, prompt_ids: list[int], rid: str) -> list[float]:
        """The vector of a prompt, where is_embedding."""
        ...

    async def give_up(self, names: list[str] | None = None) -> int:
        """End the requests of these names, or all; their number."""
        ...

    async def flush_cache(self) -> int:
        """Forget the prefixes that no request holds; their tokens."""
        ...

    async def update_weights(self, model: str | None = None, draft_model: str | None = None) -> int:
        """Other weights in place; the tokens of KV forgotten. Raises RequestError."""
        ...

    async def sleep(self, level: int = 1) -> int:
        """Give memory back; the bytes. Raises RequestError."""
        ...

    async def wake(self) -> None:
        """Take it again. Raises RequestError."""
        ...

    async def is_sleeping(self) -> bool: ...

    def stats(self) -> EngineStats:
        """Counters, as of the last `refresh` at least."""
        ...

    async def refresh(self) -> None:
        """Bring `stats` up to date."""
        ...

    def shutdown(self) -> None: ...


class Service:
    """`engine` is None while the model loads."""

    def __init__(self, limits: LimitConfig | None = None) -> None:
        self.limits = limits or LimitConfig()
        self.engine: ServedEngine | None = None
        self.is_stopping = False  # new requests are refused
        self.started = int(time.time())
        self.metrics = ServerMetrics(self._stats)
        self._fingerprint: tuple[EngineConfig, str] | None = None  # the last

    def require(self, model: str | None = None) -> ServedEngine:
        """The engine. ApiError where it is not ready, or does not serve `model`."""
        if self.is_stopping:
            raise ApiError(503, "the server is shutting down", code="stopping")
        if self.engine is None:
            raise ApiError(503, "the model is still loading; /ready tells when", code="loading")
        if not self.engine.is_ready:
            raise ApiError(503, "the engine has stopped; the server's log says why", code="stopped")
        if model is not None and model not in self.names(self.engine):
            served = " or ".join(map(repr, self.names(self.engine)))
            message = f"the model {model!r} is not served here; ask for {served}"
            raise ApiError(404, message, "model", "model_not_found")
        return self.engine

    def require_generator(self, model: str | None = None) -> ServedEngine:
        """The engine, if it generates text. Raises ApiError."""
        engine = self.require(model)
        if engine.is_embedding:
            message = f"{engine.model_name} is an embedding model; use /v1/embeddings"
            raise ApiError(501, message, "model", "not_supported")
        return engine

    def require_embedder(self, model: str | None = None) -> ServedEngine:
        """The engine, if it makes vectors. Raises ApiError."""
        engine = self.require(model)
        if not engine.is_embedding:
            message = (
                f"{engine.model_name} generates text and has no embeddings; serve a model whose "
                "directory says how to pool, in sentence-transformers' modules.json"
            )
            raise ApiError(501, message, "model", "not_supported")
        return engine

    def names(self, engine: ServedEngine) -> tuple[str, ...]:
        """Under which requests may ask for the model."""
        return engine.config.model.served_names or (engine.model_name,)

    def fingerprint(self, config: EngineConfig) -> str:
        """Changes whenever the same seed may give another text."""
        if self._fingerprint is None or self._fingerprint[0] is not config:
            parts = (__version__, config.model, config.spec)
            digest = hashlib.sha256(repr(parts).encode()).hexdigest()
            self._fingerprint = config, "fp_" + digest[:12]
        return self._fingerprint[1]

    def stop(self) -> None:
        """End the engine, and with it every open request."""
        if self.engine is not None:
            self.engine.shutdown()

    async def render_metrics(self) -> bytes:
        if self.engine is not None and self.engine.is_ready:
            await self.engine.refresh()
        return self.metrics.render()

    def _stats(self) -> EngineStats | None:
        return None if self.engine is None else self.engine.stats()
