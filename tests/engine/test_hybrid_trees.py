"""What rounds of a model's trees beside a text's are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from specengine.core.batch import RowBatch
from specengine.core.spec import RowDrafter, TreeRowDrafter
from specengine.draft.proposals import Draft, assemble
from specengine.engine.adaptive.acceptance import HybridAcceptance
from specengine.engine.adaptive.costs import RunningCosts
from specengine.engine.adaptive.estimate import HostSeconds
from specengine.engine.graph_build import _depths
from specengine.engine.graph_hybrid import GraphHybridTreeRound
from specengine.engine.hybrid_trees import HybridTrees
from specengine.engine.ragged_build import _kinds_of_rounds
from specengine.engine.round_form import Form, Wish
from specengine.engine.row_choices import BEST
from specengine.kernels.tree_build import DraftTree
from specengine.kernels.tree_shape import tree_shape
from tests.engine.hybrid_tree_world import KINDS, NODES, Folders, flying_of, trees
from tests.engine.hybrid_world import LONG, make
from tests.engine.test_depth_in_results import ON_CPU
from tests.engine.test_hybrid_drafts import LateModel, Model, made_of

CPU = torch.device("cpu")
MOST = 6  # nodes
TREE = Draft([9, 1, 2, 3, 4], [-1, 0, 0, 2, 3])
DEEP, NONE = Draft([9, 1, 2, 3, 4, 5]), Draft([9])


class Trees(LateModel):
    """Two children a level, of which the first goes on: 50 and what follows it."""

    tree_row_steps, row_slots = 2, 7

    def num_tree_nodes(self, num_steps: int) -> int:
        return 1 + 2 * num_steps

    def draft_tree_rows(
        self, rows: RowBatch, num_steps: int, edits: Any = None, num_nodes: int | None = None
    ) -> DraftTree:
        self.calls.append(f"grow {num_steps}")
        count = num_nodes or self.num_tree_nodes(num_steps)
        nodes = torch.tensor([[0, 50, 51, 52, 53], [-1, 0, 0, 1, 1]]).expand(len(rows.rows_B), 2, 5)
        return tree_shape(rows.roots_B, nodes, count, num_steps)


def trees_of(inner: Model | None = None) -> HybridTrees:
    reader = SimpleNamespace(most_nodes=lambda steps: min(MOST, 1 + 2 * steps))
    return HybridTrees(cast(RowDrafter, inner or Trees()), cast(Any, reader), 4, MOST - 1, CPU)


def rows_of(size: int) -> RowBatch:
    return RowBatch(torch.arange(size), torch.full((size,), 8), torch.full((size,), 9))


def lists(tree: DraftTree) -> list[tuple[list[int], list[int]]]:
    return [*zip(tree.tokens_BN.tolist(), tree.parents_BN.tolist(), strict=True)]


def test_it_is_a_drafter_of_rounds_on_the_device() -> None:
    drafts = trees_of()
    assert isinstance(drafts, TreeRowDrafter)
    assert isinstance(drafts.beside_text(1), TreeRowDrafter)
    assert (drafts.model_steps, drafts.tree_row_steps, drafts.row_slots) == (2, MOST - 1, 7)
    chains = trees_of(Model())
    assert (chains.model_steps, chains.tree_row_steps, chains.row_slots) == (3, MOST - 1, 0)
    assert [drafts.own_nodes(n) for n in (0, 1, 2, 5)] == [1, 3, 5, 5]
    assert [chains.own_nodes(n) for n in (0, 1, 2, 5)] == [1, 2, 3, 4]
    assert [drafts.num_tree_nodes(n) for n in (1, 2, 5)] == [3, 5, 6]
    assert [chains.beside_text(0).num_tree_nodes(n) for n in (1, 2, 5)] == [3, 5, 6]


@pytest.mark.parametrize(
    ("drafts", "levels", "wish"),
    [
        ([NONE, NONE], [5, 1], Wish([2, 1])),
        ([DEEP, NONE], [5, 5], Wish([5, 2], drafted_nodes=[5, 0], model_steps=2)),
        ([TREE, NONE], [5, 1], Wish([3, 1], drafted_nodes=[4, 0], model_steps=1)),
        ([TREE, DEEP], [5, 5], Wish([3, 5], drafted_nodes=[4, 5], model_steps=0)),
        ([TREE, NONE], [5, 0], Wish([3, 0], drafted_nodes=[4, 0], model_steps=0)),
    ],
)
def test_what_a_round_is_to_be(drafts: list[Draft], levels: list[int], wish: Wish) -> None:
    of_text = None if wish.model_steps is None else [draft is not NONE for draft in drafts]
    assert trees_of().set_beside(assemble(drafts), levels) == wish._replace(of_text=of_text)


OWN = [9, 50, 51, 52, 53], [-1, 0, 0, 1, 1]
CHAIN = [9, 50, 51, 52], [-1, 0, 1, 2]


def padded(given: tuple[Sequence[int], Sequence[int]], most: int) -> tuple[list[int], list[int]]:
    tokens, parents = given
    missing = range(len(tokens), most)
    return [*tokens, *[0] * len(missing)], [*parents, *missing]


@pytest.mark.parametrize(("inner", "own", "deep"), [(Trees, OWN, 2), (Model, CHAIN, 3)])
def test_text_stands_in_place_of_the_models_drafts(
    inner: type[Model], own: tuple[list[int], list[int]], deep: int
) -> None:
    """Whatever was there before; what is missing to the largest tree is its own parent."""
    drafts = trees_of(inner())
    drafts.set_beside(assemble([DEEP] * 4), [5] * 4)
    drafts.set_beside(assemble([NONE, TREE, Draft([9, 1])]), [5] * 3)
    found = drafts.beside_text(deep).draft_tree_rows(rows_of(4), 5)
    told = [([9, 1, 2, 3, 4], [-1, 0, 0, 2, 3]), ([9, 1], [-1, 0]), (DEEP.tokens, range(-1, 5))]
    assert lists(found) == [padded(one, MOST) for one in (own, *told)]
    assert found.depths_BN[0].tolist() == [0, 1, *([1, 2, 2] if deep == 2 else [2, 3, 5]), 5]
    shallow = drafts.beside_text(1).draft_tree_rows(rows_of(3), 1)
    alone = [9, 50, 51], [-1, 0, 0 if inner is Trees else 2]
    assert shallow.tokens_BN.tolist()[0] == [*alone[0][: 3 if inner is Trees else 2], 0][:3]
    assert shallow.parents_BN.tolist()[0] == alone[1]
    everyone = drafts.beside_text(0).draft_tree_rows(rows_of(3), 3)
    assert lists(everyone)[1:] == [padded(one, MOST) for one in told[:2]]


@pytest.mark.parametrize(("inner", "own"), [(Trees, OWN), (Model, CHAIN)])
def test_the_model_alone_drafts_what_it_would(
    inner: type[Model], own: tuple[list[int], list[int]]
) -> None:
    drafts = trees_of(inner())
    drafts.set_beside(assemble([TREE, DEEP]), [5] * 2)
    tree = drafts.draft_tree_rows(rows_of(2), drafts.model_steps)
    assert lists(tree) == [own, own]
    assert tree.depths_BN.tolist()[0] == ([0, 1, 1, 2, 2] if inner is Trees else [0, 1, 2, 3])


@pytest.mark.parametrize("inner", [Trees, LateModel])
def test_who_is_called(inner: type[Model]) -> None:
    """Who grew trees, and is late, catches up where it was not asked to; who drafts chains, in all
    rounds in which others drafted."""
    model = inner()
    drafts, rows, tokens = trees_of(model), rows_of(2), torch.zeros(2, 6, dtype=torch.int64)
    given: Any = rows, None, tokens, None
    calls, grows = model.calls, inner is Trees
    drafts.draft_rows(rows, 0)
    drafts.draft_tree_rows(rows, 2)
    drafts.observe_rows(*given)
    assert calls == ["draft 0", "grow 2" if grows else "draft 2", "observe 6"]
    for steps in (2, 0):
        calls.clear()
        beside = drafts.beside_text(steps)
        beside.draft_tree_rows(rows, 5)
        beside.observe_rows(*given)
        asked = [("grow 2" if grows else "draft 2")] if steps else []
        late = [] if grows and steps else ["catch up 6"]
        assert calls == [*asked, *late, "observe 6"]


@ON_CPU
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_of_each_kind(kind: str, folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's alone, those in which some have text, and those in which all have."""
    folder, spec = folders["EAGLE3"]
    flying, _ = flying_of(make(folder, trees(spec, kind)), monkeypatch)
    most = NODES - 1
    some, everyone = Form(2, 3, model_steps=3), [Form(2, n, model_steps=0) for n in (3, most)]
    assert flying.forms(2, BEST) == [Form(2, 3), Form(2, most), some, *everyone]
    assert len(flying.forms(2, BEST)) <= _kinds_of_rounds(trees(spec, kind))
    reqs = [cast(Any, SimpleNamespace(req_pool_idx=1, sampling=LONG, grammar=None))] * 2
    monkeypatch.setattr(flying.choices, "choosing_of", lambda reqs: BEST)
    nodes = {"drafted_nodes": [4, 0]}
    assert flying._form(reqs, Wish([3, 1])) == Form(2, 3)
    assert flying._form(reqs, Wish([1, 2], model_steps=3, **nodes)) == some
    assert flying._form(reqs, Wish([most, 3], model_steps=3, **nodes)) == Form(2, most)
    assert flying._form(reqs, Wish([1, 0], model_steps=0, **nodes)) == everyone[0]
    drafts = flying.drafter
    assert drafts.grown is (None if kind == "text" else drafts.inner)
    whole = 4 if kind == "text" else 11
    assert [drafts.own_nodes(3), flying.num_slots] == [whole, NODES]
    texts = [drafts.text.num_tree_nodes(n) for n in (1, 3, most)]
    assert texts == ([2, 4, NODES] if kind == "model" else [3, NODES, NODES])


def test_what_is_counted() -> None:
    """Of text what it gave, of a model the levels that may stand; less what grammars cut."""
    flying: Any = SimpleNamespace(drafter=trees_of())
    count: Any = GraphHybridTreeRound.num_drafts

    def left(counts: list[int], levels: list[int]) -> list[int]:
        return [n - 1 if level > 1 else n for n, level in zip(counts, levels, strict=True)]

    mixed: Any = SimpleNamespace(of_text=[True, False], drafted_nodes=[3, 0], left=left)
    assert count(flying, mixed, [2, 1]) == [2, 2]
    assert count(flying, mixed, [1, 2]) == [3, 3]
    alone: Any = SimpleNamespace(of_text=None, drafted_nodes=None, left=left)
    assert count(flying, alone, [2, 0]) == [3, 0]


@ON_CPU
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_engine_makes(
    kind: str, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Costs are learned, and start from what the device takes; no tree is cut."""
    folder, spec = folders["STANDALONE"]
    llm = make(folder, trees(spec, kind, adaptive=True))
    made = made_of(llm)
    assert isinstance(made, GraphHybridTreeRound)
    assert made.steps == [0, 1, 2, 3, NODES - 1]
    assert len(made.forms(64, BEST)) <= _kinds_of_rounds(llm.engine.parts.config.spec)
    assert {form.num_nodes for form in made.forms(64, BEST)} == {None}
    assert not made.may_sleep
    assert made.samples
    monkeypatch.setattr(made, "seconds_of", lambda size, steps, nodes=None, text=0: 1.0 + steps)
    depths = _depths(made, None, HostSeconds(True))
    assert (depths.steps, depths.sizes) == (made.steps, {})
    assert isinstance(depths.costs, RunningCosts)
    assert depths.costs.of(2, NODES - 1) == float(NODES)
    assert depths.host is None
    assert isinstance(depths.acceptance, HybridAcceptance)
    assert depths.acceptance.model.depth == 3
    assert depths.acceptance.lookup.depth == NODES - 1


@ON_CPU
def test_a_model_drafts_no_deeper_than_there_are_nodes(folders: Folders) -> None:
    folder, spec = folders["EAGLE3"]
    made = made_of(make(folder, trees(replace(spec, num_steps=4), "model", 4)))
    assert isinstance(made, GraphHybridTreeRound)
    assert made.steps == [3]
    assert made.drafter.model_steps == 3
