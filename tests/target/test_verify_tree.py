"""Tree shapes, walks over trees drawn by hand, and the batches that verification asks for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specengine.core.forward_mode import ForwardMode
from specengine.core.interfaces import LogitsOutput
from specengine.core.spec import Verifier
from specengine.target.verify.match import MatchVerifier
from specengine.target.verify.tree import ancestor_mask, depths, flat_nodes, node_mask
from specengine.target.verify.walk import Walk, walk_all
from tests.device import DEVICE
from tests.target.verify_world import Draft, TableTarget, chain, decode_batch, propose
from tests.target.verify_world import request as make_req

trees = st.lists(
    st.integers(0, 9).flatmap(
        lambda n: st.tuples(*(st.integers(0, node) for node in range(n))).map(list)
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=150)
@given(trees)
def test_masks_and_depths_follow_the_parents(parents: list[list[int]]) -> None:
    proposal = propose([0] * len(parents), [([1] * len(p), p) for p in parents])
    width = proposal.tokens.shape[1]
    mask = ancestor_mask(
        proposal.parents, node_mask(proposal.num_nodes, width, proposal.parents.device)
    )
    expected = torch.zeros_like(mask)
    depth = torch.full_like(proposal.parents, -1)
    for i, count in enumerate(proposal.num_nodes):
        for node in range(count):
            path = [node]
            while path[-1] > 0:
                path.append(int(proposal.parents[i, path[-1]]))
            expected[i, node, path] = True
            depth[i, node] = len(path) - 1
    assert torch.equal(mask, expected)
    assert torch.equal(depths(mask), depth)


def test_flat_nodes_skip_padding() -> None:
    assert flat_nodes([2, 1, 3], 3).tolist() == [0, 1, 3, 6, 7, 8]


def walk(draft: Draft, sampled: list[int]) -> Walk:
    """Between requests without draft, so that rows are ragged."""
    proposal = propose([50, 50, 50], [([], []), draft, ([], [])])
    before, found, after = walk_all(proposal, [8, *sampled, 9])
    assert (before, after) == (Walk([0], [8]), Walk([0], [9]))
    return found


@pytest.mark.parametrize(
    ("sampled", "nodes", "tokens"),
    [
        ([9, 9, 9, 9], [0], [9]),
        ([1, 9, 9, 9], [0, 1], [1, 9]),
        ([9, 2, 3, 9], [0], [9]),
        ([1, 2, 9, 9], [0, 1, 2], [1, 2, 9]),
        ([1, 2, 3, 4], [0, 1, 2, 3], [1, 2, 3, 4]),
        ([1, 3, 3, 4], [0, 1], [1, 3]),
    ],
)
def test_walks_on_a_chain(sampled: list[int], nodes: list[int], tokens: list[int]) -> None:
    """0 - 1:"1" - 2:"2" - 3:"3" """
    assert walk(chain(1, 2, 3), sampled) == Walk(nodes, tokens)


@pytest.mark.parametrize(
    ("sampled", "nodes", "tokens"),
    [
        ([9, 1, 1, 1, 1, 1], [0], [9]),
        ([2, 9, 9, 9, 9, 9], [0, 2], [2, 9]),
        ([1, 4, 9, 9, 8, 9], [0, 1, 4], [1, 4, 8]),
        ([1, 3, 9, 5, 9, 7], [0, 1, 3, 5], [1, 3, 5, 7]),
        ([1, 5, 9, 5, 9, 7], [0, 1], [1, 5]),
        ([2, 3, 3, 5, 9, 7], [0, 2], [2, 3]),
    ],
)
def test_walks_on_a_tree(sampled: list[int], nodes: list[int], tokens: list[int]) -> None:
    r"""Node:"token". Node 2 has no children, although its sibling's carry the token it samples.

              0
            /   \
         1:"1"  2:"2"
         /   \
      3:"3"  4:"4"
        |
      5:"5"
    """
    assert walk(([1, 2, 3, 4, 5], [0, 0, 1, 1, 3]), sampled) == Walk(nodes, tokens)


def test_equal_tokens_on_different_paths_are_different_nodes() -> None:
    r"""
          0
         / \
    1:"5"   2:"6"
      |       |
    3:"7"   4:"7"
    """
    draft = ([5, 6, 7, 7], [0, 0, 1, 2])
    assert walk(draft, [6, 7, 7, 1, 2]) == Walk([0, 2, 4], [6, 7, 2])
    assert walk(draft, [5, 7, 7, 1, 2]) == Walk([0, 1, 3], [5, 7, 1])


def test_nobody_drafted_is_a_plain_decode() -> None:
    batch = decode_batch([make_req(), make_req()], 5)
    verifier: Verifier = MatchVerifier()
    prepared = verifier.prepare(batch, propose([1, 1], [([], []), ([], [])]))
    assert prepared.forward_mode is ForwardMode.DECODE
    assert prepared.input_ids.tolist() == [1, 1]
    assert prepared.extend_lens == [1, 1]
    assert prepared.tree is None
    assert prepared.logits_rows is None


def test_a_chain_is_verified_without_a_tree() -> None:
    reqs = [make_req(), make_req(), make_req()]
    reqs[1].output_ids += [4, 3]
    batch = decode_batch(reqs, 5)
    prepared = MatchVerifier().prepare(batch, propose([1, 3, 1], [chain(4, 0), ([], []), chain(2)]))
    assert prepared.forward_mode is ForwardMode.TARGET_VERIFY
    assert prepared.input_ids.tolist() == [1, 4, 0, 3, 1, 2]
    assert prepared.extend_lens == [3, 1, 2]
    assert prepared.prefix_lens == [2, 4, 2]
    assert prepared.num_tokens == 6
    assert prepared.tree is None
    assert prepared.logits_rows is None
    assert prepared.sampling is batch.sampling


def test_a_tree_is_verified_under_its_mask() -> None:
    batch = decode_batch([make_req(), make_req()], 5)
    prepared = MatchVerifier().prepare(batch, propose([1, 1], [([2, 3, 4], [0, 0, 2]), chain(4)]))
    assert prepared.input_ids.tolist() == [1, 2, 3, 4, 1, 4]
    assert prepared.tree is not None
    assert prepared.tree.depths_T.tolist() == [0, 1, 1, 2, 0, 1]
    assert prepared.tree.mask_BNN[0].int().tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [1, 0, 1, 0],
        [1, 0, 1, 1],
    ]
    assert prepared.tree.mask_BNN[1].sum() == 3


def test_result_of_a_round() -> None:
    target = TableTarget(6, seed=4)
    best = target.table.argmax(-1)
    first = int(best[2, 1])
    second = int(best[1, first])
    drafts = [([(first + 1) % 6, first, second], [0, 0, 2]), ([], []), chain((first + 1) % 6)]
    options: list[dict[str, Any]] = [{"logprobs": 2}, {}, {"logprobs": 0}]
    batch = decode_batch([make_req(temperature=0.0, **o) for o in options], 6)
    proposal = propose([1, 1, 1], drafts)
    result = MatchVerifier().accept(target(batch, proposal), batch, proposal)
    third = int(best[first, second])
    assert result.tokens == [[first, second, third], [first], [first]]
    assert result.num_accepted == [2, 0, 0]
    assert result.num_drafted == [3, 0, 1]
    assert result.kv_keep == [[0, 2, 3], [0], [0]]
    assert result.logprobs is not None
    assert [len(entries) for entries in result.logprobs] == [3, 0, 1]
    contexts = [(2, 1), (1, first), (first, second)]
    for entry, context, token in zip(result.logprobs[0], contexts, result.tokens[0], strict=True):
        expected = target.table[context].log_softmax(-1)
        assert entry.token == token
        assert entry.logprob == pytest.approx(float(expected[token]), abs=1e-5)
        assert [t for t, _ in entry.top] == expected.argsort(descending=True)[:2].tolist()
    assert result.logprobs[2][0].top == []


def test_chains_move_no_kv_and_nobody_asks_for_logprobs() -> None:
    target = TableTarget(6)
    batch = decode_batch([make_req(temperature=0.0)] * 2, 6)
    rounds: list[list[Draft]] = [[chain(1, 2), chain(3)], [([], []), ([], [])]]
    for drafts in rounds:
        proposal = propose([1, 1], drafts)
        result = MatchVerifier().accept(target(batch, proposal), batch, proposal)
        assert result.kv_keep is None
        assert result.logprobs is None


def test_the_argmax_of_the_graph_is_taken() -> None:
    batch = decode_batch([make_req(temperature=0.0)], 6)
    best = torch.tensor([4, 2, 5], device=DEVICE)
    output = LogitsOutput(torch.zeros(3, 6, device=DEVICE), best)
    result = MatchVerifier().accept(output, batch, propose([1], [chain(4, 3)]))
    assert result.tokens == [[4, 2]]
