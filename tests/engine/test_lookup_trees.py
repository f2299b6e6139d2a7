"""Trees that the host drafts from text, in rounds on the device: what they decide is what rounds of
the host decide."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine import LLM, GrammarSpec, SamplingParams, SpecConfig, SpecControl
from specengine.core.spec import VerifyResult
from specengine.engine.adaptive.acceptance import Acceptance, RoundObservation
from specengine.engine.adaptive.state import DepthChooser
from specengine.engine.llm import Generation
from specengine.engine.round.executor import RoundExecutor
from specengine.engine.round.key import InFlightRound
from tests.halves import each_value, slow_but
from tests.support.chosen_depths import ChosenDepths
from tests.support.device_rounds import run_on_device
from tests.support.plain import plain_says
from tests.support.rounds import GREEDY, ON_CPU, assert_close

CPU = torch.device("cpu")
TEXT: dict[str, Any] = {"adaptive": False, "num_draft_tokens": 12}
NGRAM: dict[str, Any] = {"algorithm": "NGRAM", "ngram_branches": 2, "ngram_min_match": 1}
SUFFIX: dict[str, Any] = {
    "algorithm": "SUFFIX",
    "adaptive": False,
    "num_draft_tokens": 16,
    "suffix_branches": 2,
    "suffix_factor": 6.0,
}
SPECS = {
    "NGRAM": SpecConfig(**TEXT, **NGRAM),
    "SUFFIX": SpecConfig(**SUFFIX),
    "hybrid": SpecConfig(**TEXT, **NGRAM, hybrid_suffix=True, hybrid_suffix_min_match=3),
    "corpus": SpecConfig(**TEXT, **NGRAM, ngram_shared_corpus=True),
}
# Each kind of request, with and without overlap; the corpus is asked by NGRAM.
ASKED = ["greedy", "sampled"]
FAST = [("SUFFIX", "greedy", True), ("corpus", "sampled", False), ("hybrid", "greedy", False)]
EVERY = list(product(SPECS, ASKED, [True, False]))
LONG = replace(GREEDY, max_tokens=48)
# Between two tokens everywhere, so that text goes on now like this and now like that.
TORN = replace(LONG, temperature=9.0, top_k=2, max_tokens=300)
DRAWN = [replace(LONG, temperature=3.0, top_k=2, seed=seed) for seed in range(3)]
FEATURES = {
    "edited": [
        replace(DRAWN[0], frequency_penalty=0.3, logit_bias={5: 2.0, 9: -3.0}),
        replace(DRAWN[1], repetition_penalty=1.1, min_tokens=9, stop_token_ids=(7,)),
        LONG,
    ],
    "logprobs": [replace(one, logprobs=count) for count, one in enumerate((LONG, *DRAWN[:2]))],
}
Prompt = list[int]


@pytest.fixture(scope="module")
def prompts(target: Path) -> list[Prompt]:
    """Text of the target; and one for which nothing is drafted at first."""
    llm, params = make(target, None), [replace(TORN, seed=seed) for seed in (1, 2)]
    return [*tokens(llm.generate(["a", "b"], params)), llm.tokenizer.encode("x")]


def make(target: Path, spec: SpecConfig | None, **flags: Any) -> LLM:
    given = {"dtype": "float32", "max_total_tokens": 2048, "disable_cuda_graph": True}
    return LLM(str(target), spec, **given | flags)


def tokens(results: Sequence[Generation]) -> list[list[int]]:
    return [one.token_ids for one in results]


def counts(results: Sequence[Generation]) -> list[tuple[list[int], int]]:
    return [(one.spec.histogram, one.spec.num_draft_tokens) for one in results]


@dataclass
class Collected:
    """What rounds on the device decided."""

    steps: Counter[int] = field(default_factory=Counter)  # rounds, by the depth of their graph
    moved: int = 0  # paths whose nodes do not lie one behind the other
    idle: int = 0  # requests without a draft, where others had one

    def watch(self, rounds: RoundExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
        collect = rounds.collect

        def watched(in_flight: InFlightRound) -> VerifyResult:
            result, steps = collect(in_flight), in_flight.key.num_steps
            self.steps[steps] += 1
            if steps:
                assert in_flight.plan.drafted_nodes is not None
                left = in_flight.kept(in_flight.plan.drafted_nodes, in_flight.plan.levels)
                assert result.num_drafted == left
                self.idle += in_flight.plan.drafted_nodes.count(0)
                nodes = in_flight.outcome[:, steps + 2 :].tolist()
                for path, count in zip(nodes, result.num_accepted, strict=True):
                    assert max(path[:count], default=0) < rounds.round_slots
                    self.moved += path[:count] != list(range(1, 1 + count))
                for count, drafted in zip(result.num_accepted, result.num_drafted, strict=True):
                    assert count <= drafted, "padding is never accepted"
            return result

        monkeypatch.setattr(rounds, "collect", watched)


def watched_rounds(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, overlaps: bool = True, most: int = 4
) -> tuple[RoundExecutor, Collected]:
    rounds, collected = run_on_device(llm, overlaps, (1, 2, most)), Collected()
    assert rounds.source.is_tree
    collected.watch(rounds, monkeypatch)
    return rounds, collected


@ON_CPU
@pytest.mark.parametrize(("name", "asked", "overlaps"), slow_but(FAST, EVERY))
def test_lookup_trees_emit_and_accept_what_host_rounds_do(
    name: str,
    asked: str,
    overlaps: bool,
    is_long: bool,
    target: Path,
    prompts: list[Prompt],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = [LONG] * 3 if asked == "greedy" else DRAWN
    host, llm = make(target, SPECS[name]), make(target, SPECS[name])
    rounds, collected = watched_rounds(llm, monkeypatch, overlaps)
    for most in (48, 48) if is_long else (36, 24):  # with captures, and with texts of others
        params = [replace(one, max_tokens=most) for one in params]
        expected = tokens(plain_says(target, prompts, params))
        its, mine = host.generate(prompts, params), llm.generate(prompts, params)
        assert tokens(mine) == tokens(its) == expected
        assert counts(mine) == counts(its)
    assert rounds.counters.keys() == {"captures", "replays"}, "no round ran on the host"
    totals = llm.engine.scheduler.spec_totals
    assert totals == host.engine.scheduler.spec_totals
    assert totals.num_accepted_tokens > 20
    assert collected.steps.keys() == {*rounds.steps}
    assert collected.moved > 2
    assert collected.idle > 2
    llm.engine.scheduler.check_invariant()


def check(
    llm: LLM, target: Path, prompts: list[Prompt], params: list[SamplingParams], **flags: Any
) -> list[Generation]:
    """It emits what plain decoding does."""
    expected = plain_says(target, prompts, params, **flags)
    found = llm.generate(prompts, params)
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert one.completions[0].finish_reason == other.completions[0].finish_reason
        assert_close(one.completions[0].logprobs, other.completions[0].logprobs)
    llm.engine.scheduler.check_invariant()
    return found


@ON_CPU
@pytest.mark.parametrize("name", slow_but(["NGRAM"], ["NGRAM", "SUFFIX"]))
def test_lookup_trees_end_where_plain_decoding_does(
    name: str, is_long: bool, target: Path, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By length, by a token, and by a limit on drafts, which ends nothing."""
    emitted = tokens(plain_says(target, prompts, [LONG] * 3))
    controls = [SpecControl(), SpecControl(num_steps=2), SpecControl(enabled=False)]
    host, llm = make(target, SPECS[name]), make(target, SPECS[name])
    rounds, _ = watched_rounds(llm, monkeypatch)
    for count in (1, 4, 6, 11, 15) if is_long else (1, 6, 11):  # stops stand at every place
        stops = [{one[count + index]} for index, one in enumerate(emitted)]
        params = [
            replace(LONG, max_tokens=count if index == count % 3 else 24, speculative=control)
            for index, control in enumerate(controls[count % 3 :] + controls[: count % 3])
        ]
        params[0] = replace(params[0], stop_token_ids=tuple(stops[0]))
        mine = check(llm, target, prompts, params)
        assert counts(mine) == counts(host.generate(prompts, params))
        for one, asked in zip(mine, params, strict=True):
            most = asked.speculative.max_depth
            assert most is None or len(one.spec.histogram) <= most + 1
    assert rounds.counters.keys() == {"captures", "replays"}


@ON_CPU
@pytest.mark.parametrize("name", slow_but(["NGRAM"], ["NGRAM", "SUFFIX"]))
def test_lookup_trees_run_on_the_host_near_the_contexts_end(
    name: str, target: Path, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [replace(one, max_tokens=None) for one in (LONG, DRAWN[1], LONG)]
    llm = make(target, SPECS[name], context_length=340)
    rounds, collected = watched_rounds(llm, monkeypatch)
    check(llm, target, [*prompts[:2], prompts[0][:250]], params, context_length=340)
    assert rounds.counters["replays"] > 10
    assert collected.moved
    assert rounds.counters.keys() == {
        "captures",
        "replays",
        "fallback: memory nearly full",
    }


@ON_CPU
@pytest.mark.parametrize("overlaps", slow_but([True], [True, False]), ids=["overlap", "no overlap"])
def test_memory_that_runs_short_changes_no_token_of_lookup_trees(
    overlaps: bool, target: Path, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes lie in all places behind the text, and write to none that another request has."""
    given = [one[:120] for one in prompts[:2]] * 4
    params = [replace((LONG, *DRAWN)[index % 4], max_tokens=20 + index) for index in range(8)]
    llm = make(target, SPECS["NGRAM"], max_total_tokens=400, page_size=4, context_length=340)
    llm.engine.scheduler.admission.demand.share = 0.0
    rounds, collected = watched_rounds(llm, monkeypatch, overlaps, most=8)
    check(llm, target, given, params)
    assert llm.engine.scheduler.num_retractions > 0
    assert rounds.counters["replays"] > 20
    assert collected.moved


@ON_CPU
@pytest.mark.parametrize(("name", "asked"), each_value(1, ["NGRAM", "SUFFIX"], FEATURES))
def test_lookup_trees_serve_edits_and_logprobs(
    name: str,
    asked: str,
    target: Path,
    prompts: list[Prompt],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = make(target, SPECS[name])
    rounds, collected = watched_rounds(llm, monkeypatch)
    for most in (36, 12):
        check(llm, target, prompts, [replace(one, max_tokens=most) for one in FEATURES[asked]])
    assert rounds.counters.keys() == {"captures", "replays"}
    assert collected.moved


@ON_CPU
def test_lookup_trees_serve_a_grammar_beside_other_requests(
    target: Path, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of tokens that lookup drafts; small trees are padded with tokens that it may allow."""
    params = [replace(LONG, grammar=GrammarSpec.regex("(ab|[01]){24}")), DRAWN[0], LONG]
    params[1:] = [replace(one, max_tokens=28) for one in params[1:]]
    llm = make(target, SPECS["NGRAM"])
    given = [llm.tokenizer.encode("abab0101ab0101ab10ab0011" * 3), *prompts[:2]]
    rounds, collected = watched_rounds(llm, monkeypatch)
    for order in ([0, 1, 2], [2, 1, 0], [0]):
        check(llm, target, [given[i] for i in order], [params[i] for i in order])
    check(llm, target, prompts[2:], params[:1])
    assert rounds.counters.keys() == {"captures", "replays"}
    assert {key.num_steps for key in rounds.captured if key.sampling.masks} >= {0, 11}
    assert collected.moved


@ON_CPU
def test_chosen_depths_change_no_token_of_lookup_trees(
    target: Path, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds without drafts follow at once; those with drafts follow collected rounds."""
    llm = make(target, replace(SPECS["NGRAM"], adaptive=True))
    rounds, collected = watched_rounds(llm, monkeypatch)
    pipeline = llm.engine.pipeline
    assert pipeline is not None
    plan = [11, 0, 0, 3, 0, 1, 11, 11, 2]
    pipeline.depths.chooser = steered = ChosenDepths(lambda number: plan[number % len(plan)])
    seen, observe = list[RoundObservation](), steered.observe

    def watched(observation: RoundObservation) -> None:
        seen.append(observation)
        observe(observation)

    monkeypatch.setattr(steered, "observe", watched)
    for params in ([LONG] * 3, DRAWN):
        check(llm, target, prompts, [replace(one, max_tokens=28) for one in params])
    check(
        llm,
        target,
        prompts,
        [replace(LONG, max_tokens=24, speculative=SpecControl(num_steps=2))] * 3,
    )
    assert collected.steps.keys() == {0, 3, 11}
    assert collected.moved
    for one in seen:
        steps, drafted, limits, drew = one.num_steps, one.num_drafted, one.limits, one.num_steps > 0
        assert limits is not None
        assert drew or not any(limits)
        assert not drew or set(limits) in ({steps}, {min(2, steps)})
        assert not drew or max(drafted) < rounds.round_slots
    assert any(max(one.num_drafted) > one.num_steps > 0 for one in seen), "nodes, and not levels"


@ON_CPU
@pytest.mark.parametrize("name", slow_but(["NGRAM"], ["NGRAM", "SUFFIX"]))
def test_depths_of_lookup_trees_are_chosen_by_cost(
    name: str, target: Path, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Costs are learned from rounds with drafts and without."""
    llm = make(target, replace(SPECS[name], adaptive=True))
    rounds, collected = watched_rounds(llm, monkeypatch)
    pipeline = llm.engine.pipeline
    assert pipeline is not None
    pipeline.depths.chooser = steps = DepthChooser(rounds.steps)
    for params in ([LONG] * 3, DRAWN):
        check(llm, target, prompts, [replace(one, max_tokens=32) for one in params])
    assert steps.kept(3) is not None
    assert {one for one in rounds.steps if steps.costs.of(4, one) is None} == set()
    assert isinstance(steps.acceptance, Acceptance)
    assert steps.acceptance.smallest.tried[0] > 0
    assert collected.steps[0]
    assert rounds.counters.keys() == {"captures", "replays"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnTheGpu:
    @pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
    @pytest.mark.parametrize("name", SPECS)
    def test_graphs_change_nothing(
        self,
        name: str,
        overlap: bool,
        target: Path,
        prompts: list[Prompt],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        host, flags = make(target, SPECS[name]), {"disable_overlap_schedule": not overlap}
        llm = make(target, SPECS[name], disable_cuda_graph=False, cuda_graph_bs=(1, 2, 8), **flags)
        rounds, collected = llm.engine.device_rounds, Collected()
        assert rounds is not None
        collected.watch(rounds, monkeypatch)
        for params in ([LONG] * 3, DRAWN, *FEATURES.values()):
            for count in (3, 1, 2):
                given = prompts[:count], params[:count]
                its, mine = host.generate(*given), llm.generate(*given)
                assert tokens(mine) == tokens(its)
                assert counts(mine) == counts(its)
                llm.engine.scheduler.check_invariant()
        stats = llm.engine.stats().graphs["round"]
        assert stats.replays > 40
        assert not stats.fallbacks
        assert collected.moved > 2
        assert collected.steps.keys() == {*rounds.steps}

    def test_depths_are_chosen(self, target: Path, prompts: list[Prompt]) -> None:
        """Whatever is chosen, beside a grammar, and at the end of the context."""
        spec, flags = replace(SPECS["NGRAM"], adaptive=True), {"context_length": 340}
        llm = make(target, spec, disable_cuda_graph=False, **flags)
        constrained = replace(LONG, grammar=GrammarSpec.regex("(ab|[01]){24}"))
        for params in ([LONG] * 3, DRAWN, [constrained, *DRAWN[:2]]):
            check(llm, target, prompts, params, **flags)
        check(llm, target, prompts, [replace(one, max_tokens=None) for one in DRAWN], **flags)
        depth = llm.engine.stats().depth
        assert depth is not None
        assert llm.engine.stats().graphs["round"].replays > 40

    def test_memory_that_runs_short_in_graphs(self, target: Path, prompts: list[Prompt]) -> None:
        given = [one[:120] for one in prompts[:2]] * 4
        params = [replace((LONG, *DRAWN)[index % 4], max_tokens=30 + index) for index in range(8)]
        small = {"max_total_tokens": 400, "page_size": 4, "context_length": 340}
        llm = make(target, SPECS["NGRAM"], disable_cuda_graph=False, **small)
        check(llm, target, given, params)
        assert llm.engine.stats().graphs["round"].replays > 10
