"""The depths that a request's rounds ran under, as its result tells them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine import LLM, SamplingParams, SpecConfig, SpecControl
from specengine.core.batch import ScheduleBatch
from specengine.core.request import Req
from specengine.core.spec import PrefillResult, VerifyResult
from specengine.core.spec_stats import DepthChoice, SpecStats
from specengine.engine.adaptive.state import DepthChooser
from specengine.engine.outputs import RequestOutput, add_stats, depth_line, speculative_metrics
from specengine.engine.pipeline import RoundPipeline
from specengine.engine.round.executor import RoundExecutor
from specengine.engine.round.key import InFlightRound, RoundKey
from tests.support.device_rounds import run_on_device
from tests.support.rounds import ON_CPU

TEXT = SpecConfig(algorithm="NGRAM", ngram_min_match=1, num_draft_tokens=6)
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
PROMPTS = ["abcabcabcabcabc", "0123456789" * 4, "abab" * 4]


@pytest.fixture(scope="module")
def layer(drafters: dict[str, str]) -> SpecConfig:
    path = drafters["EAGLE3"]
    return SpecConfig(algorithm="EAGLE3", adaptive=False, draft_model_path=path, num_steps=3)


class Steered(DepthChooser):
    """As deep as it is told; round n says so."""

    def __init__(self, depth: Callable[[int], int]) -> None:
        super().__init__([0, 1, 2, 3])
        self.depth = depth
        self.made: list[DepthChoice] = []

    def choose(self, batch_size: int) -> DepthChoice:
        number = len(self.made)
        self.made.append(DepthChoice(self.depth(number), f"choice {number}", None))
        return self.made[-1]


def make(target: Path, spec: SpecConfig | None, **flags: Any) -> LLM:
    """Rounds that the host runs."""
    given = {"dtype": "float32", "max_total_tokens": 2048, "disable_cuda_graph": True}
    return LLM(str(target), spec, **{**given, **flags})


def steer(llm: LLM, depth: Callable[[int], int]) -> Steered:
    adaptive = llm.engine.parts.adaptive
    assert adaptive is not None
    adaptive.chooser = steered = Steered(depth)
    return steered


def add(llm: LLM, rid: str, prompt: str, sampling: SamplingParams = GREEDY) -> Req:
    llm.engine.add_request(rid, llm.tokenizer.encode(prompt), sampling)
    return next(req for req, choice in llm.engine.choices.items() if choice.rid == rid)


def finish(llm: LLM) -> dict[str, RequestOutput]:
    done = {}
    while llm.engine.has_work:
        done |= {one.rid: one for one in llm.engine.step() if one.finish_reason is not None}
    return done


def step_until(llm: LLM, holds: Callable[[], bool]) -> None:
    while not holds():
        llm.engine.step()


def test_each_round_counts_at_the_depth_that_it_ran_under(target: Path) -> None:
    llm = make(target, TEXT)
    plan = [3, 0, 2, 2, 1]
    steered = steer(llm, lambda number: plan[number % 5])
    spec = llm.generate(PROMPTS[0], GREEDY)[0].spec
    assert spec.num_rounds == len(steered.made) > 5
    counts = Counter(one.num_steps for one in steered.made)
    assert spec.depth_histogram == [counts[depth] for depth in range(4)]
    assert spec.depth is steered.made[-1]


def test_requests_that_end_together_share_one_report(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each of the choice that its own last round ran under."""
    llm = make(target, TEXT)
    steered, asked = steer(llm, lambda number: number % 3), []

    def resolved(choice: DepthChoice) -> DepthChoice:
        asked.append(choice)
        return replace(choice, reason="told")

    monkeypatch.setattr(steered, "resolved", resolved)
    params = [replace(GREEDY, max_tokens=n, ignore_eos=True) for n in (4, 4, 4, 9)]
    params = [replace(one, speculative=SpecControl(enabled=False)) for one in params]
    found = [one.spec.depth for one in llm.generate([PROMPTS[0]] * 4, params)]
    assert [one.reason for one in found if one is not None] == ["told"] * 4
    assert found[0] is found[1] is found[2] is not found[3]
    assert len(asked) == 2


def test_request_that_joins_at_depth_0_counts_no_drafts(target: Path) -> None:
    llm, depth = make(target, TEXT), [2]
    steer(llm, lambda number: depth[0])
    first = add(llm, "first", PROMPTS[0])
    step_until(llm, lambda: first.spec.num_rounds == 3)
    depth[0] = 0
    add(llm, "second", PROMPTS[1])
    done = finish(llm)
    rounds = {rid: one.spec.num_rounds for rid, one in done.items()}
    assert done["first"].spec.depth_histogram == [rounds["first"] - 3, 0, 3]
    assert done["second"].spec.depth_histogram == [rounds["second"]]
    assert done["second"].spec.num_draft_tokens == 0


def test_limit_of_a_request_changes_its_drafts_and_not_its_chosen_depth(
    target: Path, layer: SpecConfig
) -> None:
    llm = make(target, replace(layer, adaptive=True))
    steer(llm, lambda number: 3)
    controls = [SpecControl(), SpecControl(num_steps=1), SpecControl(enabled=False)]
    params = [replace(GREEDY, speculative=one) for one in controls]
    found = [one.spec for one in llm.generate(PROMPTS, params)]
    for spec in found:
        assert spec.depth_histogram == [0, 0, 0, spec.num_rounds]
    free, one, off = found
    assert free.num_draft_tokens > 2 * free.num_rounds
    assert one.num_rounds >= one.num_draft_tokens >= one.num_rounds - 1, "the last has no room"
    assert off.num_draft_tokens == 0


def test_aborted_request_is_counted_no_further(target: Path) -> None:
    llm = make(target, TEXT)
    steer(llm, lambda number: 1)
    gone, stays = add(llm, "gone", PROMPTS[0]), add(llm, "stays", PROMPTS[1])
    step_until(llm, lambda: gone.spec.num_rounds == 2)
    llm.engine.abort("gone")
    spec = finish(llm)["stays"].spec
    assert gone.spec.depth_histogram == [0, 2]
    assert stays.spec is spec
    assert spec.depth_histogram == [0, spec.num_rounds]


def test_a_round_beside_a_prefill_is_of_depth_0(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(target, TEXT, enable_mixed_chunk=True, chunked_prefill_size=16)
    steer(llm, lambda number: 2)
    first = add(llm, "first", PROMPTS[0])
    step_until(llm, lambda: first.spec.num_rounds == 2)
    beside, commit = 0, llm.engine.scheduler.commit_prefill

    def watched(batch: ScheduleBatch, result: PrefillResult) -> None:
        nonlocal beside
        beside += first in batch.reqs
        commit(batch, result)

    monkeypatch.setattr(llm.engine.scheduler, "commit_prefill", watched)
    add(llm, "second", PROMPTS[1])
    spec = finish(llm)["first"].spec
    assert beside > 1
    assert spec.depth_histogram == [beside, 0, spec.num_rounds - beside]
    assert spec.depth is not None
    assert spec.depth.num_steps == 2


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"adaptive": False}, "K=5, fixed by --no-speculative-adaptive"),
        ({"verify": "target_only"}, "K=5, fixed: seeds would not repeat with this verifier"),
        ({"algorithm": None}, "K=0, nothing drafts without --speculative-algorithm"),
        ({"trace": "t.trace"}, "K=5, fixed: rounds are traced"),
        ({}, "K=5, fixed while rounds are recorded"),
    ],
    ids=str,
)
def test_a_fixed_depth_says_why(
    options: dict[str, Any], expected: str, target: Path, tmp_path: Path
) -> None:
    flags = {"trace": str(tmp_path / options["trace"])} if "trace" in options else {}
    spec = replace(TEXT, **{name: value for name, value in options.items() if name != "trace"})
    llm = make(target, spec if spec.algorithm else None, **flags)
    if not options:
        llm.engine.host_round.recorders.append(Blind())
    found = llm.generate(PROMPTS[0], GREEDY)[0].spec
    assert found.depth is not None
    assert (found.depth.reason, found.depth.expected_gain) == (expected, None)
    assert found.depth_histogram == [0] * found.depth.num_steps + [found.num_rounds]


class Blind:
    def record(self, *looked_at: Any) -> None: ...


def test_choice_that_stands_is_reported_with_its_last_figures(target: Path, tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"seconds": {"1": {"0": 1.0, "5": 1.001}}}))
    llm = make(target, replace(TEXT, cost_table=str(table)))
    found = llm.generate(PROMPTS[0], GREEDY)[0].spec.depth
    assert llm.engine.parts.adaptive is not None
    stood = llm.engine.parts.adaptive.chooser.kept(1)
    assert found is not None
    assert stood is not None
    assert found == llm.engine.stats().depth
    assert found.num_steps == stood.num_steps > 0
    assert found.expected_gain != stood.expected_gain


@ON_CPU
@pytest.mark.parametrize("overlaps", [True, False])
def test_rounds_in_flight_count_at_the_depth_of_their_graph(
    overlaps: bool, target: Path, layer: SpecConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(target), layer, dtype="float32", max_total_tokens=2048)
    rounds = run_on_device(llm)
    rounds.steps = [0, 1, 2, 3]
    for size in rounds.batch_sizes:  # no round follows into a graph that is not there yet
        for steps in rounds.steps:
            rounds.graph(RoundKey(size, steps))
    parts = llm.engine.parts
    pipeline = RoundPipeline(rounds, parts.drafter, parts.scheduler, DepthChooser([0]), overlaps)
    llm.engine.pipeline = pipeline
    check_pipeline(llm, pipeline, overlaps, monkeypatch)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_rounds_on_the_gpu_count_at_the_depth_of_their_graph(
    target: Path, layer: SpecConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(layer, adaptive=True)
    llm = LLM(str(target), spec, dtype="float32", max_total_tokens=2048)
    assert llm.engine.pipeline is not None
    check_pipeline(llm, llm.engine.pipeline, True, monkeypatch)


def check_pipeline(
    llm: LLM, pipeline: RoundPipeline, overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round is launched before the last is collected; one request leaves during its round."""
    plan = [3, 0, 0, 1, 0, 2, 2]
    pipeline.depths.chooser = steered = Steered(lambda number: plan[number % 7])
    collected = watch_rounds(pipeline.executor, monkeypatch)
    first, gone = add(llm, "first", PROMPTS[0]), add(llm, "gone", PROMPTS[2])
    step_until(llm, lambda: gone.spec.num_rounds == 4)
    assert pipeline.has_in_flight == overlaps
    llm.engine.abort("gone")
    second = add(llm, "second", PROMPTS[1])
    finish(llm)
    for req in (first, gone, second):
        counts = collected[req]
        assert req.spec.num_rounds == sum(counts.values())
        assert req.spec.depth_histogram == [counts[depth] for depth in range(max(counts) + 1)]
        assert len(counts) > 1
    assert first.spec.depth in steered.made
    assert gone.spec.num_rounds == 4


def watch_rounds(rounds: RoundExecutor, monkeypatch: pytest.MonkeyPatch) -> dict[Req, Counter[int]]:
    """Rounds by the depth of the graph that ran, of each request that was still there."""
    collected: dict[Req, Counter[int]] = {}
    collect = rounds.collect

    def watched(in_flight: InFlightRound) -> VerifyResult:
        for req in in_flight.reqs:
            if not req.is_finished:
                collected.setdefault(req, Counter())[in_flight.key.num_steps] += 1
        return collect(in_flight)

    monkeypatch.setattr(rounds, "collect", watched)
    return collected


def test_choices_add_up() -> None:
    deep, none = DepthChoice(2, "deep", 1.23456, 4), DepthChoice(0, "none", None)
    one, other, total = SpecStats(), SpecStats(), SpecStats()
    for depth in (deep, none, deep):
        one.record(2, 1, depth)
    other.record(0, 0, none)
    for stats in (one, other, SpecStats()):
        add_stats(total, stats)
    assert total.depth_histogram == [2, 0, 2]
    assert total.depth is none
    assert speculative_metrics(one)["depth"] == {
        "num_steps": 2,
        "num_nodes": 4,
        "reason": "deep",
        "expected_gain": 1.2346,
    }
    assert depth_line(one) == "rounds: 1 at K=0, 2 at K=2; last deep"
    assert speculative_metrics(SpecStats())["depth"] is None
    assert depth_line(SpecStats()) == "rounds: none"
