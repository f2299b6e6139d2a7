"""Trees of several sizes in rounds on the device: no token changes whichever is chosen, and each
round tells what smaller trees would have accepted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

from specengine import LLM, SpecConfig
from specengine.core.grammar import GrammarSpec
from specengine.core.spec import VerifyResult
from specengine.engine import graph_tree
from specengine.engine.adaptive.estimate import smaller_sizes
from specengine.engine.flights import Flights
from specengine.engine.graph_build import _smaller_trees
from specengine.engine.graph_tree import GraphTreeRound
from specengine.engine.proof.any_depth import AnyDepth
from specengine.engine.round_form import Flight, Form, Wish
from specengine.engine.row_choices import Choosing
from tests.engine.flying_world import let_fly
from tests.engine.test_graph_round import GREEDY, PROMPTS, SAMPLED, TOLD
from tests.engine.test_graph_round import make as make_any
from tests.engine.test_graph_tree import ON_CPU, ByHand

STEPS = [0, 1, 2, 3]
SIZES = {1: [2], 2: [4], 3: [4, 8]}
LONG = replace(GREEDY, max_tokens=120)


@pytest.fixture(scope="module")
def spec(drafters: dict[str, str]) -> SpecConfig:
    return SpecConfig(
        algorithm="EAGLE3",
        adaptive=False,
        draft_model_path=drafters["EAGLE3"],
        eagle_topk=4,
        num_steps=3,
        num_draft_tokens=16,
    )


def make(target: Path, spec: SpecConfig | None, **flags: object) -> LLM:
    return make_any(target, spec, **flags)


def fly_in_all_sizes(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> GraphTreeRound:
    """Each round in a shape that is drawn."""
    monkeypatch.setattr(graph_tree, "_MANY", 1)
    drafter = cast(GraphTreeRound, let_fly(llm, monkeypatch)).drafter
    parts = llm.engine.parts
    flying = GraphTreeRound(parts.worker, drafter, STEPS, [1, 2, 4])
    flying.sizes = smaller_sizes(STEPS, drafter.num_tree_nodes)
    assert flying.smaller_trees(4) == SIZES
    depths = AnyDepth(STEPS, flying.sizes)
    llm.engine.flights = Flights(flying, parts.drafter, parts.scheduler, depths, True)
    return flying


@ON_CPU
def test_sizes_that_come_and_go_change_no_token(
    target: Path, spec: SpecConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, sampled, beside logprobs and under grammars."""
    plain, llm = make(target, None, device="cpu"), make(target, spec, device="cpu")
    ruled = replace(GREEDY, grammar=GrammarSpec.regex("[a-z ]{10,60}"))
    asked = [[LONG] * 3, SAMPLED[:3], [GREEDY, *TOLD[:2]], [ruled, GREEDY, ruled]]
    expected = [[one.token_ids for one in plain.generate(PROMPTS, params)] for params in asked]
    flying = fly_in_all_sizes(llm, monkeypatch)
    for params, tokens in zip(asked, expected, strict=True):
        assert [one.token_ids for one in llm.generate(PROMPTS, params)] == tokens
    sizes = Counter(form.num_nodes for form in flying.captured)
    assert sizes.keys() == {None, 2, 4, 8}
    assert flying.counters.keys() == {"captures", "replays"}
    assert llm.engine.scheduler.spec_totals.num_accepted_tokens > 20
    assert flying.drafter.num_tree_nodes(3) == 16


@ON_CPU
def test_rounds_tell_what_smaller_trees_accept(target: Path, spec: SpecConfig) -> None:
    """Each round is run in every size from the same state; the whole tree's counts."""
    hand = ByHand(make(target, spec, device="cpu"), [GREEDY] * 3)
    flying, state, compared = hand.round, hand.round.state, 0

    def run(num_nodes: int | None) -> list[list[int]]:
        form = Form(len(hand.rows), 3, hand.choosing, num_nodes=num_nodes)
        flying.parts_of(hand.rows, form).run()
        return state.outcomes[int(state.turn), : len(hand.rows)].tolist()

    tables = state.lens, state.roots, hand.drafter.states
    for _ in range(12):
        before, found = [x.clone() for x in tables], {}
        for size in (2, 4, 8, 12, None):
            for x, value in zip(tables, before, strict=True):
                x.copy_(value)
            found[size] = run(size)
        for b, whole in enumerate(found[None]):
            ranks = whole[5 : 5 + whole[0]]
            assert ranks == sorted(ranks)
            for size, rows in found.items():
                if size is not None and int(hand.rows[b]):
                    assert rows[b][0] == sum(rank < size for rank in ranks)
                    compared += rows[b][0] < whole[0]
    assert compared > 5, "smaller trees accepted less, now and then"


@ON_CPU
def test_what_stood_lands_by_rank(
    target: Path, spec: SpecConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(target, spec, device="cpu")
    flying, landed = fly_in_all_sizes(llm, monkeypatch), []
    land = flying.land

    def watched(flight: Flight) -> VerifyResult:
        landed.append((flight.form, land(flight)))
        return landed[-1][1]

    monkeypatch.setattr(flying, "land", watched)
    llm.generate(PROMPTS, LONG)
    assert {form.num_nodes for form, _ in landed} == {None, 2, 4, 8}
    for form, result in landed:
        if form.num_steps == 0:
            assert result.path_ranks is None
            continue
        whole = flying.drafter.num_tree_nodes(form.num_steps)
        nodes = min(whole, form.num_nodes or whole)
        assert result.num_drafted == [nodes - 1] * len(result.tokens)
        assert result.path_ranks is not None
        assert [len(row) for row in result.path_ranks] == result.num_accepted
        assert all(row == sorted(set(row)) for row in result.path_ranks)
        assert max((max(row, default=0) for row in result.path_ranks), default=0) < nodes
    assert llm.engine.flights is not None
    assert llm.engine.flights.depths is not None
    assert llm.engine.flights.depths.acceptance.has_ranks


@ON_CPU
def test_smaller_trees_have_graphs_where_nodes_cost(
    target: Path, spec: SpecConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only then: else whole trees fly, as they do without memory for more graphs."""
    llm = make(target, spec, device="cpu")
    flying = fly_in_all_sizes(llm, monkeypatch)
    monkeypatch.setattr(graph_tree, "_MANY", 64)
    assert [flying.smaller_trees(size) for size in (1, 4, 13)] == [{}, {2: [4], 3: [4, 8]}, SIZES]
    hand = ByHand(llm, [GREEDY] * 3)
    reqs = hand.batch.reqs
    wish = Wish([3] * 3, num_nodes=8)
    assert flying._form(reqs, wish).num_nodes == 8
    assert flying._form(reqs[:1], wish).num_nodes is None
    assert flying._form(reqs, Wish([1] * 3, num_nodes=8)).num_nodes is None
    forms = {(one.num_steps, one.num_nodes) for one in flying.forms(4, Choosing())}
    assert forms == {(0, None), (1, None), (2, None), (3, None), (2, 4), (3, 4), (3, 8)}
    flying.runner.graph_memory.budget = 0
    assert flying._form(reqs, wish).num_nodes is None


@ON_CPU
def test_smaller_trees_are_measured_where_they_have_graphs(
    target: Path, spec: SpecConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    flying = fly_in_all_sizes(make(target, spec, device="cpu"), monkeypatch)
    monkeypatch.setattr(graph_tree, "_MANY", 64)
    monkeypatch.setattr(flying, "seconds_of", lambda b, k, n: 100.0 * b + 10.0 * k + n)
    assert _smaller_trees(flying) == {4: {4: {2: 424.0, 3: 434.0}}, 8: {4: {3: 438.0}}}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnTheGpu:
    def flying(self, target: Path, spec: SpecConfig, monkeypatch: pytest.MonkeyPatch) -> LLM:
        monkeypatch.setattr(graph_tree, "_MANY", 8)
        return make(target, replace(spec, adaptive=True), cuda_graph_bs=(1, 2, 4, 8))

    def test_sizes_that_come_and_go_change_no_token(
        self, target: Path, spec: SpecConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        eager = make(target, None, disable_cuda_graph=True)
        llm = self.flying(target, spec, monkeypatch)
        flights = llm.engine.flights
        assert flights is not None
        assert flights.depths is not None
        assert flights.depths.sizes == SIZES
        flights.depths = AnyDepth(flights.depths.steps, flights.depths.sizes)
        ruled = replace(GREEDY, grammar=GrammarSpec.regex("[a-z ]{10,60}"))
        for params in ([LONG] * 3, SAMPLED[:3], [GREEDY, *TOLD[:2]], [ruled, GREEDY, ruled]):
            expected = [one.token_ids for one in eager.generate(PROMPTS, params)]
            assert [one.token_ids for one in llm.generate(PROMPTS, params)] == expected
        assert flights.depths.acceptance.has_ranks
        assert not llm.engine.stats().graphs["round"].fallbacks
        llm.engine.scheduler.check_invariant()

    def test_costs_of_all_sizes_are_measured_at_start(
        self, target: Path, spec: SpecConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        llm = self.flying(target, spec, monkeypatch)
        flights, expected = llm.engine.flights, make(target, None, disable_cuda_graph=True)
        assert flights is not None
        assert flights.depths is not None
        for shape in flights.depths.shapes:
            seconds = flights.depths.costs.of(8, shape.num_steps, shape.num_nodes)
            assert seconds is not None
            assert 0 < seconds < 1
        tokens = [one.token_ids for one in expected.generate(PROMPTS, LONG)]
        assert [one.token_ids for one in llm.generate(PROMPTS, LONG)] == tokens

    def test_the_engine_captures_them_by_itself(self, target: Path, spec: SpecConfig) -> None:
        """Where a batch's whole trees are 128 tokens or more, and nowhere else."""
        llm = make(target, replace(spec, adaptive=True), cuda_graph_bs=(4, 8))
        flying = llm.engine.graph_round
        assert flying is not None
        sizes = {(one.batch_size, one.num_nodes) for one in flying.captured}
        assert sizes == {(4, None), (8, None), (8, 4), (8, 8)}
