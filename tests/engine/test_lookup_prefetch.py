"""Rounds of lookup are launched when the last is collected, and before it is committed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from specengine import LLM, SamplingParams, SpecConfig, SpecControl
from specengine.core.batch import ScheduleBatch
from specengine.core.drafter import Drafter, DraftsOn
from specengine.core.grammar import GrammarSpec
from specengine.core.request import Req
from specengine.core.spec import DraftProposal
from specengine.draft.ngram.drafter import NgramDrafter
from specengine.draft.proposals import Draft, assemble
from specengine.draft.suffix.drafter import SuffixDrafter
from specengine.engine.lookup_prefetch import LookupPrefetch
from specengine.engine.pipeline import RoundPipeline
from specengine.engine.round.lookup import LookupChains
from specengine.kernels.native import lookup, suffix
from specengine.scheduler.policy import SchedulePolicy
from tests.halves import thinned
from tests.support.device_rounds import run_on_device
from tests.support.draft_batches import decode_batch
from tests.support.rounds import ON_CPU
from tests.support.scripted_rounds import ScriptedDepths, ScriptedRounds
from tests.support.stepping import add

IN_C = pytest.mark.skipif(
    not (lookup.is_compiled() and suffix.is_compiled()), reason="no C compiler"
)
PROMPTS = ["abcabcabcabcabc", "0123456789" * 4, "abab" * 4]
SPECS = {
    "NGRAM": SpecConfig(algorithm="NGRAM", ngram_min_match=1, num_draft_tokens=4, adaptive=False),
    "SUFFIX": SpecConfig(algorithm="SUFFIX", num_draft_tokens=4, adaptive=False),
}
SPECS["NGRAM tree"] = replace(SPECS["NGRAM"], ngram_branches=2, num_draft_tokens=6)
SPECS["SUFFIX tree"] = replace(SPECS["SUFFIX"], suffix_branches=2, num_draft_tokens=6)
POLICY = SchedulePolicy(context_len=64, max_running_requests=8, chunked_prefill_size=64)
GREEDY = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)


def request(output: int = 3, **sampling: Any) -> Req:
    req = Req("r", [1] * 5, replace(GREEDY, **sampling), frozenset([9]))
    req.output_ids = [1] * output
    return req


class Text(Drafter):
    """Notes how it was asked to draft ahead."""

    drafts_on: DraftsOn = "lookup"
    drafts_ahead = True
    max_nodes = 6

    def __init__(self) -> None:
        self.asked: list[tuple[list[list[int]], list[int]]] = []

    def draft(self, batch: ScheduleBatch) -> DraftProposal:
        raise AssertionError("drafts are made ahead")

    def draft_ahead(self, reqs: Any, emitted: Any, max_nodes: Any) -> DraftProposal:
        self.asked.append((emitted, max_nodes))
        counts = list(max_nodes)
        width = max(counts)
        parents = torch.arange(-1, width - 1).expand(len(counts), -1)
        tokens = torch.full((len(counts), width), 7)
        return DraftProposal(tokens, parents, counts, is_chain=True)


def ahead(drafter: Text, cuts: bool = False) -> LookupPrefetch:
    scheduler = SimpleNamespace(policy=POLICY, follow=lambda reqs, slots: reqs)
    return LookupPrefetch(cast(Any, drafter), cast(Any, scheduler), cuts)


@pytest.mark.parametrize(
    ("req", "emitted", "follows"),
    [
        (request(), [1, 2, 3], True),
        (request(max_tokens=6), [1, 2], True),
        (request(max_tokens=6), [1, 2, 3], False),
        (request(max_tokens=6), [1, 2, 3, 4], False),
        (request(output=56, max_tokens=None), [1, 2], True),
        (request(output=56, max_tokens=None), [1, 2, 3], False),
        (request(ignore_eos=False), [1, 9, 3], False),
        (request(ignore_eos=True), [1, 9, 3], True),
        (request(stop_token_ids=(3,)), [1, 9, 3], False),
        (request(stop_token_ids=(3,), min_tokens=9), [1, 9, 3], True),
        (request(stop=("a",)), [1, 2], True),
    ],
)
def test_requests_that_go_on_follow(req: Req, emitted: list[int], follows: bool) -> None:
    other = request()
    expected = [other, req] if follows else [other]
    assert ahead(Text()).follow([other, req], [[1], emitted], 8) == expected


def test_left_after_is_what_remains_after_the_commit() -> None:
    reqs = [request(count, max_tokens=limit) for count in (0, 3, 57) for limit in (None, 5, 60, 99)]
    emitted = [[1] * (place % 4) for place in range(len(reqs))]
    expected = [
        POLICY.remaining_tokens(req) - len(new) for req, new in zip(reqs, emitted, strict=True)
    ]
    assert POLICY.left_after(reqs, emitted) == expected


def test_drafts_ahead_are_as_deep_as_requests_allow() -> None:
    drafter = Text()
    one = ahead(drafter)
    shallow = request(speculative=SpecControl(num_steps=1))
    reqs = [request(), shallow, request(max_tokens=7), request(max_tokens=5)]
    emitted = [[1], [2], [3, 4], [5, 6]]
    going = one.follow(reqs, emitted, 8)
    assert going == reqs[:3]
    assert one.draft(going, [3, 1, 3]).num_nodes == [4, 2, 2]
    assert one.draft(going, [7, 1, 7]).num_nodes == [6, 2, 2]
    assert drafter.asked == [([[1], [2], [3, 4]], [4, 2, 2]), ([[1], [2], [3, 4]], [6, 2, 2])]


def test_drafts_for_stochastic_rules_are_made_whole_and_then_cut() -> None:
    """As the host does."""
    drafter = Text()
    one = ahead(drafter, cuts=True)
    reqs = [request(), request(speculative=SpecControl(num_steps=1)), request(max_tokens=7)]
    emitted = [[1], [2], [3, 4]]
    assert one.follow(reqs, emitted, 8) == reqs
    assert one.draft(reqs, [3, 1, 3]).num_nodes == [4, 2, 2]
    assert drafter.asked == [(emitted, [6, 6, 2])]


class TextTrees(Text):
    proposes_tree = True

    def num_tree_nodes(self, num_steps: int) -> int:
        return self.max_nodes

    def draft_ahead(self, reqs: Any, emitted: Any, max_nodes: Any) -> DraftProposal:
        """Two branches."""
        self.asked.append((emitted, max_nodes))
        parents = [-1, 0, 0, 1, 2, 3]
        drafts = [Draft([7] * count, parents[:count]) for count in max_nodes]
        return assemble(drafts)


def test_trees_are_made_whole_and_then_cut() -> None:
    """Before, it is not known which nodes are too deep."""
    drafter = TextTrees()
    one = ahead(drafter)
    shallow = request(speculative=SpecControl(num_steps=1))
    reqs, emitted = [request(), shallow, request(max_tokens=8)], [[1], [2], [3, 4]]
    assert one.follow(reqs, emitted, 8) == reqs
    proposal = one.draft(reqs, [2, 1, 2])
    assert drafter.asked == [(emitted, [6, 6, 3])]
    assert proposal.num_nodes == [5, 3, 3]
    assert proposal.parents[0, :5].tolist() == [-1, 0, 0, 1, 2]


def rounds_of() -> ScriptedRounds:
    return ScriptedRounds(LookupChains(4, 3, torch.device("cpu"), counted=False))


def pipeline_of(rounds: ScriptedRounds, plan: list[int], overlaps: bool = True) -> RoundPipeline:
    scheduler = SimpleNamespace(policy=POLICY, follow=lambda reqs, slots: reqs)
    given = cast(Any, rounds), Text(), cast(Any, scheduler)
    return RoundPipeline(*given, cast(Any, ScriptedDepths(plan)), overlaps)


def run_rounds(rounds: ScriptedRounds, plan: list[int], count: int) -> Any:
    """The first of them without drafts, and followed at once."""
    pipeline = pipeline_of(rounds, plan)
    pipeline.launch(cast(Any, SimpleNamespace(reqs=[request(), request()], batch_size=2)))
    for _ in range(count):
        pipeline.collect()
    return pipeline.depths.chooser


def test_rounds_with_drafts_follow_collected_rounds() -> None:
    rounds = rounds_of()
    depths = run_rounds(rounds, [0, 3, 3, 0, 0, 3], 5)
    assert rounds.calls == [
        *("launch 1: 0", "collect 1", "follow 2: 3", "collect 2", "follow 3: 3"),
        *("collect 3", "follow 4: 0", "follow 5: 0", "collect 4", "collect 5", "follow 6: 3"),
    ]
    assert depths.observed == [(2, 0), (2, 3), (2, 3), (2, 0), (2, 0)]
    assert depths.timed == [False, True, True, False, True], "not the first of rounds that overlap"
    assert [one > 0 for one in depths.drafting] == [False, True, True, False, False]


def test_next_round_is_launched_before_costs_are_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device would wait meanwhile."""
    rounds = rounds_of()
    pipeline, launched = pipeline_of(rounds, [0, 3, 3]), list[int]()
    chooser = pipeline.depths.chooser
    monkeypatch.setattr(chooser, "observe", lambda *_, **__: launched.append(rounds.count))
    pipeline.launch(cast(Any, SimpleNamespace(reqs=[request()], batch_size=1)))
    for _ in range(2):
        pipeline.collect()
    assert launched == [2, 3]


def test_no_round_follows_without_overlap() -> None:
    rounds = rounds_of()
    pipeline = pipeline_of(rounds, [0, 3], overlaps=False)
    pipeline.launch(cast(Any, SimpleNamespace(reqs=[request()], batch_size=1)))
    pipeline.collect()
    assert rounds.calls == ["launch 1: 0", "collect 1"]


def test_choice_without_a_graph_is_kept_for_the_next_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds = rounds_of()
    monkeypatch.setattr(rounds, "follow", lambda *_: None)
    pipeline = pipeline_of(rounds, [0, 3])
    pipeline.launch(cast(Any, SimpleNamespace(reqs=[request()], batch_size=1)))
    pipeline.collect()
    assert not pipeline.has_in_flight
    assert pipeline.depths.choose([request()])[0].num_steps == 3


@pytest.mark.parametrize("stochastic", [True, False])
def test_pipelines_of_stochastic_rules_cut_whole_drafts(stochastic: bool) -> None:
    rounds = rounds_of()
    rounds.sampling.stochastic = stochastic
    pipeline = pipeline_of(rounds, [0, 3])
    text = cast(Any, pipeline.drafter)
    text.max_nodes = 4
    shallow = request(speculative=SpecControl(num_steps=1))
    pipeline.launch(cast(Any, SimpleNamespace(reqs=[shallow], batch_size=1)))
    pipeline.collect()
    assert text.asked[0][1] == [4 if stochastic else 2]


@IN_C
@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("name", SPECS)
def test_drafts_ahead_are_those_after_the_commit(
    name: str, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = [1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 1, 2, 3] * 4
    kind: Any = NgramDrafter if SPECS[name].algorithm == "NGRAM" else SuffixDrafter
    for module in (lookup, suffix):
        if not is_compiled:
            monkeypatch.setattr(module, "is_compiled", lambda: False)
    drafters, shapes = [kind(SPECS[name], lambda req: 4) for _ in range(2)], set()
    assert drafters[0].drafts_ahead
    reqs = [[Req("r", text[:start], GREEDY) for start in (3, 9, 20)] for _ in range(2)]
    for place in range(20, 50, 3):
        emitted = [text[place : place + 3]] * 3
        first = drafters[0].draft_ahead(reqs[0], emitted, [4, 4, 4])
        for req, new in zip([*reqs[0], *reqs[1]], [*emitted, *emitted], strict=True):
            req.output_ids += new
        then = drafters[1].draft(decode_batch(reqs[1]))
        assert first.tokens.tolist() == then.tokens.tolist()
        assert first.parents.tolist() == then.parents.tolist()
        assert first.num_nodes == then.num_nodes
        shapes.add(first.is_chain)
    assert (False in shapes) == drafters[0].proposes_tree


@pytest.mark.parametrize("name", SPECS)
def test_shared_corpora_do_not_draft_ahead(name: str) -> None:
    flag: dict[str, Any] = {f"{str(SPECS[name].algorithm).lower()}_shared_corpus": True}
    kind: Any = NgramDrafter if SPECS[name].algorithm == "NGRAM" else SuffixDrafter
    assert not kind(replace(SPECS[name], **flag), lambda req: 4).drafts_ahead


@ON_CPU
@IN_C
@pytest.mark.parametrize(
    ("name", "grammar"), thinned(2, SPECS, [None, GrammarSpec.regex("(ab|01){8}")])
)
def test_outputs_and_rounds_are_the_same_with_drafts_ahead(
    name: str, grammar: GrammarSpec | None, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [replace(GREEDY, max_tokens=count) for count in (60, 31, 12)]
    params[1] = replace(params[1], grammar=grammar, ignore_eos=grammar is None)
    found, asked = [], []
    for overlaps in (False, True):
        llm = LLM(str(target), SPECS[name], dtype="float32", max_total_tokens=2048)
        drafter: Any = llm.engine.drafter
        draft_ahead = drafter.draft_ahead

        def watched(*given: Any, draft_ahead: Any = draft_ahead) -> DraftProposal:
            asked.append(len(given[0]))
            return cast(DraftProposal, draft_ahead(*given))

        monkeypatch.setattr(drafter, "draft_ahead", watched)
        run_on_device(llm, overlaps)
        assert bool(asked) is False
        prompts = [PROMPTS[index % len(PROMPTS)] for index in range(3)]
        results = llm.generate(prompts, params)
        found.append([(one.token_ids, one.spec.histogram) for one in results])
        llm.engine.scheduler.check_invariant()
        assert bool(asked) is overlaps
    assert found[0] == found[1]
    assert set(asked) == {1, 2, 3}


@ON_CPU
@IN_C
@pytest.mark.parametrize("name", SPECS)
def test_texts_are_read_again_after_an_interruption(
    name: str, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collected round was not committed, and is run again."""
    llm = LLM(str(target), SPECS[name], dtype="float32", max_total_tokens=2048)
    (plain,) = llm.generate(PROMPTS[:1], GREEDY)
    rounds = run_on_device(llm)
    launch, launched, interrupted = rounds._launch, [], 0

    def breaks(*given: Any) -> Any:
        launched.append(launch(*given))
        if len(launched) in (4, 9):
            raise KeyboardInterrupt
        return launched[-1]

    monkeypatch.setattr(rounds, "_launch", breaks)
    req, drafter = add(llm, "it", PROMPTS[0], GREEDY), cast(Any, llm.engine.drafter)
    while llm.engine.has_work:
        try:
            llm.engine.step()
        except KeyboardInterrupt:
            interrupted += 1
        if req in drafter._texts and not llm.engine.pipeline.has_in_flight:  # type: ignore[union-attr]
            assert drafter._texts[req].num_tokens <= req.seq_len
    assert interrupted == 2
    assert req.output_ids == plain.token_ids
