"""Wall-clock time of a setting beside plain decoding, in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

from specengine.core.sampling import SamplingParams
from specengine.core.spec_stats import SpecStats
from specengine.engine.loop import Engine
from specengine.engine.outputs import add_stats


@dataclass(frozen=True)
class Speed:
    """Output tokens a second of whole answers, prefill included. Each repeat runs both engines one
    after the other on the same prompts, now this one first, now that one."""

    batch_size: int
    prompts: int
    tokens: int  # that one repeat emits
    tau: float  # by the engine's own counters while it was timed, graphs and all
    setting: tuple[float, ...]  # tokens a second, by repeat
    plain: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        return [ours / theirs for ours, theirs in zip(self.setting, self.plain, strict=True)]

    @property
    def ratio(self) -> float:
        """The median over repeats; above 1 the setting is faster."""
        return median(self.ratios)


@dataclass(frozen=True)
class SpeedPlan:
    batch_size: int = 1
    repeats: int = 3


def measure_speed(
    setting: Engine,
    plain: Engine,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    plan: SpeedPlan,
    on_answer: Callable[[int], None],
) -> Speed:
    """One more repeat than counted warms both up. No recorder may look on: rounds would leave
    their graphs."""
    rates: dict[Engine, list[float]] = {setting: [], plain: []}
    timed = Timing()
    for repeat in range(plan.repeats + 1):
        order = (setting, plain) if repeat % 2 else (plain, setting)
        for engine in order:
            timing = run_batches(engine, prompts, params, plan.batch_size, on_answer)
            if repeat:
                rates[engine].append(timing.tokens / timing.seconds)
            if engine is setting:
                timed = timing
    return Speed(
        batch_size=plan.batch_size,
        prompts=len(prompts),
        tokens=timed.tokens,
        tau=timed.spec.mean_acceptance_length,
        setting=tuple(rates[setting]),
        plain=tuple(rates[plain]),
    )


@dataclass
class Timing:
    """Of one run over all prompts."""

    tokens: int = 0
    seconds: float = 0.0
    spec: SpecStats = field(default_factory=SpecStats)


def run_batches(
    engine: Engine,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    batch_size: int,
    on_answer: Callable[[int], None],
) -> Timing:
    """A batch is finished before the next one begins."""
    timing, start = Timing(), perf_counter()
    for first in range(0, len(prompts), batch_size):
        for number, prompt in enumerate(prompts[first : first + batch_size]):
            engine.add_request(str(number), prompt, params, stream=False)
        while engine.has_work:
            for output in engine.step():
                if output.finish_reason is not None:
                    timing.tokens += len(output.token_ids)
                    add_stats(timing.spec, output.spec)
                    on_answer(len(output.token_ids))
    timing.seconds = perf_counter() - start
    return timing
