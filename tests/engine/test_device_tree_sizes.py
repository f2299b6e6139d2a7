"""Trees of several sizes in rounds on the device: no token changes whichever is chosen, and each
round tells what smaller trees would have accepted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specengine import LLM, SpecConfig
from specengine.core.batch import ScheduleBatch
from specengine.core.grammar import GrammarSpec
from specengine.core.spec import VerifyResult
from specengine.engine import pipeline_build
from specengine.engine.adaptive.estimate import smaller_sizes
from specengine.engine.pipeline import RoundPipeline
from specengine.engine.proof.any_depth import AnyDepth
from specengine.engine.round import executor
from specengine.engine.round.executor import RoundExecutor
from specengine.engine.round.key import InFlightRound, RoundKey, RoundPlan
from specengine.engine.round.sampling import PLAIN
from tests.support.device_rounds import make_eager_rounds, prepare_drafter
from tests.support.rounds import (
    GREEDY,
    ON_CPU,
    PROMPTS,
    SAMPLED,
    WHERE,
    WITH_LOGPROBS,
    assert_same_tokens,
    fallbacks,
    make,
)

STEPS = [0, 1, 2, 3]
SIZES = {1: [2], 2: [4], 3: [4, 8]}
LONG = replace(GREEDY, max_tokens=80)
GRAMMAR = replace(GREEDY, grammar=GrammarSpec.regex("[a-z ]{10,60}"))
BATCHES = [[LONG] * 3, SAMPLED[:3], [GREEDY, *WITH_LOGPROBS[:2]], [GRAMMAR, GREEDY, GRAMMAR]]


@pytest.fixture(scope="module")
def spec(drafters: dict[str, str]) -> SpecConfig:
    return SpecConfig(
        algorithm="EAGLE3",
        adaptive=True,
        draft_model_path=drafters["EAGLE3"],
        eagle_topk=4,
        num_steps=3,
        num_draft_tokens=16,
    )


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every batch size smaller trees have graphs."""
    monkeypatch.setattr(executor, "_MANY", 1)


def draw_sizes(where: str, target: Path, spec: SpecConfig) -> tuple[LLM, RoundExecutor]:
    """Each round has a shape that is drawn."""
    if where == "gpu":
        llm = make(target, spec, cuda_graph_bs=(1, 2, 4, 8))
        assert llm.engine.pipeline is not None
        rounds = llm.engine.pipeline.executor
    else:
        llm = make(target, spec)
        prepare_drafter(llm)
        rounds = make_eager_rounds(llm, chooses=True)
        rounds.tree_sizes = smaller_sizes(STEPS, rounds.source.num_nodes)
    assert rounds.smaller_trees(4) == SIZES
    parts, depths = llm.engine.parts, AnyDepth(STEPS, rounds.tree_sizes)
    llm.engine.pipeline = RoundPipeline(rounds, parts.drafter, parts.scheduler, depths, True)
    return llm, rounds


def prefilled(llm: LLM) -> ScheduleBatch:
    """All prompts, ready for their first round."""
    for i, prompt in enumerate(PROMPTS):
        llm.engine.add_request(str(i), llm.tokenizer.encode(prompt), GREEDY)
    llm.engine.step()
    batch = llm.engine.scheduler.schedule()
    assert batch is not None
    return batch


@pytest.mark.parametrize("where", WHERE)
def test_sizes_that_change_do_not_change_tokens(
    where: str, target: Path, spec: SpecConfig, any_size: None
) -> None:
    host = make(target, None, disable_cuda_graph=True)
    llm, rounds = draw_sizes(where, target, spec)
    for params in BATCHES:
        assert_same_tokens(host, llm, PROMPTS, params)
    sizes = Counter(key.num_nodes for key in rounds.captured)
    assert sizes.keys() == {None, 2, 4, 8}
    assert not fallbacks(rounds)
    assert llm.engine.scheduler.spec_totals.num_accepted_tokens > 20
    assert rounds.source.num_nodes(3) == 16
    assert llm.engine.pipeline is not None
    assert llm.engine.pipeline.depths.chooser is not None
    assert llm.engine.pipeline.depths.chooser.acceptance.has_ranks


@ON_CPU
def test_rounds_tell_what_smaller_trees_accept(
    target: Path, spec: SpecConfig, any_size: None
) -> None:
    """Each round is run in every size from the same state; the whole tree's outcome is kept."""
    llm, rounds = draw_sizes("cpu", target, spec)
    batch = prefilled(llm)
    for req in batch.reqs:
        assert llm.engine.scheduler.ledger.reserve(req, 200)
    llm.engine.scheduler.ledger.flush()
    state, drafter, compared = rounds.state, llm.engine.parts.drafter, 0
    rounds.rows[:3] = rounds.host_view.write(batch.reqs)

    def run(num_nodes: int | None) -> list[list[int]]:
        rounds.bind(RoundKey(4, 3, num_nodes=num_nodes)).run()
        outcome: list[list[int]] = state.outcomes[int(state.turn), :3].tolist()
        return outcome

    tables: Any = state.lens, state.roots, getattr(drafter, "states")  # noqa: B009
    for _ in range(8):
        before, found = [x.clone() for x in tables], {}
        for size in (2, 4, 8, 12, None):
            for x, value in zip(tables, before, strict=True):
                x.copy_(value)
            found[size] = run(size)
        for b, whole in enumerate(found[None]):
            ranks = whole[5 : 5 + whole[0]]
            assert ranks == sorted(ranks)
            for size, rows in found.items():
                if size is not None:
                    assert rows[b][0] == sum(rank < size for rank in ranks)
                    compared += rows[b][0] < whole[0]
    assert compared > 5, "smaller trees accepted less, now and then"


@ON_CPU
def test_accepted_nodes_are_collected_by_rank(
    target: Path, spec: SpecConfig, any_size: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, rounds = draw_sizes("cpu", target, spec)
    collected: list[tuple[RoundKey, VerifyResult]] = []
    collect = rounds.collect

    def watched(in_flight: InFlightRound) -> VerifyResult:
        collected.append((in_flight.key, collect(in_flight)))
        return collected[-1][1]

    monkeypatch.setattr(rounds, "collect", watched)
    llm.generate(PROMPTS, LONG)
    assert {key.num_nodes for key, _ in collected} == {None, 2, 4, 8}
    for key, result in collected:
        if key.num_steps == 0:
            assert result.path_ranks is None
            continue
        whole = rounds.source.num_nodes(key.num_steps)
        nodes = min(whole, key.num_nodes or whole)
        assert result.num_drafted == [nodes - 1] * len(result.tokens)
        assert result.path_ranks is not None
        assert [len(row) for row in result.path_ranks] == result.num_accepted
        assert all(row == sorted(set(row)) for row in result.path_ranks)
        assert max((max(row, default=0) for row in result.path_ranks), default=0) < nodes


@ON_CPU
def test_smaller_trees_have_graphs_where_nodes_cost_and_memory_is_left(
    target: Path, spec: SpecConfig, any_size: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere rounds have whole trees. All graphs are measured."""
    llm, rounds = draw_sizes("cpu", target, spec)
    monkeypatch.setattr(executor, "_MANY", 64)
    assert [rounds.smaller_trees(size) for size in (1, 4, 13)] == [{}, {2: [4], 3: [4, 8]}, SIZES]
    monkeypatch.setattr(pipeline_build, "seconds_of", lambda _, b, k, n: 100.0 * b + 10.0 * k + n)
    measured = pipeline_build._smaller_trees(rounds)
    assert measured == {4: {4: {2: 424.0, 3: 434.0}}, 8: {4: {3: 438.0}}}
    reqs, plan = prefilled(llm).reqs, RoundPlan([3] * 3, num_nodes=8)
    assert rounds._key(reqs, plan).num_nodes == 8
    assert rounds._key(reqs[:1], plan).num_nodes is None
    assert rounds._key(reqs, RoundPlan([1] * 3, num_nodes=8)).num_nodes is None
    keys = {(one.num_steps, one.num_nodes) for one in rounds.keys(4, PLAIN)}
    assert keys == {(0, None), (1, None), (2, None), (3, None), (2, 4), (3, 4), (3, 8)}
    rounds.runner.graph_memory.budget = 0
    assert rounds._key(reqs, plan).num_nodes is None


@pytest.mark.parametrize("where", [WHERE[1]])
def test_engine_captures_and_measures_smaller_trees(
    where: str, target: Path, spec: SpecConfig
) -> None:
    """Where a batch's whole trees are 128 tokens or more, and nowhere else."""
    llm = make(target, spec, cuda_graph_bs=(4, 8))
    pipeline = llm.engine.pipeline
    assert pipeline is not None
    assert pipeline.depths.chooser is not None
    sizes = {(one.batch_size, one.num_nodes) for one in pipeline.executor.captured}
    assert sizes == {(4, None), (8, None), (8, 4), (8, 8)}
    for shape in pipeline.depths.chooser.shapes:
        seconds = pipeline.depths.chooser.costs.of(8, shape.num_steps, shape.num_nodes)
        assert seconds is not None
        assert 0 < seconds < 1
    assert_same_tokens(make(target, None, disable_cuda_graph=True), llm, PROMPTS, LONG)
