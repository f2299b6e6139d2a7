"""What is held against plain decoding: a way to draft, and the state that the engine is in."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from specengine.core.config import EngineConfig, SpecConfig
from specengine.core.drafter import Drafter
from specengine.core.errors import ConfigError
from specengine.core.registry import VERIFIERS
from specengine.engine.build import build_engine
from specengine.engine.factories import make_verifier
from specengine.engine.loop import Engine
from specengine.engine.proof.any_depth import AnyDepth
from specengine.engine.proof.sampling_drafter import SamplingDrafter
from specengine.engine.proof.shapes import Shape
from specengine.runner.loader.loaded_model import LoadedModel

FRESH, PREFIX_HIT, CHUNKED, RETRACTED = "fresh", "prefix hit", "chunked", "retracted"
CROWDED = "crowded"  # all but fresh

# Where requests are retracted: a few that were let in on the hope that they end at once, and cannot
# all stay.
_TIGHT_SLOTS = 400
_SLOTS = 16384
_RETRACT_EVERY = 2  # steps
# Output tokens that histograms look at.
LENGTH = 4
_QUEUED = 1 << 20  # histograms of drafts ask for thousands at once
_RUNNING = 128
_CHUNK = 64  # prompts of a forward end anywhere in it; the last one is split


@dataclass(frozen=True)
class State:
    """What requests meet in the engine's memory."""

    kind: str
    page_size: int = 1

    def __str__(self) -> str:
        return f"{self.kind}, pages of {self.page_size}"

    @property
    def retracts(self) -> bool:
        return self.kind in (RETRACTED, CROWDED)

    @property
    def is_slow(self) -> bool:
        """Few requests run at a time."""
        return self.kind in (CHUNKED, RETRACTED)

    def apply(self, config: EngineConfig) -> EngineConfig:
        memory = replace(
            config.memory,
            page_size=self.page_size,
            disable_radix_cache=self.kind in (FRESH, CHUNKED),
            max_total_tokens=_TIGHT_SLOTS if self.retracts else _slots(config),
        )
        running = config.schedule.max_running_requests
        schedule = replace(
            config.schedule,
            max_running_requests=_RUNNING if running is None else running,
            chunked_prefill_size=_CHUNK if self.kind in (CHUNKED, CROWDED) else -1,
            max_queued_requests=_QUEUED,
        )
        return replace(config, memory=memory, schedule=schedule)

    def provoke(self, engine: Engine, step: int) -> None:
        """Before each step. The engine learns from retractions how long requests go on, and would
        soon let in no more than can stay. It retracts the newest request, which may not have begun:
        here others leave as well, in the middle of what histograms look at. Where rounds run on
        the device there are few moments for it, and a request that has left once may stay."""
        pipeline = engine.pipeline
        # Requests of a round in flight must not leave.
        if not self.retracts or (pipeline and pipeline.has_in_flight):
            return
        scheduler = engine.scheduler
        scheduler.admission.demand.share = 0.0
        young = [req for req in scheduler.queues.running if len(req.output_ids) < LENGTH]
        if pipeline:
            young = [req for req in young if not req.num_retractions]
        if (pipeline or step % _RETRACT_EVERY == 0) and young:
            scheduler.lifecycle.retract(young[-1])


def _slots(config: EngineConfig) -> int:
    return config.memory.max_total_tokens or _SLOTS


@dataclass(frozen=True)
class Subject:
    """A way to draft. With a `shape`, sampled drafts of that shape take the place of those of the
    algorithm, which then only makes room for them. any_depth: in each round another one, where
    depth may change at all; else it is fixed, so that nothing depends on the clock."""

    name: str
    spec: SpecConfig
    shape: Shape | None = None
    any_depth: bool = False

    def build(
        self, config: EngineConfig, state: State, loaded: LoadedModel, tokens: list[int]
    ) -> Engine:
        """tokens: the few that output is made of. Raises ConfigError or ModelLoadError."""
        spec = self.spec
        if self.shape is not None:
            spec = SpecConfig(algorithm="NGRAM", num_draft_tokens=self.shape.num_nodes)
        spec = replace(spec, adaptive=self.any_depth)
        engine = build_engine(state.apply(replace(config, spec=spec)), loaded)
        adaptive, pipeline = engine.parts.adaptive, engine.pipeline
        if adaptive is not None:
            adaptive.chooser = AnyDepth(adaptive.chooser.steps, adaptive.chooser.sizes)
        if pipeline is not None and (chooser := pipeline.depths.chooser) is not None:
            pipeline.depths.chooser = AnyDepth(chooser.steps, chooser.sizes)
        if self.shape is None:
            return engine
        parts, limit = engine.parts, engine.scheduler.round_limit
        drafter = SamplingDrafter(self.shape, tokens, parts.vocab_size, limit)
        verifier = make_verifier(self.spec, drafter)
        return Engine(replace(parts, drafter=drafter, verifier=verifier))

    def may_be_judged_by(self, name: str, drafter: Drafter) -> bool:
        """Whether the rule of this name can verify such drafts."""
        try:
            make_verifier(replace(self.spec, verify=name), drafter)
        except ConfigError:
            return False
        return True

    def verifiers(self, drafter: Drafter) -> list[str]:
        """The one that was asked for, or all that are lossless and can verify such drafts."""
        if self.spec.verify != "auto":
            return [self.spec.verify]
        found = []
        for name in VERIFIERS:
            with suppress(ConfigError):
                if not make_verifier(replace(self.spec, verify=name), drafter).is_lossy:
                    found.append(name)
        return found

    def verified_by(self, name: str) -> Subject:
        return replace(self, spec=replace(self.spec, verify=name))


PLAIN = Subject("no speculation", SpecConfig())
