"""What is held against plain decoding: a way to draft, and the state that the engine is in."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from specengine.core.config import EngineConfig, SpecConfig
from specengine.core.errors import ConfigError
from specengine.core.spec import Drafter
from specengine.engine.build import build_engine
from specengine.engine.loop import Engine
from specengine.engine.proof.sampling_drafter import SamplingDrafter
from specengine.engine.proof.shapes import Shape
from specengine.engine.registry import VERIFIERS, make_verifier
from specengine.runner.loader.loaded_model import LoadedModel
from specengine.target.verify.base import TreeVerifier

FRESH, PREFIX_HIT, CHUNKED, RETRACTED = "fresh", "prefix hit", "chunked", "retracted"

# In the state "retracted": so few that requests which were let in on the hope that they end at once
# cannot all stay.
_TIGHT_SLOTS = 208
_CHUNK = 16


@dataclass(frozen=True)
class State:
    """What requests meet in the engine's memory."""

    kind: str
    page_size: int = 1

    def __str__(self) -> str:
        return f"{self.kind}, pages of {self.page_size}"

    def apply(self, config: EngineConfig) -> EngineConfig:
        uncached = self.kind in (FRESH, CHUNKED)
        memory = replace(
            config.memory,
            page_size=self.page_size,
            disable_radix_cache=uncached,
            max_total_tokens=_TIGHT_SLOTS if self.kind == RETRACTED else _slots(config),
        )
        schedule = config.schedule
        if self.kind == CHUNKED:
            schedule = replace(schedule, chunked_prefill_size=_CHUNK)
        return replace(config, memory=memory, schedule=schedule)

    def provoke(self, engine: Engine) -> None:
        """Before each run: the engine learns from the last one how long requests go on."""
        if self.kind == RETRACTED:
            engine.scheduler.admission.demand.share = 0.0


def _slots(config: EngineConfig) -> int:
    return config.memory.max_total_tokens or 8192


@dataclass(frozen=True)
class Subject:
    """A way to draft. With a `shape`, sampled drafts of that shape take the place of those of the
    algorithm, which then only makes room for them."""

    name: str
    spec: SpecConfig
    shape: Shape | None = None

    def build(
        self, config: EngineConfig, state: State, loaded: LoadedModel, tokens: list[int]
    ) -> Engine:
        """tokens: the few that output is made of. Raises ConfigError or ModelLoadError."""
        spec = self.spec
        if self.shape is not None:
            spec = SpecConfig(algorithm="NGRAM", num_draft_tokens=self.shape.num_nodes)
        parts = build_engine(state.apply(replace(config, spec=spec)), loaded).parts
        if self.shape is not None:
            limit = parts.scheduler.round_limit
            drafter: Drafter = SamplingDrafter(self.shape, tokens, parts.vocab_size, limit)
            parts = replace(parts, drafter=drafter, verifier=make_verifier(self.spec, drafter))
        return Engine(parts)

    def verifiers(self, drafter: Drafter) -> dict[str, TreeVerifier]:
        """The one that was asked for, or all that are lossless and can judge such drafts."""
        if self.spec.verify != "auto":
            return {self.spec.verify: make_verifier(self.spec, drafter)}
        found = {}
        for name in VERIFIERS:
            with suppress(ConfigError):
                verifier = make_verifier(replace(self.spec, verify=name), drafter)
                if not verifier.is_lossy:
                    found[name] = verifier
        return found


PLAIN = Subject("no speculation", SpecConfig())
