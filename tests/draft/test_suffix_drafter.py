from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specengine.core.config import SpecConfig
from specengine.core.drafter import Drafter
from specengine.core.errors import ConfigError
from tests.support.draft_batches import (
    begin,
    decode_batch,
    depth_of,
    finish,
    nodes,
    request,
    suffix_drafter,
)


def test_proposes_what_followed_the_longest_match() -> None:
    req = request([1, 2, 3, 10, 11, 9, 2, 3, 20, 21, 8, 1, 2], [3])
    proposal = suffix_drafter(num_draft_tokens=3).draft(decode_batch([req]))
    assert nodes(proposal) == ([3, 10, 11], [-1, 0, 1])
    assert proposal.is_chain


def test_a_batch_and_its_confidence() -> None:
    """The second request has seen 2 go on with 3, 3 and 4; the third has seen nothing."""
    reqs = [request([1, 2, 3, 1], [2]), request([2, 3, 5, 2, 3, 6, 2, 4], [2]), request([4], [7])]
    proposal = suffix_drafter(num_draft_tokens=4).draft(decode_batch(reqs))
    assert proposal.num_nodes == [4, 4, 1]
    assert proposal.tokens.dtype == proposal.parents.dtype == torch.int64
    assert nodes(proposal, 0)[0] == [2, 3, 1, 2]
    assert nodes(proposal, 1)[0] == [2, 3, 6, 2]
    assert proposal.confidence is not None
    third = pytest.approx(1 / 3)
    expected = [[1, 1, 1, 1], [1, pytest.approx(2 / 3), third, third], [1, 0, 0, 0]]
    assert proposal.confidence.tolist() == expected


def test_branches_make_a_tree() -> None:
    """4 2 is as likely as 6 after 3, and begins higher up."""
    req = request([2, 3, 5, 2, 3, 6, 2, 4], [2])
    proposal = suffix_drafter(suffix_branches=2, num_draft_tokens=4).draft(decode_batch([req]))
    assert not proposal.is_chain
    assert nodes(proposal) == ([2, 3, 4, 2], [-1, 0, 0, 2])


@pytest.mark.parametrize(
    ("factor", "offset", "drafted"), [(1.0, 0.0, 2), (1.5, 0.0, 3), (0.0, 4.0, 4), (1.0, -2.0, 0)]
)
def test_the_match_sets_the_size(factor: float, offset: float, drafted: int) -> None:
    req = request([1, 2, 3, 4, 5, 6, 7, 8, 1], [2])
    made = suffix_drafter(suffix_factor=factor, suffix_offset=offset, num_draft_tokens=9)
    assert made.match_length(req) == 2
    assert made.draft(decode_batch([req])).num_drafted == [drafted]


@pytest.mark.parametrize("limit", [0, 1, 2, 3])
def test_never_more_nodes_than_the_request_can_use(limit: int) -> None:
    made = suffix_drafter(lambda req: limit)
    proposal = made.draft(decode_batch([request([1, 2, 1], [2])]))
    assert proposal.num_nodes == [max(1, limit)]


def test_text_grows_between_rounds() -> None:
    made, req = suffix_drafter(num_draft_tokens=3), request([1, 2, 3], [4])
    batch = decode_batch([req])
    assert made.draft(batch).num_nodes == [1]
    req.output_ids += [9, 1, 2]
    assert nodes(made.draft(batch))[0] == [2, 3, 4]
    req.output_ids += [3]
    assert nodes(made.draft(batch))[0] == [3, 4, 9]


@settings(max_examples=150)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(2, 9),
    st.booleans(),
)
def test_every_proposal_keeps_the_contract(
    texts: list[list[int]], branches: int, max_nodes: int, shared: bool
) -> None:
    made = suffix_drafter(
        suffix_branches=branches, num_draft_tokens=max_nodes, suffix_shared_corpus=shared
    )
    gone = request([1], [0, 1, 2, 0, 1, 1, 2, 2])
    finish(gone)
    made.release(gone)
    proposal = made.draft(decode_batch([request([0], text) for text in texts]))
    assert proposal.confidence is not None
    for i, text in enumerate(texts):
        tokens, parents = nodes(proposal, i)
        assert len(tokens) <= max_nodes
        assert tokens[0] == text[-1]
        assert min(tokens) >= 0
        assert parents[0] == -1
        assert all(0 <= parent < node for node, parent in enumerate(parents) if node)
        assert len(set(zip(parents, tokens, strict=True))) == len(tokens), "equal siblings"
        assert not proposal.is_chain or parents == list(range(-1, len(tokens) - 1))
        for num_steps in range(max_nodes):
            within = [node for node in range(len(tokens)) if depth_of(parents, node) <= num_steps]
            assert len(within) <= made.num_tree_nodes(num_steps)
        probs = proposal.confidence[i].tolist()
        assert all(probs[node] <= probs[parents[node]] for node in range(1, len(tokens)))
        for parent in range(len(tokens)):
            children = [probs[node] for node in range(1, len(tokens)) if parents[node] == parent]
            assert children == sorted(children, reverse=True), "not in order of preference"
            assert sum(children) <= probs[parent] + 1e-6


def test_other_requests_are_read_only_from_the_shared_corpus() -> None:
    text, asking = [31, 32, 33, 34, 35], request([1], [31, 32])
    for shared, expected in ((False, [32]), (True, [32, 33, 34, 35])):
        made, done = suffix_drafter(suffix_shared_corpus=shared), request([1], text)
        begin(made, done)
        assert nodes(made.draft(decode_batch([asking])))[0] == [32], "not before it finishes"
        finish(done)
        made.release(done)
        assert nodes(made.draft(decode_batch([asking])))[0] == expected
        assert made.match_length(asking) == 2 * shared


def test_prompts_stay_out_of_the_corpus() -> None:
    made, done = suffix_drafter(suffix_shared_corpus=True), request([31, 32, 33, 34], [35])
    finish(done)
    made.release(done)
    assert nodes(made.draft(decode_batch([request([1], [31, 32])])))[0] == [32]


def test_own_text_comes_before_the_corpus() -> None:
    made = suffix_drafter(suffix_shared_corpus=True, num_draft_tokens=2)
    done, own = request([1], [1, 2, 3, 4, 9]), request([3, 4, 5, 1, 2, 3], [4])
    finish(done)
    made.release(done)
    assert nodes(made.draft(decode_batch([own])))[0] == [4, 5]


def test_what_the_corpus_promises_is_weighed_against_the_own_text() -> None:
    """Own: 1 2 went on with 3 and 4. Others: always with 5 6."""
    made = suffix_drafter(suffix_shared_corpus=True, num_draft_tokens=3)
    done, own = request([9], [1, 2, 5, 6, 8]), request([1, 2, 3, 9, 1, 2, 4, 1], [2])
    assert nodes(made.draft(decode_batch([own])))[0] == [2, 4, 1]
    finish(done)
    made.release(done)
    assert nodes(made.draft(decode_batch([own])))[0] == [2, 5, 6]


def test_an_output_that_left_the_corpus_is_not_drafted() -> None:
    made = suffix_drafter(suffix_shared_corpus=True, suffix_corpus_tokens=16)
    asking = request([9], [31, 32])
    for start in (31, 41, 51):
        assert nodes(made.draft(decode_batch([asking])))[0] == (
            [32] if start == 31 else [32, 33, 34, 35]
        )
        done = request([1], list(range(start, start + 5)))
        finish(done)
        made.release(done)
    assert nodes(made.draft(decode_batch([asking])))[0] == [32]


def test_a_retracted_request_is_forgotten_and_taken_up_again() -> None:
    made, req = suffix_drafter(suffix_shared_corpus=True), request([1, 2, 3], [1, 2])
    before = nodes(made.draft(decode_batch([req])))
    made.release(req)
    assert not made._texts
    assert nodes(made.draft(decode_batch([request([7], [1, 2])])))[0] == [2], "it did not finish"
    assert nodes(made.draft(decode_batch([req]))) == before


def test_declares_what_it_is() -> None:
    chain: Drafter = suffix_drafter(num_draft_tokens=8)
    tree: Drafter = suffix_drafter(suffix_branches=2)
    assert (chain.proposes_tree, tree.proposes_tree) == (False, True)
    assert chain.max_nodes == 8
    assert (chain.needs_hidden, chain.emits_probs) == (False, False)


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"suffix_max_depth": 1}, "--speculative-suffix-max-depth"),
        ({"suffix_factor": -0.5}, "--speculative-suffix-factor"),
        ({"suffix_min_prob": 0.0}, "--speculative-suffix-min-prob"),
        ({"suffix_min_prob": 1.5}, "--speculative-suffix-min-prob"),
        ({"suffix_branches": 0}, "--speculative-suffix-branches"),
        ({"suffix_corpus_tokens": 3}, "--speculative-suffix-corpus-tokens"),
        ({"hybrid_suffix_min_match": 0}, "--speculative-hybrid-suffix-min-match"),
        (
            {"hybrid_suffix": True, "hybrid_suffix_min_match": 64},
            "--speculative-hybrid-suffix-min-match",
        ),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        SpecConfig(algorithm="SUFFIX", **options)
