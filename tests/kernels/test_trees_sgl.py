"""Trees by sglang-kernel against ours: on a GPU by its kernels, elsewhere by stand-ins of the same
signatures that do in loops what the kernels do."""

from __future__ import annotations

import random
import sys
from importlib.util import find_spec
from itertools import accumulate
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from specengine.kernels.accept.accept_coins import accept_coins
from specengine.kernels.accept.accept_tree import accept_tree
from specengine.kernels.accept.types import Simulated
from specengine.kernels.tree.tree_build import tree_build
from specengine.kernels.tree.types import Found, TreeLimits
from specengine.target.verify.target_only import TargetOnlyVerifier
from tests.device import DEVICE
from tests.kernels.test_accept_tree import (
    CONTEXT,
    NODES,
    STEPS,
    paths_of,
    random_tree,
    state_of,
    tree_of,
)
from tests.target.verify_world import TableTarget, decode_batch, propose, request


def build_tree_kernel_efficient(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    assert tree_mask_mode == 1
    assert parent_list.shape[1] == topk * (depth - 1) + 1
    count = draft_token_num
    for b, row in enumerate(selected_index.tolist()):
        parents = [-1]
        for candidate in row:
            above = candidate // topk
            parents.append(1 + row.index(int(parent_list[b, above])) if above else 0)
        for node in range(count - 1, 0, -1):
            retrive_next_sibling[b, node] = retrive_next_token[b, parents[node]]
            retrive_next_token[b, parents[node]] = node
        for node in range(count):
            retrive_index[b, node] = b * count + node
            path = [node]
            while parents[path[-1]] >= 0:
                path.append(parents[path[-1]])
            positions[b * count + node] = int(verified_seq_len[b]) + len(path) - 1
            for seen in path:
                tree_mask[(b * count + node) * count + seen] = True


def verify_tree_greedy(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    assert {x.dtype for x in (predicts, accept_index, accept_token_num)} == {torch.int32}
    for b in range(len(candidates)):
        last, accepted = 0, 0
        accept_index[b, 0] = retrive_index[b, 0]
        for _ in range(1, accept_index.shape[1]):
            node = int(retrive_next_token[b, last])
            while node != -1 and candidates[b, node] != target_predict[b, last]:
                node = int(retrive_next_sibling[b, node])
            if node == -1:
                break
            accepted += 1
            accept_index[b, accepted] = retrive_index[b, node]
            last = node
        accept_token_num[b] = accepted


def tree_speculative_sampling_target_only(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Where a coin is above the sum of siblings so far, the next of them is looked at; what was
    rejected is written to draft_probs, and taken from the target before the last token is drawn."""
    assert {x.dtype for x in (predicts, accept_index, accept_token_num)} == {torch.int32}
    assert {x.dtype for x in (uniform_samples, target_probs, draft_probs)} == {torch.float32}
    assert uniform_samples_for_final_sampling.dtype == torch.float32
    assert deterministic
    walks = (candidates, retrive_index, retrive_next_token, retrive_next_sibling)
    for b, (tokens, index, child, sibling) in enumerate(
        zip(*(x.tolist() for x in walks), strict=True)
    ):
        last, accepted, most = 0, 0, accept_index.shape[1] - 1
        accept_index[b, 0] = index[0]
        while accepted < most:
            mass, node = torch.zeros(()), child[last]
            while node != -1:
                chance = target_probs[b, last, tokens[node]]
                mass = mass + chance
                stands = uniform_samples[b, last] <= mass / max(threshold_acc, 1e-9)
                if stands or chance >= threshold_single:
                    break
                draft_probs[b, last, tokens[node]] = chance
                node = sibling[node]
            if node == -1:
                break
            predicts[index[last]] = tokens[node]
            accepted, last = accepted + 1, node
            accept_index[b, accepted] = index[node]
        accept_token_num[b] = accepted
        rest = target_probs[b, last]
        if accepted < most:
            rest = (rest - draft_probs[b, last]).clamp(min=0)
        sums = rest.cumsum(0)
        over = (sums > uniform_samples_for_final_sampling[b] * sums[-1]).nonzero()
        predicts[index[last]] = int(over[0]) if len(over) else len(rest) - 1


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cuda":
        if find_spec("sgl_kernel") is None:
            pytest.skip("sglang-kernel is not installed")
        return
    module = ModuleType("sgl_kernel")
    for function in (
        build_tree_kernel_efficient,
        verify_tree_greedy,
        tree_speculative_sampling_target_only,
    ):
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, "sgl_kernel", module)
    for name in ("tree_build_sgl", "accept_tree_sgl", "accept_coins_sgl"):
        monkeypatch.delitem(
            sys.modules, f"specengine.kernels.{name.split('_')[0]}.{name}", raising=False
        )


@pytest.mark.parametrize("seed", range(6))
def test_the_same_trees_are_built(seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    topk, levels, batch_size = 3, 3, 2
    found = Found.of(batch_size, topk, levels, torch.device("cpu"))
    found.tokens_BC.random_(0, 50, generator=gen)
    for b in range(batch_size):
        scores: list[float] = []
        parents: list[int] = []
        for candidate in range(found.scores_BC.shape[1]):
            level = 0 if candidate < topk else 1 + (candidate - topk) // topk**2
            first, last = (0, topk) if level < 2 else (topk, topk + topk**2)
            parent = -1 if level == 0 else random.Random(candidate + seed).randrange(first, last)
            above = scores[parent] if parent >= 0 else 0.0
            scores.append(above - float(torch.rand((), generator=gen)))
            parents.append(parent)
        found.scores_BC[b], found.parents_BC[b] = torch.tensor(scores), torch.tensor(parents)
    moved = Found(*(x.to(DEVICE) for x in (found.tokens_BC, found.scores_BC, found.parents_BC)))
    roots = torch.tensor([7, 9], device=DEVICE)
    ours = tree_build(roots, moved, 8, levels, backend="torch")
    theirs = tree_build(roots, moved, 8, levels, backend="sgl")
    for name in ("tokens_BN", "parents_BN", "depths_BN", "mask_BNN"):
        assert torch.equal(getattr(theirs, name), getattr(ours, name)), name


def test_nothing_is_limited() -> None:
    roots = torch.tensor([7, 9], device=DEVICE)
    limits = TreeLimits(2, roots, roots)
    with pytest.raises(ValueError, match="leave `limits` out"):
        tree_build(roots, Found.of(2, 2, 2, DEVICE), 4, 2, limits, backend="sgl")


@pytest.mark.parametrize("seed", range(8))
def test_the_same_paths_are_accepted(seed: int) -> None:
    rng = random.Random(seed)
    trees = [random_tree(rng) for _ in range(3)]
    chosen = [[rng.randrange(12) for _ in range(NODES)] for _ in trees]
    for (parents, tokens), row in zip(trees, chosen, strict=True):
        for node in range(NODES - 1, 0, -1):
            if rng.random() < 0.8:
                row[parents[node]] = tokens[node]
    tree = tree_of([p for p, _ in trees], [t for _, t in trees], DEVICE)
    given = torch.tensor([3, 0, 1], device=DEVICE), torch.tensor(chosen, device=DEVICE), tree
    states = [state_of([0, 10, 20, CONTEXT - 2], DEVICE) for _ in range(2)]
    for state in states:
        state.max_accepted.copy_(torch.tensor([STEPS, STEPS, seed % 3, STEPS]))
    ours = accept_tree(states[0], *given, STEPS, CONTEXT, backend="torch")
    theirs = accept_tree(states[1], *given, STEPS, CONTEXT, backend="sgl")
    assert paths_of(theirs) == paths_of(ours)
    for name, tensor in vars(ours).items():
        assert torch.equal(getattr(theirs, name), tensor), name
    for name, tensor in vars(states[0]).items():
        assert torch.equal(getattr(states[1], name), tensor), name


@pytest.mark.parametrize("seed", range(8))
def test_coins_fall_on_the_same_paths(seed: int) -> None:
    rng = random.Random(seed)
    parents = torch.tensor([random_tree(rng)[0] for _ in range(4)])
    chances = torch.zeros(4, NODES, NODES, dtype=torch.float64)
    for b, row in enumerate(parents.tolist()):
        for node, parent in enumerate(row[1:], start=1):
            # In steps of which float32 makes exact sums; 8 of them are below 1.
            chances[b, parent, node] = rng.choice([0, rng.randrange(1 << 9)]) / (1 << 12)
    uniforms = torch.tensor(
        [[rng.choice([0.0, 0.25, rng.random()]) for _ in range(NODES)] for _ in range(4)]
    ).double()
    given = [x.to(DEVICE) for x in (chances, parents.clamp(min=0), uniforms)]
    ours = accept_coins(*given, backend="torch")
    assert torch.equal(accept_coins(*given, backend="sgl"), ours)
    for b, end in enumerate(ours.tolist()):
        assert end == walk_by_coins(chances[b].tolist(), uniforms[b].tolist())


def walk_by_coins(chances: list[list[float]], uniforms: list[float]) -> int:
    node = 0
    while True:
        below = list(accumulate(chances[node]))
        if uniforms[node] >= below[-1]:
            return node
        node = next(child for child, mass in enumerate(below) if uniforms[node] < mass)


@pytest.mark.parametrize("seed", range(20))
def test_target_only_sampling_gives_the_same_tokens(seed: int) -> None:
    """In ragged trees, under every filter, the token after the path included."""
    options: list[dict[str, Any]] = [
        {"temperature": 0.7},
        {"temperature": 0.0},
        {"temperature": 1.5, "top_k": 4},
        {"top_p": 0.8},
    ]
    drafts = [([1, 2, 3, 4], [0, 0, 1, 2]), ([4], [0]), ([3, 0, 5], [0, 0, 0]), ([], [])]
    reqs = [request(seed=10 * seed + i, **one) for i, one in enumerate(options)]
    target, batch = TableTarget(6, seed=5), decode_batch(reqs, 6)
    proposal = propose([1] * len(reqs), drafts)
    output = target(batch, proposal)
    ours = TargetOnlyVerifier().accept(output, batch, proposal)
    assert TargetOnlyVerifier(backend="sgl").accept(output, batch, proposal) == ours


def test_nothing_is_simulated() -> None:
    tree = tree_of([[-1, 0]], [[5, 7]], DEVICE)
    rows, chosen = torch.tensor([1], device=DEVICE), torch.tensor([[7, 8]], device=DEVICE)
    given = state_of([0, 3], DEVICE), rows, chosen, tree, 1, CONTEXT, Simulated(1, 0.5)
    with pytest.raises(ValueError, match="leave `simulated` out"):
        accept_tree(*given, backend="sgl")
