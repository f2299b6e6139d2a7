"""Which round is launched when, and what is learned from it, with a device that is a script."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from specengine.core.spec import DraftProposal, VerifyResult
from specengine.draft.empty import EmptyDrafter
from specengine.engine.round.key import RoundPlan
from tests.support.scripted_rounds import (
    NoDrafter,
    ScriptedDepths,
    ScriptedRounds,
    batch_of,
    no_one,
    pipeline_of,
    request,
    run_rounds,
)

PREFILL = cast(Any, SimpleNamespace(prompt_reqs=[], forward_mode=None))


class LookupSource:
    """A source whose drafts the host makes."""

    model_steps = 0

    def send(self, proposal: DraftProposal, levels: list[int]) -> RoundPlan:
        return RoundPlan(proposal.num_drafted)


def test_next_round_is_launched_before_the_last_is_collected() -> None:
    rounds = ScriptedRounds()
    run_rounds(rounds, None, [True, True, False], 3)
    assert rounds.calls == [
        "launch 1: 3",
        "follow 2: 3",
        "collect 1",
        "follow 3: 3",
        "collect 2",
        "collect 3",
    ]


def test_depths_and_host_time_are_observed_with_their_own_round() -> None:
    """What the host does between two collected rounds counts for the first of them."""
    rounds = ScriptedRounds()
    depths = run_rounds(rounds, [3, 0, 3, 0], [True, True, True, False], 4)
    assert rounds.calls[:3] == ["launch 1: 3", "follow 2: 0", "collect 1"]
    assert depths.observed == [(2, 3), (2, 0), (2, 3), (2, 0)]
    assert all(depths.timed)
    assert depths.hosts == depths.observed[:3]


@pytest.mark.parametrize("drafts", [3, 0])
def test_round_launched_ahead_is_forgotten_where_the_one_before_gives_no_result(
    drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on from tokens that nothing commits."""
    rounds, depths = ScriptedRounds(), ScriptedDepths([drafts] * 2)
    rounds.sampling.edits = SimpleNamespace(forget=lambda: None)
    pipeline = pipeline_of(rounds, depths)

    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(depths, "observe", fail)
    pipeline.launch(batch_of([request()]))
    with pytest.raises(MemoryError):
        pipeline.collect()
    assert rounds.launches == [f"launch 1: {drafts}", f"follow 2: {drafts}"]
    assert not pipeline.has_in_flight


def test_context_length_is_read_before_every_sixteenth_round() -> None:
    depths = run_rounds(ScriptedRounds(), [0] * 33, [True] * 33, 32)
    assert depths.contexts == [30.0] * 3


def test_host_time_is_not_learned_behind_a_prefill_or_beside_a_capture() -> None:
    rounds, depths = ScriptedRounds(), ScriptedDepths([3, 3, 3, 3])
    pipeline, batch = pipeline_of(rounds, depths, no_one), batch_of([request(), request()])
    for step in range(4):
        if step == 1:
            pipeline.interrupt(PREFILL)
        rounds.captures = step == 2
        pipeline.launch(batch)
        pipeline.collect()
    assert depths.hosts == [(2, 3)]


@pytest.mark.parametrize("overlaps", [True, False])
def test_host_time_is_not_learned_where_a_request_ended(overlaps: bool) -> None:
    """The host makes its output then, whatever the depth."""
    depths, reqs = ScriptedDepths([3] * 6), [request(), request()]

    def running(reqs: list[Any], num_slots: int) -> list[Any]:
        return [req for req in reqs if not req.is_finished]

    pipeline = pipeline_of(ScriptedRounds(), depths, running, overlaps=overlaps)
    learned = []
    for number in range(5):
        if not pipeline.has_in_flight:
            pipeline.launch(batch_of(running(reqs, 0)))
        pipeline.collect()
        learned.append(len(depths.hosts))
        reqs[1].is_finished = number >= 2  # by what the third round emitted
    assert learned == [0, 1, 2, 2, 3]


def test_tree_sizes_are_observed_with_their_own_round() -> None:
    rounds = ScriptedRounds()
    depths = run_rounds(rounds, [3, 3, 0], [True, True, False], 3, (8, None, None))
    assert rounds.calls[:3] == ["launch 1: 3 of 8", "follow 2: 3", "collect 1"]
    assert depths.trees == [(8, [[1]] * 2), (None, [[2]] * 2), (None, [[3]] * 2)]


def test_each_request_drafts_as_deep_as_it_allows() -> None:
    pipeline = pipeline_of(ScriptedRounds(), None)
    pipeline.launch(batch_of([request(), request(0), request(2), request(9)]))
    for _ in range(2):
        assert pipeline.collect().result.num_drafted == [3, 0, 2, 3]


@pytest.mark.parametrize(("remaining", "useful"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 3), (5, 3)])
def test_drafts_past_the_end_are_learned_from_but_not_counted(remaining: int, useful: int) -> None:
    depths = ScriptedDepths([3])
    pipeline = pipeline_of(ScriptedRounds(), depths, no_one, remaining=remaining)
    pipeline.launch(batch_of([request(), request(0)]))
    assert pipeline.collect().result.num_drafted == [useful, 0]
    assert depths.drafted == [[3, 0]]


def test_accepted_padding_is_observed_beside_the_limits() -> None:
    """Nothing was drafted for the second request; padding that is right is accepted."""

    class Lucky(ScriptedRounds):
        def collect(self, in_flight: Any) -> VerifyResult:
            result = super().collect(in_flight)
            return replace(result, num_accepted=[1, 2], num_drafted=[3, 2])

    depths = ScriptedDepths([3])
    pipeline = pipeline_of(Lucky(), depths, no_one)
    pipeline.launch(batch_of([request(), request(0)]))
    pipeline.collect()
    assert (depths.drafted, depths.limits) == ([[3, 2]], [[3, 0]])


def test_round_whose_requests_have_all_ended_is_not_learned_from() -> None:
    """It was in flight until another request came."""
    req, other = request(), request()
    depths = ScriptedDepths([3, 3])
    pipeline = pipeline_of(ScriptedRounds(), depths, no_one)
    for ended in (False, True):
        req.is_finished, other.is_finished = True, ended
        pipeline.launch(batch_of([req, other]))
        assert pipeline.collect().result.depth is not None
        assert depths.observed == [(2, 3)]


def test_drafter_pauses_while_plain_decoding_is_best() -> None:
    rounds = ScriptedRounds(may_pause=True)
    depths = run_rounds(rounds, [3, 0, 0], [True, True, True, False], 4)
    assert rounds.launches == ["launch 1: 3", "follow 2: 0", "follow 3: 0", "follow 4: paused"]
    assert depths.observed == [(2, 3), (2, 0), (2, 0)]
    reasons = [result.depth.reason for result in rounds.results if result.depth]
    assert reasons == ["of 2"] * 3 + ["as before"]


def test_paused_drafter_resumes_where_context_makes_drafts_pay() -> None:
    rounds = ScriptedRounds(may_pause=True)
    run_rounds(rounds, [0] * 9, [True] * 20, 19, pays=True)
    paused = ["paused" in line for line in rounds.launches]
    assert all(paused[2:16])
    assert not any(paused[16:19])


def test_one_paused_round_in_eight_is_learned_from_for_all() -> None:
    rounds = ScriptedRounds(may_pause=True)
    depths = run_rounds(rounds, [0, 0], [True] * 20, 20)
    paused = sum("paused" in line for line in rounds.calls[:-2])
    learned = len(depths.observed) - (20 - paused)
    assert paused > 16
    assert learned == len(depths.paused) == 2
    assert set(depths.paused) == {(2, 7)}
    assert len(depths.hosts) == len(depths.observed) - 1, "the host's time as often"


def test_lookup_rounds_without_drafts_follow_each_other() -> None:
    rounds = ScriptedRounds(LookupSource())
    depths = run_rounds(rounds, [0, 0, 0], [True, True, False], 3, drafter=NoDrafter("lookup"))
    assert rounds.calls[:3] == ["launch 1: 0", "follow 2: 0", "collect 1"]
    assert depths.timed == [False, True, True], "the first overlaps with nothing"


@pytest.mark.parametrize("interrupted", [False, True])
def test_depth_that_cannot_follow_waits_for_the_next_launch(interrupted: bool) -> None:
    """Unless anything else runs, which may bring other requests."""
    rounds, depths = ScriptedRounds(LookupSource()), ScriptedDepths([0, 3, 0])
    pipeline = pipeline_of(rounds, depths, drafter=NoDrafter("lookup"))
    pipeline.launch(batch_of([request()]))
    pipeline.collect()
    assert rounds.calls == ["launch 1: 0", "collect 1"], "drafts need the collected token"
    assert not pipeline.has_in_flight
    if interrupted:
        pipeline.interrupt(PREFILL)
    choice, _ = pipeline.depths.choose([request()] * 4)
    assert (choice.num_steps, choice.reason) == ((0, "of 4") if interrupted else (3, "of 1"))


def test_depth_without_a_graph_waits_for_the_launch_that_captures_it() -> None:
    """Chosen every other round only, it would never be launched."""

    class Graphless(ScriptedRounds):
        def follow(self, reqs: list[Any], plan: RoundPlan) -> Any:
            self.calls.append(f"no graph: {max(plan.levels)}")

    rounds = Graphless()
    depths = run_rounds(rounds, [3, 1, 2], [True] * 3, 2)
    assert rounds.calls[:4] == ["launch 1: 3", "no graph: 1", "collect 1", "launch 2: 1"]
    assert depths.observed == [(2, 3), (2, 1)]


def test_drafting_time_is_observed_with_the_round_that_drafted() -> None:
    class Drafting(NoDrafter):
        def draft(self, batch: Any) -> DraftProposal:
            return EmptyDrafter().draft(batch)

    rounds, depths = ScriptedRounds(LookupSource()), ScriptedDepths([3, 0, 0])
    pipeline = pipeline_of(rounds, depths, no_one, Drafting("lookup"))
    for _ in range(3):
        pipeline.launch(batch_of([request()]))
        pipeline.collect()
    assert depths.drafting[0] > 0
    assert depths.drafting[1:] == [0.0, 0.0]
