"""A RoundPipeline whose device and scheduler are scripts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from types import SimpleNamespace
from typing import Any, cast

from specengine.core.spec import VerifyResult
from specengine.core.spec_stats import DepthChoice, DraftShape
from specengine.engine.adaptive.acceptance import RoundObservation
from specengine.engine.pipeline import RoundPipeline
from specengine.engine.round.key import RoundPlan


@dataclass
class ScriptedRounds:
    """Emits one token a request and round, and notes what is called."""

    source: Any = None
    steps: tuple[int, ...] = (0, 3)
    most_tokens: int = 4
    may_pause: bool = False
    round_slots: int = 4
    captures: bool = False  # whatever is launched
    calls: list[str] = field(default_factory=list)
    count: int = 0
    counters: Counter[str] = field(default_factory=Counter)
    results: list[VerifyResult] = field(default_factory=list)
    collected_at: float = 0.0
    host_view: Any = field(default_factory=lambda: SimpleNamespace(forget=lambda: None))
    sampling: Any = field(default_factory=lambda: SimpleNamespace(stochastic=False))

    @property
    def launches(self) -> list[str]:
        return [line for line in self.calls if not line.startswith("collect")]

    def resume(self) -> None:
        """The drafter has missed nothing."""

    def begin(self, reqs: list[Any]) -> None:
        """There is no drafter."""

    def is_done(self, in_flight: Any) -> bool:
        return True

    def launch(self, reqs: list[Any], plan: RoundPlan) -> Any:
        self.counters["captures"] += self.captures
        return self._launch("launch", reqs, plan)

    def follow(self, reqs: list[Any], plan: RoundPlan) -> Any:
        return self._launch("follow", reqs, plan)

    def _launch(self, verb: str, reqs: list[Any], plan: RoundPlan) -> Any:
        self.count += 1
        size = "" if plan.num_nodes is None else f" of {plan.num_nodes}"
        shown = "paused" if plan.paused else f"{max(plan.levels)}{size}"
        self.calls.append(f"{verb} {self.count}: {shown}")
        key = SimpleNamespace(num_steps=max(plan.levels))
        return SimpleNamespace(reqs=reqs, number=self.count, key=key, plan=plan)

    def num_drafts(self, in_flight: Any, levels: list[int]) -> list[int]:
        return levels

    def collect(self, in_flight: Any) -> VerifyResult:
        self.calls.append(f"collect {in_flight.number}")
        self.collected_at = perf_counter()
        count = len(in_flight.reqs)
        result = VerifyResult([[7]] * count, [0] * count, in_flight.plan.levels, None)
        result.path_ranks = [[in_flight.number]] * count
        self.results.append(result)
        return result


@dataclass
class ScriptedDepths:
    """Chooses as `plan` and `sizes` say, and notes what is observed."""

    plan: list[int]
    sizes: list[int | None] = field(default_factory=list)  # of trees; None where there are no more
    pays: bool = False  # drafting does, as soon as context lengths are known a second time
    observed: list[tuple[int, int]] = field(default_factory=list)  # requests and steps
    timed: list[bool] = field(default_factory=list)
    drafting: list[float] = field(default_factory=list)
    drafted: list[list[int]] = field(default_factory=list)
    limits: list[list[int]] = field(default_factory=list)
    trees: list[tuple[int | None, Any]] = field(default_factory=list)  # nodes, and ranks
    paused: list[tuple[int, int]] = field(default_factory=list)
    hosts: list[tuple[int, int]] = field(default_factory=list)  # requests and steps
    contexts: list[float] = field(default_factory=list)

    def set_context_length(self, size: int, tokens: float) -> bool:
        self.contexts.append(tokens)
        return self.pays and len(self.contexts) > 1

    def skipped(self, size: int, rounds: int) -> None:
        self.paused.append((size, rounds))

    def observe_host(self, size: int, shape: DraftShape, seconds: float) -> None:
        assert seconds >= 0
        self.hosts.append((size, shape.num_steps))

    def kept(self, batch_size: int) -> DepthChoice | None:
        return DepthChoice(self.observed[-1][1], "as before", None) if self.observed else None

    def choose(self, batch_size: int) -> DepthChoice:
        num_nodes = self.sizes.pop(0) if self.sizes else None
        return DepthChoice(self.plan.pop(0), f"of {batch_size}", None, num_nodes)

    def observe(self, one: RoundObservation) -> None:
        assert one.limits is not None
        assert len(one.limits) == len(one.num_drafted)
        assert one.from_lookup is None
        assert one.seconds is None or one.seconds >= one.drafting_seconds >= 0
        self.limits.append([*one.limits])
        self.drafting.append(one.drafting_seconds)
        self.drafted.append([*one.num_drafted])
        self.trees.append((one.num_nodes, one.path_ranks))
        self.observed.append((one.batch_size, one.num_steps))
        self.timed.append(one.seconds is not None)


class NoDrafter:
    """The drafter of rounds whose drafts the device makes. Where `lookup` is set, the host
    drafts."""

    lookup = None

    def __init__(self, drafts_on: str = "device") -> None:
        self.drafts_on = drafts_on
        self.drafts_ahead = False

    def captures(self) -> list[Any]:
        return []

    def draft(self, batch: Any) -> Any:
        raise AssertionError("the host is to draft nothing")

    def index_ahead(self, reqs: Any, most: int) -> None:
        """There is no text."""


Follow = Callable[[list[Any], int], list[Any]]


def everyone(reqs: list[Any], slots: int) -> list[Any]:
    return reqs


def no_one(reqs: list[Any], slots: int) -> list[Any]:
    return []


def request(max_depth: int | None = None) -> Any:
    speculative = SimpleNamespace(max_depth=max_depth)
    sampling = SimpleNamespace(speculative=speculative)
    return SimpleNamespace(sampling=sampling, is_finished=False, kv_len=30, last_token=5)


def batch_of(reqs: list[Any]) -> Any:
    return SimpleNamespace(reqs=reqs, batch_size=len(reqs))


def pipeline_of(
    rounds: ScriptedRounds,
    depths: ScriptedDepths | None,
    follow: Follow = everyone,
    drafter: Any = None,
    overlaps: bool = True,
    remaining: int = 9,
) -> RoundPipeline:
    """follow: of a scheduler, which requests go on. remaining: tokens of each request."""
    policy = SimpleNamespace(left_after=lambda reqs, emitted: [remaining for _ in reqs])
    scheduler = SimpleNamespace(follow=follow, policy=policy)
    given: list[Any] = [rounds, drafter or NoDrafter(), scheduler, depths]
    return RoundPipeline(*given, overlaps=overlaps)


def run_rounds(
    rounds: ScriptedRounds,
    plan: list[int] | None,
    follows: list[bool],
    count: int,
    sizes: tuple[int | None, ...] = (),
    pays: bool = False,
    drafter: Any = None,
) -> Any:
    """So many rounds of two requests; the depths. follows: whether the scheduler lets requests
    follow, round by round."""
    left = list(follows)
    depths = None if plan is None else ScriptedDepths(plan, [*sizes], pays=pays)
    pipeline = pipeline_of(rounds, depths, lambda reqs, _: reqs if left.pop(0) else [], drafter)
    batch = batch_of([request(), request()])
    for _ in range(count):
        if not pipeline.has_in_flight:
            pipeline.launch(cast(Any, batch))
        pipeline.collect()
    return depths
