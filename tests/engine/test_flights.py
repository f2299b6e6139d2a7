"""Who flies when, with a device that is a script."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import perf_counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from specengine.core.spec import DraftProposal, VerifyResult
from specengine.draft.empty import EmptyDrafter
from specengine.engine.adaptive.acceptance import RoundObservation
from specengine.engine.adaptive.choose import Decision
from specengine.engine.adaptive.costs import DraftShape
from specengine.engine.flights import Flights
from specengine.engine.host_drafts import HostDrafts
from specengine.engine.round_form import Wish


@dataclass
class ScriptedRound:
    """Emits one token a request and round; keeps a diary."""

    drafter: Any = None
    steps: tuple[int, ...] = (0, 3)
    num_nodes: int = 4
    may_sleep: bool = False
    num_slots: int = 4
    diary: list[str] = field(default_factory=list)
    count: int = 0
    counters: Counter[str] = field(default_factory=Counter)
    landed: list[Any] = field(default_factory=list)
    captures: bool = False  # whatever is launched
    landed_at: float = 0.0
    told: tuple[str, ...] = ("num_drafted", "drafted_nodes", "of_text")

    known: Any = field(default_factory=lambda: SimpleNamespace(forget=lambda: None))
    choices: Any = field(default_factory=lambda: SimpleNamespace(weighs=False))

    def wake(self) -> None:
        """Nothing was missed."""

    def read_anew(self, reqs: list[Any]) -> None:
        """No drafter reads."""

    def launch(self, reqs: list[Any], wish: Wish) -> Any:
        self.counters["captures"] += self.captures
        return self._fly("launch", reqs, wish)

    def follow(self, reqs: list[Any], wish: Wish) -> Any:
        return self._fly("follow", reqs, wish)

    def _fly(self, verb: str, reqs: list[Any], wish: Wish) -> Any:
        self.count += 1
        size = "" if wish.num_nodes is None else f" of {wish.num_nodes}"
        shown = "asleep" if wish.asleep else f"{max(wish.num_drafted)}{size}"
        self.diary.append(f"{verb} {self.count}: {shown}")
        told: dict[str, Any] = {name: getattr(wish, name) for name in self.told}
        return SimpleNamespace(reqs=reqs, name=self.count, **told)

    def num_drafts(self, flight: Any, levels: list[int]) -> list[int]:
        return levels

    def land(self, flight: Any) -> VerifyResult:
        self.diary.append(f"land {flight.name}")
        self.landed_at = perf_counter()
        count = len(flight.reqs)
        result = VerifyResult([[7]] * count, [0] * count, flight.num_drafted, None)
        result.path_ranks = [[flight.name]] * count
        self.landed.append(result)
        return cast(Any, self.landed[-1])


def request(max_depth: int | None = None) -> Any:
    speculative = SimpleNamespace(max_depth=max_depth)
    sampling = SimpleNamespace(speculative=speculative)
    return SimpleNamespace(sampling=sampling, is_finished=False, kv_len=30)


@dataclass
class ScriptedDepths:
    plan: list[int]
    sizes: list[int | None] = field(default_factory=list)  # likewise; None where there are no more
    seen: list[tuple[int, int]] = field(default_factory=list)
    timed: list[bool] = field(default_factory=list)
    drafting: list[float] = field(default_factory=list)
    drafted: list[list[int]] = field(default_factory=list)
    limits: list[list[int]] = field(default_factory=list)
    told: list[tuple[int | None, Any]] = field(default_factory=list)
    dozed: list[tuple[int, int]] = field(default_factory=list)
    hosts: list[tuple[int, int]] = field(default_factory=list)  # requests and steps
    texts: list[float] = field(default_factory=list)
    pays: bool = False  # to draft, as soon as it is known how long texts have become

    def set_context_length(self, size: int, tokens: float) -> bool:
        self.texts.append(tokens)
        return self.pays and len(self.texts) > 1

    def skipped(self, size: int, rounds: int) -> None:
        self.dozed.append((size, rounds))

    def observe_host(self, size: int, shape: DraftShape, seconds: float) -> None:
        assert seconds >= 0
        self.hosts.append((size, shape.num_steps))

    def standing(self, batch_size: int) -> Decision | None:
        return Decision(self.seen[-1][1], "it stands", None) if self.seen else None

    def choose(self, batch_size: int) -> Decision:
        num_nodes = self.sizes.pop(0) if self.sizes else None
        return Decision(self.plan.pop(0), f"of {batch_size}", None, num_nodes)

    def observe(self, one: RoundObservation) -> None:
        assert one.limits is not None
        assert len(one.limits) == len(one.num_drafted)
        assert one.from_lookup is None
        self.limits.append([*one.limits])
        assert one.seconds is None or one.seconds >= one.drafting_seconds >= 0
        self.drafting.append(one.drafting_seconds)
        self.drafted.append([*one.num_drafted])
        self.told.append((one.num_nodes, one.path_ranks))
        self.seen.append((one.batch_size, one.num_steps))
        self.timed.append(one.seconds is not None)


def scheduler_of(follow: Callable[..., list[Any]], remaining: int = 9) -> Any:
    policy = SimpleNamespace(left_after=lambda reqs, said: [remaining for _ in reqs])
    return SimpleNamespace(follow=follow, policy=policy)


class ScriptedDrafter:
    def draft(self, batch: Any) -> Any:
        raise AssertionError("nobody may be asked here")


def fly(
    device: ScriptedRound,
    plan: list[int] | None,
    follows: list[bool],
    rounds: int,
    sizes: tuple[int | None, ...] = (),
    pays: bool = False,
) -> Any:
    """follows: whether the scheduler lets requests follow, round by round."""
    left = list(follows)
    scheduler = scheduler_of(lambda reqs, nodes: reqs if left.pop(0) else [])
    depths = None if plan is None else ScriptedDepths(plan, [*sizes], pays=pays)
    flights = Flights(
        cast(Any, device),
        cast(Any, ScriptedDrafter()),
        cast(Any, scheduler),
        cast(Any, depths),
        overlaps=True,
    )
    batch = SimpleNamespace(reqs=[request(), request()], batch_size=2)
    for _ in range(rounds):
        if not flights.in_the_air:
            flights.launch(cast(Any, batch))
        flights.land()
    return depths


def test_the_next_is_launched_before_the_last_lands() -> None:
    device = ScriptedRound()
    fly(device, None, [True, True, False], 3)
    assert device.diary == [
        "launch 1: 3",
        "follow 2: 3",
        "land 1",
        "follow 3: 3",
        "land 2",
        "land 3",
    ]


def test_depths_are_observed_with_the_round_that_had_them() -> None:
    device = ScriptedRound()
    depths = fly(device, [3, 0, 3], [True, True, False], 3)
    assert device.diary[:3] == ["launch 1: 3", "follow 2: 0", "land 1"]
    assert depths.seen == [(2, 3), (2, 0), (2, 3)]
    assert all(depths.timed)


def test_how_much_text_there_is_is_asked_now_and_then() -> None:
    depths = fly(ScriptedRound(), [0] * 33, [True] * 33, 32)
    assert depths.texts == [30.0] * 3, "before the first of sixteen rounds"


def test_the_host_is_told_of_with_the_round_that_it_worked_for() -> None:
    """What it does between two landings is for the first of them."""
    depths = fly(ScriptedRound(), [3, 0, 3, 0], [True, True, True, False], 4)
    assert depths.seen == [(2, 3), (2, 0), (2, 3), (2, 0)]
    assert depths.hosts == depths.seen[:3]


def test_the_host_is_not_told_of_behind_anything_else() -> None:
    device, depths = ScriptedRound(), ScriptedDepths([3, 3, 3, 3])
    scheduler = scheduler_of(lambda reqs, nodes: [])
    given = cast(Any, device), cast(Any, ScriptedDrafter()), scheduler, cast(Any, depths)
    flights = Flights(*given, overlaps=True)
    batch = cast(Any, SimpleNamespace(reqs=[request(), request()], batch_size=2))
    for step in range(4):
        if step == 1:
            flights.interrupt(cast(Any, SimpleNamespace(prompt_reqs=[], forward_mode=None)))
        if step == 2:
            device.captures = True
        flights.launch(batch)
        device.captures = False
        flights.land()
    assert depths.hosts == [(2, 3)], "neither behind a prefill nor beside a capture"


@pytest.mark.parametrize("overlaps", [True, False])
def test_the_host_is_not_told_of_where_somebody_ended(overlaps: bool) -> None:
    """Its answer is made then, which is no depth's fault."""
    device, depths, reqs = ScriptedRound(), ScriptedDepths([3] * 6), [request(), request()]

    def running(reqs: list[Any], num_slots: int) -> list[Any]:
        return [req for req in reqs if not req.is_finished]

    given = cast(Any, device), cast(Any, ScriptedDrafter()), scheduler_of(running)
    flights = Flights(*given, cast(Any, depths), overlaps=overlaps)
    told = []
    for number in range(5):
        if not flights.in_the_air:
            left = running(reqs, 0)
            flights.launch(cast(Any, SimpleNamespace(reqs=left, batch_size=len(left))))
        flights.land()
        told.append(len(depths.hosts))
        reqs[1].is_finished = number >= 2  # by what the third round said
    assert told == [0, 1, 2, 2, 3]


def test_sizes_are_told_with_the_round_that_had_them() -> None:
    """And what stood of it."""
    device = ScriptedRound()
    depths = fly(device, [3, 3, 0], [True, True, False], 3, (8, None, None))
    assert device.diary[:3] == ["launch 1: 3 of 8", "follow 2: 3", "land 1"]
    assert depths.told == [(8, [[1]] * 2), (None, [[2]] * 2), (None, [[3]] * 2)]


def test_what_requests_allow_is_drafted() -> None:
    device = ScriptedRound()
    scheduler = scheduler_of(lambda reqs, nodes: reqs)
    flights = Flights(
        cast(Any, device), cast(Any, ScriptedDrafter()), cast(Any, scheduler), None, overlaps=True
    )
    reqs = [request(), request(0), request(2), request(9)]
    flights.launch(cast(Any, SimpleNamespace(reqs=reqs, batch_size=4)))
    for _ in range(2):
        assert flights.land().result.num_drafted == [3, 0, 2, 3]


@pytest.mark.parametrize(("remaining", "useful"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 3), (5, 3)])
def test_drafts_past_the_end_of_an_output_are_not_counted(remaining: int, useful: int) -> None:
    """Though what they tell of the drafter is learned."""
    depths = ScriptedDepths([3])
    flights = Flights(
        cast(Any, ScriptedRound()),
        cast(Any, ScriptedDrafter()),
        scheduler_of(lambda reqs, nodes: [], remaining),
        cast(Any, depths),
        overlaps=True,
    )
    flights.launch(cast(Any, SimpleNamespace(reqs=[request(), request(0)], batch_size=2)))
    assert flights.land().result.num_drafted == [useful, 0]
    assert depths.drafted == [[3, 0]]


def test_padding_that_stood_is_told_beside_what_was_drafted() -> None:
    """Of the second request nothing was; what lies there stands, as long as the target says so."""

    class Lucky(ScriptedRound):
        def land(self, flight: Any) -> VerifyResult:
            result = super().land(flight)
            return replace(result, num_accepted=[1, 2], num_drafted=[3, 2])

    depths, scheduler = ScriptedDepths([3]), scheduler_of(lambda reqs, nodes: [])
    given = cast(Any, Lucky()), cast(Any, ScriptedDrafter()), scheduler, cast(Any, depths)
    flights = Flights(*given, overlaps=True)
    flights.launch(cast(Any, SimpleNamespace(reqs=[request(), request(0)], batch_size=2)))
    flights.land()
    assert (depths.drafted, depths.limits) == ([[3, 2]], [[3, 0]])


def test_what_flew_for_nobody_tells_nothing() -> None:
    """All had ended, and it was in the air until somebody came."""
    device, req, other = ScriptedRound(), request(), request()
    depths, scheduler = ScriptedDepths([3, 3]), scheduler_of(lambda reqs, nodes: [])
    given = cast(Any, device), cast(Any, ScriptedDrafter()), scheduler, cast(Any, depths)
    flights = Flights(*given, overlaps=True)
    for ended in (False, True):
        req.is_finished, other.is_finished = True, ended
        flights.launch(cast(Any, SimpleNamespace(reqs=[req, other], batch_size=2)))
        assert flights.land().result.depth is not None
        assert depths.seen == [(2, 3)]


def test_a_drafter_sleeps_while_plain_decoding_stands() -> None:
    device = ScriptedRound(may_sleep=True)
    depths = fly(device, [3, 0, 0], [True, True, True, False], 4)
    assert [line for line in device.diary if "land" not in line] == [
        "launch 1: 3",
        "follow 2: 0",
        "follow 3: 0",
        "follow 4: asleep",
    ]
    assert depths.seen == [(2, 3), (2, 0), (2, 0)]
    reasons = [result.depth.reason for result in device.landed]
    assert reasons == ["of 2"] * 3 + ["it stands"]


def test_it_wakes_where_texts_become_so_long_that_drafts_pay() -> None:
    """Which is asked before every sixteenth round."""
    device = ScriptedRound(may_sleep=True)
    fly(device, [0] * 9, [True] * 20, 19, pays=True)
    asleep = ["asleep" in line for line in device.diary if "land" not in line]
    assert all(asleep[2:16])
    assert not any(asleep[16:19])


def test_of_rounds_that_it_sleeps_through_one_in_eight_is_learned_from() -> None:
    """For all of them."""
    device = ScriptedRound(may_sleep=True)
    depths = fly(device, [0, 0], [True] * 20, 20)
    asleep = sum("asleep" in line for line in device.diary[:-2])
    told = len(depths.seen) - (20 - asleep)
    assert asleep > 16
    assert told == len(depths.dozed) == 2
    assert set(depths.dozed) == {(2, 7)}
    assert len(depths.hosts) == len(depths.seen) - 1, "nor of the host but as often"


def test_rounds_without_drafts_of_the_host_follow_each_other() -> None:
    device = ScriptedRound(HostDrafts(4, 3, torch.device("cpu")))
    depths = fly(device, [0, 0, 0], [True, True, False], 3)
    assert device.diary[:3] == ["launch 1: 0", "follow 2: 0", "land 1"]
    assert depths.timed == [False, True, True], "the first overlaps with nothing"


def test_a_depth_that_cannot_follow_is_kept_for_the_next_launch() -> None:
    device = ScriptedRound(HostDrafts(4, 3, torch.device("cpu")))
    depths = ScriptedDepths([0, 3])
    flights = Flights(
        cast(Any, device),
        cast(Any, ScriptedDrafter()),
        cast(Any, SimpleNamespace(follow=lambda reqs, nodes: reqs)),
        cast(Any, depths),
        overlaps=True,
    )
    flights.launch(cast(Any, SimpleNamespace(reqs=[request()], batch_size=1)))
    flights.land()
    assert device.diary == ["launch 1: 0", "land 1"], "drafts need the token that landed"
    assert not flights.in_the_air
    assert flights._choose([request()]).num_steps == 3


def test_a_depth_without_a_graph_is_kept_for_the_launch_that_makes_one() -> None:
    """Where probes come every other round it would never be launched."""

    class Graphless(ScriptedRound):
        def follow(self, reqs: list[Any], wish: Wish) -> Any:
            self.diary.append(f"no graph: {max(wish.num_drafted)}")

    device = Graphless()
    depths = fly(device, [3, 1, 2], [True] * 3, 2)
    assert device.diary == [
        "launch 1: 3",
        "no graph: 1",
        "land 1",
        "launch 2: 1",
        *device.diary[4:],
    ]
    assert depths.seen == [(2, 3), (2, 1)]


def test_a_choice_is_not_kept_past_anything_else_that_ran() -> None:
    """Other requests may come of it."""
    device = ScriptedRound(HostDrafts(4, 3, torch.device("cpu")))
    depths, scheduler = ScriptedDepths([0, 3, 0]), SimpleNamespace(follow=lambda reqs, nodes: reqs)
    given = cast(Any, device), cast(Any, ScriptedDrafter()), cast(Any, scheduler)
    flights = Flights(*given, cast(Any, depths), overlaps=True)
    flights.launch(cast(Any, SimpleNamespace(reqs=[request()], batch_size=1)))
    flights.land()
    flights.interrupt(cast(Any, SimpleNamespace(prompt_reqs=[], forward_mode=None)))
    assert flights._choose([request()] * 4).reason == "of 4"


def test_the_time_of_drafting_is_told_with_the_round_that_drafted() -> None:
    class Drafting(ScriptedDrafter):
        def draft(self, batch: Any) -> DraftProposal:
            return EmptyDrafter().draft(batch)

    device = ScriptedRound(HostDrafts(4, 3, torch.device("cpu")))
    depths = ScriptedDepths([3, 0, 0])
    never = SimpleNamespace(follow=lambda reqs, nodes: [])
    given = cast(Any, device), cast(Any, Drafting()), cast(Any, never), cast(Any, depths)
    flights = Flights(*given, overlaps=True)
    req = request()
    req.last_token = 5
    batch = SimpleNamespace(reqs=[req], batch_size=1)
    for _ in range(3):
        flights.launch(cast(Any, batch))
        flights.land()
    assert depths.drafting[0] > 0
    assert depths.drafting[1:] == [0.0, 0.0]
