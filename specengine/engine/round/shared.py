"""Device rounds of ranks that share experts: all of one shape (core/sharing.py)."""

from __future__ import annotations

from collections.abc import Sequence

from specengine.core.request import Req
from specengine.core.sharing import ROUND, ExpertSharers, NextRun, RoundShape
from specengine.engine.draft_depth import depths_within
from specengine.engine.round.executor import RoundExecutor
from specengine.engine.round.key import RoundKey, RoundPlan
from specengine.engine.round.sampling import SamplingFeatures


class AgreedRounds:
    """A core.sharing.SharedRounds. Sampling is each rank's own and has no
    collective, so that ranks replay graphs of different features side by side. A graph that one
    rank lacks is captured by all: then all have the same."""

    def __init__(self, sharers: ExpertSharers, executor: RoundExecutor) -> None:
        self.sharers = sharers
        self.executor = executor

    def agree(
        self, key: RoundKey, reqs: list[Req], plan: RoundPlan, in_flight: bool
    ) -> tuple[RoundKey, RoundPlan] | None:
        """What this rank launches now, at least as deep and as large as what it has asked for.
        None: as ExpertSharers.round has it. Waits for the other ranks."""
        next_run = NextRun(
            ROUND,
            batch_size=key.batch_size,
            num_steps=key.num_steps,
            features=_code_of(key.sampling),
            in_flight=int(in_flight),
        )
        shape = self.sharers.round(next_run)
        if shape is None:
            return None
        if shape.num_steps != key.num_steps:
            plan = plan._replace(levels=depths_within(reqs, shape.num_steps))
        return key._replace(batch_size=shape.batch_size, num_steps=shape.num_steps), plan

    def ensure_captured(
        self, shape: RoundShape, features: Sequence[int], may_capture: bool
    ) -> bool:
        greedy = self.executor.sampling.greedy
        kinds = dict.fromkeys([greedy, *map(_features_of, features)])
        keys = [RoundKey(shape.batch_size, shape.num_steps, kind) for kind in kinds]
        missing = [key for key in keys if key not in self.executor.captured]
        if missing and not may_capture:
            return False
        for key in missing:
            self.executor.graph(key)
        return True

    def run_idle(self, shape: RoundShape) -> None:
        key = RoundKey(shape.batch_size, shape.num_steps, self.executor.sampling.greedy)
        self.executor.launch_idle(key)


def _code_of(features: SamplingFeatures) -> int:
    return sum(flag << place for place, flag in enumerate(features))


def _features_of(code: int) -> SamplingFeatures:
    num_features = len(SamplingFeatures._fields)
    return SamplingFeatures(*(bool(code >> place & 1) for place in range(num_features)))
