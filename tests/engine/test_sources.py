"""Sources of drafts: what lookup and a model propose for rounds on the device, and which rounds
that makes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from specengine import LLM, SpecConfig
from specengine.core.drafter import Drafter, DraftsOn
from specengine.core.parallel import NoLink
from specengine.core.rows import RowBatch
from specengine.core.spec import DraftProposal, VerifyResult
from specengine.draft.empty import EmptyDrafter
from specengine.draft.hybrid import HybridDrafter
from specengine.draft.proposals import Draft, assemble
from specengine.engine.adaptive.acceptance import HybridAcceptance
from specengine.engine.adaptive.costs import RunningCosts
from specengine.engine.adaptive.estimate import HostSeconds
from specengine.engine.cost_facts import _round_facts
from specengine.engine.forward_graphs_build import kinds_of_rounds
from specengine.engine.pipeline import RoundPipeline
from specengine.engine.pipeline_build import _depths
from specengine.engine.round import lookup as lookup_module
from specengine.engine.round.build import HostRoundsError, drafted_by, make_rounds
from specengine.engine.round.device_draft import DeviceDraft
from specengine.engine.round.executor import RoundExecutor
from specengine.engine.round.hybrid import HybridDraft
from specengine.engine.round.key import RoundKey, RoundPlan
from specengine.engine.round.lookup import LookupChains, LookupDraft, LookupTrees
from specengine.engine.round.rules import Relaxed, Stochastic
from specengine.engine.round.sampling import PLAIN
from specengine.engine.round.source import DraftOptions
from specengine.kernels.tree.tree_shape import tree_shape
from specengine.kernels.tree.types import DraftTree
from tests.support.device_rounds import prepare_drafter
from tests.support.draft_batches import decode_batch, request
from tests.support.hybrid import (
    LONG,
    NODES,
    TREES,
    Folders,
    hybrid,
    make,
    source_of,
    trees,
    watched_rounds,
)
from tests.support.rounds import ON_CPU, with_graphs
from tests.support.scripted_rounds import ScriptedRounds
from tests.support.scripted_rounds import request as scripted_request

CPU = torch.device("cpu")
TREE = Draft([9, 1, 2, 3, 4], [-1, 0, 0, 2, 3])
CHAIN, SHORT = Draft([9, 1, 2, 3]), Draft([9, 1])
DEEP, NONE = Draft([9, 1, 2, 3, 4, 5]), Draft([9])
OPTIONS = DraftOptions()


def rows_of(size: int) -> RowBatch:
    return RowBatch(torch.arange(size), torch.full((size,), 8), torch.full((size,), 9))


def key_of(size: int, num_steps: int, model_steps: int | None = None) -> RoundKey:
    return RoundKey(size, num_steps, model_steps=model_steps)


class Lookup(Drafter):
    """Trees of so many levels have 1 + 2 * levels nodes, and `max_nodes` at most."""

    drafts_on: DraftsOn = "lookup"
    proposes_tree = True

    def __init__(self, max_nodes: int) -> None:
        self.max_nodes = max_nodes

    def draft(self, batch: Any) -> DraftProposal:
        raise AssertionError("it is not asked")

    def num_tree_nodes(self, num_steps: int) -> int:
        return min(self.max_nodes, 1 + 2 * num_steps)


class Model(Drafter):
    """Drafts 50 and what follows it; three levels. Notes what is called."""

    drafts_on: DraftsOn = "device"
    max_nodes = 4

    def __init__(self) -> None:
        self.calls: list[str] = []

    def draft(self, batch: Any) -> DraftProposal:
        raise AssertionError("the model is on the device")

    def draft_rows(self, rows: RowBatch, num_steps: int, picks: Any = None) -> Tensor:
        self.calls.append(f"draft {num_steps}")
        return (50 + torch.arange(num_steps)).expand(len(rows.rows_B), -1)

    def observe_rows(self, rows: Any, output: Any, tokens_BN: Tensor, accepted_B: Any) -> None:
        self.calls.append(f"observe {tokens_BN.shape[1]}")

    def sync_accepted(self, rows: Any, tokens_BN: Tensor) -> None:
        self.calls.append(f"sync {tokens_BN.shape[1]}")


class TreeModel(Model):
    """Two children a level, of which the first goes on; two levels."""

    proposes_tree = True
    max_nodes, topk, draft_slots = 5, 2, 7
    max_steps = 2

    def num_tree_nodes(self, num_steps: int) -> int:
        return 1 + 2 * num_steps

    def draft_tree_rows(
        self, rows: RowBatch, num_steps: int, edits: Any = None, num_nodes: Any = None, *_: Any
    ) -> DraftTree:
        self.calls.append(f"tree {num_steps}")
        count = num_nodes or self.num_tree_nodes(num_steps)
        nodes = torch.tensor([[0, 50, 51, 52, 53], [-1, 0, 0, 1, 1]]).expand(len(rows.rows_B), 2, 5)
        return tree_shape(rows.roots_B, nodes, count, num_steps)


def chains_beside(model: Model) -> HybridDraft:
    return HybridDraft(DeviceDraft(model), LookupChains(4, 5, CPU, counted=True), CPU)


def trees_beside(model: Model) -> HybridDraft:
    return HybridDraft(DeviceDraft(model), LookupTrees(Lookup(6), 6, 4, CPU), CPU)


# Lookup alone


LEVELS = [9] * 4  # that requests allow


def lookup_trees(max_nodes: int = 7) -> LookupTrees:
    return LookupTrees(Lookup(max_nodes), max_nodes, 4, CPU)


def tree_of(lookup: LookupTrees, size: int, num_steps: int = 6) -> DraftTree:
    tree = lookup.draft(key_of(size, num_steps), rows_of(size), OPTIONS).tree
    assert tree is not None
    return tree


@pytest.mark.parametrize(
    ("drafts", "levels", "nodes"),
    [
        ([TREE, CHAIN, NONE], [3, 3, 0], [4, 3, 0]),
        ([NONE, NONE, TREE], [0, 0, 3], [0, 0, 4]),
        ([CHAIN, NONE], [3, 0], [3, 0]),
        ([NONE], [0], [0]),
    ],
)
def test_lookup_trees_plan_levels_and_nodes(
    drafts: list[Draft], levels: list[int], nodes: list[int]
) -> None:
    plan = lookup_trees().send(assemble(drafts), LEVELS)
    assert plan == RoundPlan(levels, drafted_nodes=nodes)


def test_nothing_is_sent_where_lookup_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_module, "pinned", lambda *_: pytest.fail("nothing is to be sent"))
    batch = decode_batch([request([1, 2]), request([3])])
    plan = lookup_trees().send(EmptyDrafter().draft(batch), LEVELS)
    assert plan == RoundPlan([0, 0], drafted_nodes=[0, 0])


def test_smaller_lookup_trees_are_padded_with_their_own_parents() -> None:
    """Whatever was there before; and before any was sent."""
    lookup = lookup_trees()
    assert tree_of(lookup, 2).parents_BN.tolist() == [[-1, *range(1, 7)]] * 2
    rng = random.Random(0)
    full = Draft([rng.randrange(9) for _ in range(7)], [-1, 0, 0, 0, 0, 1, 2])
    lookup.send(assemble([full] * 3), LEVELS)
    lookup.send(assemble([TREE, CHAIN, NONE]), LEVELS)
    tree = tree_of(lookup, 3)
    assert tree.tokens_BN.tolist() == [
        [9, 1, 2, 3, 4, 0, 0],
        [9, 1, 2, 3, 0, 0, 0],
        [9, 0, 0, 0, 0, 0, 0],
    ]
    assert tree.parents_BN.tolist() == [
        [-1, 0, 0, 2, 3, 5, 6],
        [-1, 0, 1, 2, 4, 5, 6],
        [-1, 1, 2, 3, 4, 5, 6],
    ]
    assert tree.depths_BN[:, :5].tolist() == [[0, 1, 1, 2, 3], [0, 1, 2, 3, 6], [0, 6, 6, 6, 6]]
    for b, count in enumerate([5, 4, 1]):
        beyond = tree.mask_BNN[b, count:]
        assert beyond.int().tolist() == torch.eye(7).int()[count:].tolist()


def test_undefined_entries_past_the_nodes_are_not_sent() -> None:
    tokens, parents = torch.full((2, 4), -9), torch.full((2, 4), 99)
    tokens[:, 0], parents[:, 0], tokens[0, 1], parents[0, 1] = 9, -1, 6, 0
    lookup = lookup_trees()
    plan = lookup.send(DraftProposal(tokens, parents, [2, 1], is_chain=False), LEVELS)
    assert plan == RoundPlan([1, 0], drafted_nodes=[1, 0])
    tree = tree_of(lookup, 2)
    assert tree.tokens_BN.tolist() == [[9, 6, *[0] * 5], [9, *[0] * 6]]
    assert tree.parents_BN.tolist() == [[-1, 0, 2, 3, 4, 5, 6], [-1, *range(1, 7)]]


def test_shallower_rounds_take_the_first_nodes_of_lookup_trees() -> None:
    lookup, tree_of_two = lookup_trees(), Draft([9, 1, 2, 3, 4], [-1, 0, 0, 1, 2])
    lookup.send(assemble([tree_of_two, NONE]), LEVELS)
    tree, whole = tree_of(lookup, 2, num_steps=2), tree_of(lookup, 2)
    assert tree.tokens_BN.tolist() == whole.tokens_BN[:, :5].tolist()
    assert tree.parents_BN.tolist() == whole.parents_BN[:, :5].tolist()
    assert torch.equal(tree.mask_BNN, whole.mask_BNN[:, :5, :5])


@pytest.mark.parametrize("is_tree", [True, False])
def test_drafts_that_are_being_copied_are_not_written_over(
    is_tree: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[Tensor, Tensor]] = []

    def pinned(values: Tensor, device: torch.device) -> Tensor:
        assert values.is_contiguous(), "one copy"
        sent.append((values, values.clone()))
        return values

    monkeypatch.setattr(lookup_module, "pinned", pinned)
    lookup = lookup_trees() if is_tree else LookupChains(4, 5, CPU, counted=True)
    for drafts in ([DEEP, CHAIN], [CHAIN, DEEP], [NONE, DEEP]):
        lookup.send(assemble(drafts), LEVELS)
    assert len(sent) == 3
    for values, then in sent:
        assert torch.equal(values, then)
        assert values.data_ptr() != lookup.buffer.data_ptr()


# Lookup beside a model


@pytest.mark.parametrize(
    ("drafts", "levels", "plan"),
    [
        ([NONE, NONE], [5, 1], RoundPlan([3, 1])),
        ([NONE, NONE], [2, 0], RoundPlan([2, 0])),
        ([DEEP, NONE], [5, 5], RoundPlan([5, 3], model_steps=3)),
        ([SHORT, NONE], [5, 2], RoundPlan([1, 2], model_steps=2)),
        ([SHORT, NONE], [1, 1], RoundPlan([1, 1], model_steps=1)),
        ([DEEP, SHORT], [5, 5], RoundPlan([5, 1], model_steps=0)),
        ([DEEP, NONE], [5, 0], RoundPlan([5, 0], model_steps=0)),
    ],
)
def test_hybrid_chains_plan_the_models_depth(
    drafts: list[Draft], levels: list[int], plan: RoundPlan
) -> None:
    found = None if plan.model_steps is None else [draft is not NONE for draft in drafts]
    sent = chains_beside(Model()).send(assemble(drafts), levels)
    assert sent == plan._replace(from_lookup=found)


@pytest.mark.parametrize(
    ("drafts", "levels", "plan"),
    [
        ([NONE, NONE], [5, 1], RoundPlan([2, 1])),
        ([DEEP, NONE], [5, 5], RoundPlan([5, 2], drafted_nodes=[5, 0], model_steps=2)),
        ([TREE, NONE], [5, 1], RoundPlan([3, 1], drafted_nodes=[4, 0], model_steps=1)),
        ([TREE, DEEP], [5, 5], RoundPlan([3, 5], drafted_nodes=[4, 5], model_steps=0)),
        ([TREE, NONE], [5, 0], RoundPlan([3, 0], drafted_nodes=[4, 0], model_steps=0)),
    ],
)
def test_hybrid_trees_plan_the_models_depth_and_nodes(
    drafts: list[Draft], levels: list[int], plan: RoundPlan
) -> None:
    found = None if plan.model_steps is None else [draft is not NONE for draft in drafts]
    sent = trees_beside(TreeModel()).send(assemble(drafts), levels)
    assert sent == plan._replace(from_lookup=found)


def test_lookup_chains_stand_in_place_of_the_models() -> None:
    source = chains_beside(Model())
    source.send(assemble([DEEP] * 4), [5] * 4)
    proposal = assemble([NONE, DEEP, Draft([9, 1, 2])])
    proposal.num_nodes[1] = 5  # cut to what the request allows: the last token is undefined
    source.send(proposal, [5] * 3)

    def chains(size: int, steps: int, model_steps: int | None) -> list[list[int]]:
        key = key_of(size, steps, model_steps)
        found: list[list[int]] = source.draft(key, rows_of(size), OPTIONS).tokens_BK.tolist()
        return found

    found = chains(4, 5, None)
    assert found[:3] == [[50, 51, 52, 0, 0], [1, 2, 3, 4, 0], [1, 2, 0, 0, 0]]
    assert chains(3, 3, 3) == [row[:3] for row in found[:3]]
    source.send(assemble([Draft([9, 7]), DEEP]), [5] * 2)
    assert chains(2, 5, 0) == [[7, 0, 0, 0, 0], [1, 2, 3, 4, 5]]


@pytest.mark.parametrize("num_steps", [3, 4, 5])
def test_lookup_chains_are_aligned_for_kernels(num_steps: int) -> None:
    """Else a kernel is compiled anew."""
    found = chains_beside(Model()).draft(key_of(2, num_steps, 0), rows_of(2), OPTIONS)
    assert found.tokens_BK.data_ptr() % 16 == 0


OWN = [9, 50, 51, 52, 53], [-1, 0, 0, 1, 1]
OWN_CHAIN = [9, 50, 51, 52], [-1, 0, 1, 2]


def padded(given: tuple[Sequence[int], Sequence[int]], most: int) -> tuple[list[int], list[int]]:
    tokens, parents = given
    missing = range(len(tokens), most)
    return [*tokens, *[0] * len(missing)], [*parents, *missing]


def lists(source: HybridDraft, key: RoundKey) -> list[tuple[list[int], list[int]]]:
    tree = source.draft(key, rows_of(key.batch_size), OPTIONS).tree
    assert tree is not None
    return [*zip(tree.tokens_BN.tolist(), tree.parents_BN.tolist(), strict=True)]


@pytest.mark.parametrize(("model", "own"), [(TreeModel, OWN), (Model, OWN_CHAIN)])
def test_lookup_trees_stand_in_place_of_the_models(
    model: type[Model], own: tuple[list[int], list[int]]
) -> None:
    """Whatever was there before; padding is its own parent."""
    source = trees_beside(model())
    source.send(assemble([DEEP] * 4), [5] * 4)
    source.send(assemble([NONE, TREE, SHORT]), [5] * 3)
    its = [([9, 1, 2, 3, 4], [-1, 0, 0, 2, 3]), ([9, 1], [-1, 0]), (DEEP.tokens, range(-1, 5))]
    found = lists(source, key_of(4, 5))
    assert found == [padded(one, 6) for one in (own, *its)]
    shallow = lists(source, key_of(3, 1, 1))[0]
    assert shallow == (
        ([9, 50, 51], [-1, 0, 0]) if model is TreeModel else ([9, 50, 0], [-1, 0, 2])
    )
    assert lists(source, key_of(3, 3, 0))[1:] == [padded(one, 6) for one in its[:2]]
    source.send(assemble([TREE, DEEP]), [5] * 2)
    alone = key_of(2, source.model_steps)
    assert lists(source, alone) == [own, own], "the model alone drafts what it would"


def test_hybrid_sources_know_the_nodes_of_each_depth() -> None:
    both, chains = trees_beside(TreeModel()), trees_beside(Model())
    assert (both.model_steps, both.max_steps, both.draft_slots) == (2, 5, 7)
    assert (chains.model_steps, chains.max_steps, chains.draft_slots) == (3, 5, 0)
    assert [both._model_num_nodes(n) for n in (0, 1, 2, 5)] == [1, 3, 5, 5]
    assert [chains._model_num_nodes(n) for n in (0, 1, 2, 5)] == [1, 2, 3, 4]
    assert [both.num_nodes(n) for n in (1, 2, 5)] == [3, 5, 6]
    assert [chains.num_nodes(n) for n in (1, 2, 5)] == [3, 5, 6]


@pytest.mark.parametrize(
    ("make_source", "model"),
    [(chains_beside, Model), (trees_beside, Model), (trees_beside, TreeModel)],
)
def test_models_sync_what_lookup_drafted_in_their_place(
    make_source: Callable[[Model], HybridDraft], model: type[Model]
) -> None:
    """A model that drafted a tree runs again what was accepted, whatever its source; a model of
    chains has not run lookup's drafts."""
    inner = model()
    source, rows, tokens = make_source(inner), rows_of(2), torch.zeros(2, 6, dtype=torch.int64)
    is_tree = model is TreeModel
    asked = "tree 2" if is_tree else "draft 2"
    for key, drafts in (
        (key_of(2, 0), ["draft 0"]),
        (key_of(2, 2), [asked]),
        (key_of(2, 2, 2), [asked]),
        (key_of(2, 5, 0), []),
    ):
        inner.calls.clear()
        source.draft(key, rows, OPTIONS)
        source.observe(key, rows, cast(Any, None), tokens, cast(Any, None))
        has_lookup = key.model_steps is not None
        syncs = has_lookup and not (is_tree and key.model_steps)
        assert inner.calls == [*drafts, *(["sync 6"] if syncs else []), "observe 6"]


def test_hybrid_sources_are_ready_when_the_model_is() -> None:
    class Unready(Model):
        may_be_unready = True

        def is_ready(self, req: Any) -> bool:
            return bool(req.is_ready)

    source = chains_beside(Unready())
    reqs = [cast(Any, SimpleNamespace(is_ready=ready)) for ready in (True, False)]
    assert source.may_be_unready
    assert [source.is_ready(req) for req in reqs] == [True, False]
    assert not chains_beside(Model()).may_be_unready


def test_hybrid_trees_count_nodes_of_lookup_and_levels_of_the_model() -> None:
    source = trees_beside(TreeModel())
    mixed_plan = RoundPlan([2, 1], drafted_nodes=[3, 0], from_lookup=[True, False])
    mixed: Any = SimpleNamespace(plan=mixed_plan)
    assert source.num_drafted(mixed, [2, 1]) == [3, 2]
    assert source.num_drafted(mixed, [1, 2]) == [3, 4]
    alone: Any = SimpleNamespace(plan=RoundPlan([2, 0]))
    assert source.num_drafted(alone, [2, 0]) == [4, 0]


def test_drafts_past_an_end_are_not_counted_and_accepted_padding_is() -> None:
    device = ScriptedRounds(chains_beside(Model()), steps=(0, 3, 5), most_tokens=6)
    policy = SimpleNamespace(left_after=lambda reqs, emitted: [req.left for req in reqs])
    model = Model()
    drafter: Any = SimpleNamespace(drafts_on="device", lookup=Lookup(6), captures=model.captures)
    given: Any = device, drafter, SimpleNamespace(policy=policy), None, False
    pipeline, reqs = RoundPipeline(*given), [scripted_request() for _ in range(3)]
    for req, left in zip(reqs, (2, 9, 9), strict=True):
        req.left = left
    in_flight: Any = SimpleNamespace(reqs=reqs, plan=RoundPlan([3, 3, 5]))
    useful = pipeline._useful_levels(in_flight)
    assert useful == [1, 3, 5]
    result = VerifyResult([], [3, 4, 0], [3, 4, 5], None)
    assert pipeline._counted(in_flight, useful, result) == [1, 4, 5]


# Which rounds that makes


@ON_CPU
@pytest.mark.parametrize(
    ("kind", "nodes"), [(None, 4), (None, 8), *((one, NODES) for one in TREES)]
)
def test_hybrid_rounds_have_a_key_for_each_mixture_of_sources(
    kind: str | None, nodes: int, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's alone, those in which some requests have a match, and those in which all have.
    None is deeper than was chosen but where all have a match, which is padded."""
    folder, spec = folders["EAGLE3"]
    spec = hybrid(spec, nodes) if kind is None else trees(spec, kind)
    rounds, _ = watched_rounds(make(folder, spec), monkeypatch)
    most = nodes - 1
    alone, deep = key_of(2, 3), [] if most == 3 else [key_of(2, most)]
    some, every = key_of(2, 3, 3), [key_of(2, n, 0) for n in sorted({3, most})]
    assert rounds.steps == sorted({3, most})
    assert rounds.keys(2, PLAIN) == [alone, *deep, some, *every]
    assert len(rounds.keys(2, PLAIN)) <= kinds_of_rounds(spec)
    monkeypatch.setattr(rounds.sampling, "features_of", lambda reqs: PLAIN)
    reqs: list[Any] = [None] * 2

    def key(drafted: list[int], model_steps: int | None = None) -> RoundKey:
        return rounds._key(reqs, RoundPlan(drafted, model_steps=model_steps))

    assert key([3, 1]) == alone
    assert key([1, 2], 3) == some
    assert key([1, 2], 0) == every[0]
    assert key([most, 3], 3) == [some, *deep][-1]
    assert key([most, 1], 0) == every[-1]
    if kind is not None:
        source = source_of(rounds)
        own, own_lookup = source._model_num_nodes(3), source.lookup.num_nodes
        assert [own, rounds.round_slots] == [4 if kind == "text" else 11, NODES]
        expected = [2, 4, NODES] if kind == "model" else [3, NODES, NODES]
        assert [own_lookup(n) for n in (1, 3, most)] == expected
    rounds.steps = [0, 1, 2, *rounds.steps]
    for depth in (1, 2, 3):
        shallow = key_of(2, depth, depth)
        assert shallow in rounds.keys(2, PLAIN)
        assert key([depth, 1], 1) == shallow
    assert key([2, 1], 0) == every[0]


def made_of(llm: LLM) -> RoundExecutor:
    """Rounds as an engine on a GPU would make them."""
    prepare_drafter(llm)
    parts = llm.engine.parts
    given = parts.worker.runner, parts.drafter, parts.verifier, parts.adaptive is not None
    return make_rounds(with_graphs(llm), *given)


@ON_CPU
@pytest.mark.parametrize(
    ("name", "spec", "steps", "deepest"),
    [
        ("EAGLE3", {"num_draft_tokens": 4}, [0, 1, 2, 3], 3),
        ("EAGLE3", {}, [0, 1, 2, 3, 7], 3),
        ("EAGLE3", {"num_steps": 5, "num_draft_tokens": 9}, [0, 1, 2, 3, 5, 8], 5),
        *(
            ("STANDALONE", one | {"num_draft_tokens": NODES}, [0, 1, 2, 3, NODES - 1], 3)
            for one in TREES.values()
        ),
    ],
)
def test_engine_learns_the_costs_of_hybrid_rounds(
    name: str,
    spec: dict[str, Any],
    steps: list[int],
    deepest: int,
    folders: Folders,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They start from what the device takes; no tree is cut, and the drafter never pauses."""
    folder, base = folders[name]
    llm = make(folder, hybrid(base, **{"adaptive": True} | spec))
    made = made_of(llm)
    assert made.steps == steps
    assert len(made.keys(64, PLAIN)) <= kinds_of_rounds(llm.engine.parts.config.spec)
    assert {key.num_nodes for key in made.keys(64, PLAIN)} == {None}
    assert not made.may_pause
    monkeypatch.setattr(
        "specengine.engine.pipeline_build.seconds_of", lambda rounds, size, steps, *_: 1.0 + steps
    )
    depths = _depths(made, True, None, HostSeconds(True), NoLink())
    assert (depths.steps, depths.sizes) == (steps, {})
    assert isinstance(depths.costs, RunningCosts)
    assert depths.costs.of(2, steps[-1]) == 1.0 + steps[-1]
    assert depths.host is None
    assert isinstance(depths.acceptance, HybridAcceptance)
    assert depths.acceptance.model.depth == deepest
    assert depths.acceptance.lookup.depth == steps[-1]


@ON_CPU
@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("EAGLE3", {}, (False, None)),
        ("STANDALONE", {}, (False, None)),
        ("MTP layers", {}, (False, None)),
        ("EAGLE3", {"simulate_accept_length": 2.5}, (False, None)),
        ("EAGLE3", {"suffix_branches": 2}, (True, None)),
        ("MTP layers", {"suffix_branches": 2}, (True, None)),
        ("EAGLE3", {"eagle_topk": 2}, (True, None)),
        ("STANDALONE", {"eagle_topk": 2, "suffix_branches": 2}, (True, None)),
        ("EAGLE3", {"eagle_topk": 2, "simulate_accept_length": 2.5}, (True, None)),
        ("EAGLE3", {"verify": "target_only"}, (False, Stochastic)),
        ("EAGLE3", {"draft_sampling": True}, (False, Stochastic)),
        ("STANDALONE", {"draft_sampling": True, "verify": "rejection"}, (False, Stochastic)),
        ("EAGLE3", {"draft_sampling": True, "verify": "match"}, "drafts are sampled"),
        ("EAGLE3", {"verify": "relaxed"}, (False, Relaxed)),
        ("EAGLE3", {"verify": "relaxed", "simulate_accept_length": 2.5}, (False, None)),
        ("EAGLE3", {"eagle_topk": 2, "verify": "target_only"}, (True, Stochastic)),
        ("EAGLE3", {"suffix_branches": 2, "verify": "target_only"}, (True, Stochastic)),
        ("EAGLE3", {"eagle_topk": 2, "draft_sampling": True}, (True, Stochastic)),
        (
            "EAGLE3",
            {"eagle_topk": 2, "draft_sampling": True, "verify": "match"},
            "drafts are sampled",
        ),
        ("EAGLE3", {"eagle_topk": 2, "verify": "relaxed"}, (True, Relaxed)),
    ],
)
def test_hybrids_have_device_rounds_under_every_rule_that_judges_their_drafts(
    name: str, given: dict[str, Any], expected: Any, folders: Folders
) -> None:
    """Whether of trees, and the rule; or why there are none."""
    folder, spec = folders[name]
    llm = make(folder, hybrid(spec, **given))
    if isinstance(expected, str):
        with pytest.raises(HostRoundsError, match=f"^{expected}"):
            made_of(llm)
        return
    made = made_of(llm)
    source, (is_tree, rule) = source_of(made), expected
    assert source.is_tree is is_tree
    assert made.round.rule is None if rule is None else isinstance(made.round.rule, rule)


@ON_CPU
def test_a_model_drafts_no_deeper_than_there_are_nodes(folders: Folders) -> None:
    folder, spec = folders["EAGLE3"]
    made = made_of(make(folder, trees(replace(spec, num_steps=4), "model", 4)))
    assert made.steps == [3]
    assert source_of(made).model_steps == 3


NGRAM: dict[str, Any] = {"algorithm": "NGRAM", "num_draft_tokens": 12, "ngram_branches": 2}


@ON_CPU
@pytest.mark.parametrize(
    ("spec", "steps"),
    [
        (NGRAM, [0, 3, 11]),
        (NGRAM | {"num_draft_tokens": 8}, [0, 3, 7]),
        (NGRAM | {"num_draft_tokens": 7}, [0, 6]),
        (NGRAM | {"num_draft_tokens": 4, "ngram_branches": 3}, [0, 3]),
        (NGRAM | {"ngram_branches": 4}, [0, 11]),
        (NGRAM | {"hybrid_suffix": True}, [0, 3, 11]),
        (NGRAM | {"ngram_branches": 1, "suffix_branches": 2, "hybrid_suffix": True}, [0, 11]),
        ({"algorithm": "SUFFIX", "num_draft_tokens": 15, "suffix_branches": 2}, [0, 14]),
        ({"algorithm": "SUFFIX", "num_draft_tokens": 16, "suffix_branches": 2}, [0, 3, 15]),
    ],
    ids=str,
)
def test_lookup_trees_have_a_depth_between_where_they_are_smaller_there(
    spec: dict[str, Any], steps: list[int], target: Path
) -> None:
    """Also those of two lookup drafters, which are one source."""
    drafter = make(target, SpecConfig(**spec)).engine.drafter
    found = drafted_by(drafter, 4, CPU, chooses=True)
    assert isinstance(found.source, LookupDraft)
    assert found.source.is_tree
    assert found.steps == steps
    assert found.source.num_nodes(steps[-1]) == drafter.max_nodes


@ON_CPU
def test_two_lookup_drafters_of_chains_are_one_source(target: Path) -> None:
    drafter = make(target, hybrid(SpecConfig(algorithm="NGRAM"))).engine.drafter
    found = drafted_by(drafter, 4, CPU, chooses=True)
    assert isinstance(found.source, LookupDraft)
    assert not found.source.is_tree


@ON_CPU
@pytest.mark.parametrize("adaptive", [True, False])
def test_engine_learns_the_costs_of_lookup_trees_and_cuts_none(
    adaptive: bool, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lookup does not say which nodes are the best."""
    made = made_of(make(target, SpecConfig(**NGRAM, adaptive=adaptive)))
    assert isinstance(made.source, LookupDraft)
    assert not made.tree_sizes
    assert not made.may_pause
    assert (made.steps, made.most_tokens, made.round_slots) == ([0, 3, 11], 12, 12)
    assert {key.num_nodes for key in made.keys(4, PLAIN)} == {None}
    monkeypatch.setattr(
        "specengine.engine.pipeline_build.seconds_of", lambda rounds, size, steps, *_: 1.0 + steps
    )
    depths = _depths(made, False, None, HostSeconds(True), NoLink())
    assert (depths.steps, depths.sizes) == ([0, 3, 11], {})
    assert isinstance(depths.costs, RunningCosts)
    assert depths.costs.of(4, 11) == 12.0, "without the host"
    assert depths.host is None
    assert _round_facts(made)["rounds"] == "in graphs, drafts of the host"


@ON_CPU
def test_lookup_beside_a_model_is_asked_of_suffixes_alone(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the device runs plain rounds, and ahead."""
    folder, spec = folders["EAGLE3"]
    llm = make(folder, hybrid(spec))
    watched_rounds(llm, monkeypatch)
    pipeline, drafter = llm.engine.pipeline, llm.engine.drafter
    assert isinstance(drafter, HybridDrafter)
    assert pipeline is not None
    assert pipeline._index is not None
    assert pipeline._prefetch is not None
    readers: list[Any] = [pipeline._lookup, pipeline._index.drafter, pipeline._prefetch.drafter]
    assert all(one is drafter.suffix for one in readers)
    assert pipeline._prefetch._cuts, "whether a match overrides must be as on the host"
    draft_ahead, calls = drafter.suffix.draft_ahead, list[int]()

    def ahead(reqs: Any, *given: Any) -> DraftProposal:
        calls.append(len(reqs))
        return draft_ahead(reqs, *given)

    monkeypatch.setattr(drafter.suffix, "draft_ahead", ahead)
    monkeypatch.setattr(drafter, "draft", lambda batch: pytest.fail("the model is on the device"))
    llm.generate(["x", "0101" * 9], LONG)
    assert len(calls) > 10
