"""Trees that the host drafts, on their way into a round on the device."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.flying_world import let_fly

from specengine import LLM, SpecConfig
from specengine.core.batch import RowBatch
from specengine.core.spec import DraftProposal, TextTreeDrafter, TreeRowDrafter
from specengine.draft.empty import EmptyDrafter
from specengine.draft.proposals import Draft, assemble
from specengine.engine import host_trees
from specengine.engine.adaptive.costs import RunningCosts
from specengine.engine.adaptive.estimate import HostSeconds
from specengine.engine.cost_facts import _round_facts
from specengine.engine.graph_build import _depths, _row_drafter, make_graph_round
from specengine.engine.graph_tree import GraphTreeRound
from specengine.engine.host_drafts import HostDrafter
from specengine.engine.host_trees import HostTrees
from specengine.engine.round_form import Wish
from specengine.engine.row_choices import BEST
from specengine.kernels.tree_build import DraftTree
from tests.engine.test_depth_in_results import ON_CPU
from tests.support.draft_batches import decode_batch, request

CPU = torch.device("cpu")
MOST = 7
TREE = Draft([5, 6, 7, 8, 9], [-1, 0, 0, 2, 3])
CHAIN = Draft([5, 6, 7, 8])
NONE = Draft([5])


def trees_of(batch_size: int = 4) -> HostTrees:
    return HostTrees(batch_size, MOST, lambda steps: min(MOST, 1 + 2 * steps), CPU)


def drafted(trees: HostTrees, size: int, num_steps: int = MOST - 1, **more: Any) -> DraftTree:
    rows = torch.arange(1, 1 + size)
    batch = RowBatch(rows, torch.full((size,), 9), torch.full((size,), 5))
    return trees.draft_tree_rows(batch, num_steps, **more)


def test_it_is_a_drafter_of_rounds_on_the_device() -> None:
    trees = trees_of()
    assert isinstance(trees, TreeRowDrafter)
    assert isinstance(trees, HostDrafter)
    assert (trees.row_steps, trees.tree_row_steps, trees.row_slots) == (None, MOST - 1, 0)
    rows = RowBatch(*[torch.tensor([1, 2])] * 3)
    assert trees.draft_rows(rows, 0).shape == (2, 0)


@pytest.mark.parametrize(
    ("drafts", "levels", "nodes"),
    [
        ([TREE, CHAIN, NONE], [3, 3, 0], [4, 3, 0]),
        ([NONE, NONE, TREE], [0, 0, 3], [0, 0, 4]),
        ([CHAIN, NONE], [3, 0], [3, 0]),
        ([NONE], [0], [0]),
    ],
)
def test_what_a_round_is_to_be(drafts: list[Draft], levels: list[int], nodes: list[int]) -> None:
    assert trees_of().set(assemble(drafts)) == Wish(levels, drafted_nodes=nodes)


def test_nothing_is_sent_where_nobody_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_trees, "pinned", lambda *_: pytest.fail("nothing is to be sent"))
    batch = decode_batch([request([1, 2]), request([3])])
    wish = trees_of().set(EmptyDrafter().draft(batch))
    assert wish == Wish([0, 0], drafted_nodes=[0, 0])


def test_smaller_trees_are_padded() -> None:
    """With nodes of which each is its own parent, whatever was there before."""
    trees = trees_of()
    rng = random.Random(0)
    full = Draft([rng.randrange(9) for _ in range(MOST)], [-1, 0, 0, 0, 0, 1, 2])
    trees.set(assemble([full] * 3))
    trees.set(assemble([TREE, CHAIN, NONE]))
    tree = drafted(trees, 3)
    assert tree.tokens_BN.tolist() == [
        [5, 6, 7, 8, 9, 0, 0],
        [5, 6, 7, 8, 0, 0, 0],
        [5, 0, 0, 0, 0, 0, 0],
    ]
    assert tree.parents_BN.tolist() == [
        [-1, 0, 0, 2, 3, 5, 6],
        [-1, 0, 1, 2, 4, 5, 6],
        [-1, 1, 2, 3, 4, 5, 6],
    ]
    assert tree.depths_BN[:, :5].tolist() == [[0, 1, 1, 2, 3], [0, 1, 2, 3, 6], [0, 6, 6, 6, 6]]
    for b, count in enumerate([5, 4, 1]):
        beyond = tree.mask_BNN[b, count:]
        assert beyond.int().tolist() == torch.eye(MOST).int()[count:].tolist()


def test_what_is_undefined_is_not_sent() -> None:
    """Entries past the nodes that exist."""
    tokens, parents = torch.full((2, 4), -9), torch.full((2, 4), 99)
    tokens[:, 0], parents[:, 0], tokens[0, 1], parents[0, 1] = 5, -1, 6, 0
    trees = trees_of()
    wish = trees.set(DraftProposal(tokens, parents, [2, 1], is_chain=False))
    assert wish == Wish([1, 0], drafted_nodes=[1, 0])
    tree = drafted(trees, 2)
    assert tree.tokens_BN.tolist() == [[5, 6, *[0] * 5], [5, *[0] * 6]]
    assert tree.parents_BN.tolist() == [[-1, 0, 2, 3, 4, 5, 6], [-1, *range(1, 7)]]


def test_before_any_was_set_nothing_stands() -> None:
    assert drafted(trees_of(), 2).parents_BN.tolist() == [[-1, *range(1, MOST)]] * 2


def test_the_first_nodes_are_a_tree() -> None:
    trees = trees_of()
    trees.set(assemble([TREE, NONE]))
    tree, whole = drafted(trees, 2, num_steps=3, num_nodes=5), drafted(trees, 2)
    assert tree.tokens_BN.tolist() == whole.tokens_BN[:, :5].tolist()
    assert tree.parents_BN.tolist() == whole.parents_BN[:, :5].tolist()
    assert torch.equal(tree.mask_BNN, whole.mask_BNN[:, :5, :5])


def test_what_is_on_its_way_is_not_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[torch.Tensor, torch.Tensor]] = []

    def pinned(values: torch.Tensor, device: torch.device) -> torch.Tensor:
        assert values.is_contiguous(), "one copy"
        sent.append((values, values.clone()))
        return values

    monkeypatch.setattr(host_trees, "pinned", pinned)
    trees = trees_of()
    for drafts in ([TREE, CHAIN], [CHAIN, TREE], [NONE, TREE]):
        trees.set(assemble(drafts))
    assert len(sent) == 3
    for values, then in sent:
        assert torch.equal(values, then)
        assert values.data_ptr() != trees.nodes.data_ptr()


TEXT: dict[str, Any] = {"algorithm": "NGRAM", "num_draft_tokens": 12, "ngram_branches": 2}
SUFFIXES = {"suffix_branches": 2}


def make(target: Path, **spec: Any) -> LLM:
    given = {"dtype": "float32", "max_total_tokens": 2048, "disable_cuda_graph": True}
    return LLM(str(target), SpecConfig(**spec), **given)


@ON_CPU
@pytest.mark.parametrize(
    ("spec", "steps"),
    [
        (TEXT, [0, 3, 11]),
        (TEXT | {"num_draft_tokens": 8}, [0, 3, 7]),
        (TEXT | {"num_draft_tokens": 7}, [0, 6]),
        (TEXT | {"num_draft_tokens": 4, "ngram_branches": 3}, [0, 3]),
        (TEXT | {"ngram_branches": 4}, [0, 11]),
        ({"algorithm": "SUFFIX", "num_draft_tokens": 15, "suffix_branches": 2}, [0, 14]),
        ({"algorithm": "SUFFIX", "num_draft_tokens": 16, "suffix_branches": 2}, [0, 3, 15]),
    ],
    ids=str,
)
def test_a_depth_between_has_a_graph_where_its_trees_are_smaller(
    spec: dict[str, Any], steps: list[int], target: Path
) -> None:
    drafter = make(target, **spec).engine.drafter
    found = _row_drafter(drafter, 4, CPU, chooses=True)
    assert found is not None
    assert isinstance(found[0], HostTrees)
    assert found[1] == steps
    assert found[0].num_tree_nodes(steps[-1]) == drafter.max_nodes


@ON_CPU
@pytest.mark.parametrize("branches", [{"ngram_branches": 2}, {"ngram_branches": 1} | SUFFIXES])
def test_hybrids_of_texts_fly_as_their_trees_do(branches: dict[str, Any], target: Path) -> None:
    drafter = make(target, **TEXT | branches, hybrid_suffix=True).engine.drafter
    assert drafter.proposes_tree
    assert isinstance(drafter, TextTreeDrafter)
    found = _row_drafter(drafter, 4, CPU, chooses=True)
    assert found is not None
    assert isinstance(found[0], HostTrees)
    assert found[0].num_tree_nodes(2) == (7 if SUFFIXES.items() <= branches.items() else 5)
    assert found[1] == ([0, 11] if SUFFIXES.items() <= branches.items() else [0, 3, 11])


@ON_CPU
@pytest.mark.parametrize("adaptive", [True, False])
def test_what_the_engine_makes(
    adaptive: bool, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Costs are learned, and no tree is cut: text does not say which nodes are the best."""
    llm = make(target, **TEXT, adaptive=adaptive)
    let_fly(llm, monkeypatch)  # for its attention
    config = llm.engine.parts.config
    graph = replace(config.graph, cuda_graph_bs=(1, 16), disable_cuda_graph=False)
    flying = make_graph_round(replace(config, graph=graph), llm.engine.parts)
    assert isinstance(flying, GraphTreeRound)
    assert isinstance(flying.drafter, HostTrees)
    assert not flying.sizes
    assert not flying.may_sleep
    assert (flying.steps, flying.num_nodes, flying.num_slots) == ([0, 3, 11], 12, 12)
    assert {form.num_nodes for form in flying.forms(16, BEST)} == {None}
    monkeypatch.setattr(flying, "seconds_of", lambda size, steps, nodes=None, text=0: 1.0 + steps)
    depths = _depths(flying, None, HostSeconds(True))
    assert (depths.steps, depths.sizes) == ([0, 3, 11], {})
    assert isinstance(depths.costs, RunningCosts)
    assert depths.costs.of(16, 11) == 12.0, "without the host"
    assert depths.host is None
    assert _round_facts(flying)["rounds"] == "in graphs, drafts of the host"
