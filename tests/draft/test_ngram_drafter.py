from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specengine.core.drafter import Drafter
from specengine.core.errors import ConfigError
from tests.support.draft_batches import (
    begin,
    decode_batch,
    depth_of,
    drafter,
    finish,
    nodes,
    request,
)


def test_proposes_what_followed_the_latest_longest_match() -> None:
    req = request([1, 2, 3, 10, 11, 9, 2, 3, 20, 21, 8, 1, 2], [3])
    tokens, parents = nodes(drafter(num_draft_tokens=3).draft(decode_batch([req])))
    assert tokens == [3, 10, 11]
    assert parents == [-1, 0, 1]


def test_nothing_matches_nothing_drafted() -> None:
    proposal = drafter().draft(decode_batch([request([1, 2, 3], [4])]))
    assert proposal.num_nodes == [1]
    assert proposal.is_chain
    assert nodes(proposal) == ([4], [-1])


def test_a_period_is_read_on_in_the_draft() -> None:
    proposal = drafter(num_draft_tokens=7).draft(decode_batch([request([5, 6, 7, 5, 6], [7])]))
    assert nodes(proposal)[0] == [7, 5, 6, 7, 5, 6, 7]


def test_requests_of_a_batch_draft_alone() -> None:
    reqs = [request([1, 2, 3, 1], [2]), request([4, 5, 6], [7]), request([8, 8], [8])]
    proposal = drafter(num_draft_tokens=4).draft(decode_batch(reqs))
    assert proposal.num_nodes == [4, 1, 4]
    assert proposal.tokens.shape == proposal.parents.shape == (3, 4)
    assert proposal.tokens.dtype == torch.int64
    assert [nodes(proposal, i)[0] for i in range(3)] == [[2, 3, 1, 2], [7], [8, 8, 8, 8]]


def test_text_grows_between_rounds() -> None:
    made, req = drafter(num_draft_tokens=3), request([1, 2, 3], [4])
    batch = decode_batch([req])
    assert made.draft(batch).num_nodes == [1]
    req.output_ids += [9, 1, 2]
    assert nodes(made.draft(batch))[0] == [2, 3, 4]
    req.output_ids += [3]
    assert nodes(made.draft(batch))[0] == [3, 4, 9]


@pytest.mark.parametrize("limit", [0, 1, 2, 3])
def test_never_more_nodes_than_the_request_can_use(limit: int) -> None:
    proposal = drafter(lambda req: limit).draft(decode_batch([request([1, 2, 1], [2])]))
    assert proposal.num_nodes == [max(1, limit)]


def test_continuations_become_a_tree() -> None:
    r"""After 1 2 came 5 (latest), and before that 3 4 and 3 6.

        2
       / \
      5   3
      |   |
      9   6     3 4 is the third continuation: branches allows two
    """
    text = [1, 2, 3, 4, 7, 1, 2, 3, 6, 8, 1, 2, 5, 9, 9, 1]
    made = drafter(ngram_branches=2, ngram_max_match=2)
    proposal = made.draft(decode_batch([request(text, [2])]))
    assert not proposal.is_chain
    assert nodes(proposal) == ([2, 5, 3, 9, 6], [-1, 0, 0, 1, 2])


def test_branches_that_agree_share_nodes() -> None:
    r"""Both occurrences of 1 2 went on with 3:  2 - 3 - (6 | 4) - 8."""
    text = [1, 2, 3, 4, 7, 1, 2, 3, 6, 8, 9, 1]
    made = drafter(ngram_branches=2)
    proposal = made.draft(decode_batch([request(text, [2])]))
    assert nodes(proposal) == ([2, 3, 6, 4, 8], [-1, 0, 1, 1, 2])


def test_branches_that_never_differ_are_a_chain() -> None:
    proposal = drafter(ngram_branches=3).draft(decode_batch([request([1, 2, 3, 4, 1], [2])]))
    assert proposal.is_chain
    assert nodes(proposal) == ([2, 3, 4, 1, 2], [-1, 0, 1, 2, 3])


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
    made = drafter(ngram_branches=branches, num_draft_tokens=max_nodes, ngram_shared_corpus=shared)
    gone = request([1], [0, 1, 2, 0, 1, 1, 2, 2])
    finish(gone)
    made.release(gone)
    proposal = made.draft(decode_batch([request([0], text) for text in texts]))
    for i, text in enumerate(texts):
        tokens, parents = nodes(proposal, i)
        assert len(tokens) <= max_nodes
        assert tokens[0] == text[-1]
        assert parents[0] == -1
        assert all(0 <= parent < node for node, parent in enumerate(parents) if node)
        assert len(set(zip(parents, tokens, strict=True))) == len(tokens), "equal siblings"
        assert not proposal.is_chain or parents == list(range(-1, len(tokens) - 1))
        for num_steps in range(max_nodes):
            within = [node for node in range(len(tokens)) if depth_of(parents, node) <= num_steps]
            assert len(within) <= made.num_tree_nodes(num_steps)


def test_other_requests_are_read_only_from_the_shared_corpus() -> None:
    text, asking = [31, 32, 33, 34, 35], request([1], [31, 32])
    for shared, expected in ((False, [32]), (True, [32, 33, 34, 35])):
        made, done = drafter(ngram_shared_corpus=shared), request([1], text)
        begin(made, done)
        assert nodes(made.draft(decode_batch([asking])))[0] == [32], "not before it finishes"
        finish(done)
        made.release(done)
        assert nodes(made.draft(decode_batch([asking])))[0] == expected


def test_own_text_comes_before_the_corpus() -> None:
    made, done = (
        drafter(ngram_shared_corpus=True, num_draft_tokens=2),
        request([1], [1, 2, 3, 4, 9]),
    )
    finish(done)
    made.release(done)
    own = request([3, 4, 5, 1, 2, 3], [4])
    assert nodes(made.draft(decode_batch([own])))[0] == [4, 5]


def test_a_retracted_request_is_forgotten_and_taken_up_again() -> None:
    made, req = drafter(num_draft_tokens=3, ngram_shared_corpus=True), request([1, 2, 3], [1, 2])
    before = nodes(made.draft(decode_batch([req])))
    made.release(req)
    assert nodes(made.draft(decode_batch([request([7], [1, 2])])))[0] == [2], "it did not finish"
    assert nodes(made.draft(decode_batch([req]))) == before


def test_a_seeded_request_is_forgotten_when_it_goes() -> None:
    made, req = drafter(), request([1, 2])
    begin(made, req)
    finish(req)
    made.release(req)
    assert not made._texts


def test_declares_what_it_is() -> None:
    chain: Drafter = drafter(num_draft_tokens=8)
    tree: Drafter = drafter(ngram_branches=2)
    assert (chain.proposes_tree, tree.proposes_tree) == (False, True)
    assert chain.max_nodes == 8
    assert (chain.needs_hidden, chain.emits_probs) == (False, False)


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"ngram_min_match": 0}, "--speculative-ngram-min-match"),
        ({"ngram_max_match": 1}, "--speculative-ngram-max-match"),
        ({"ngram_branches": 0}, "--speculative-ngram-branches"),
        ({"num_draft_tokens": 1}, "--speculative-num-draft-tokens"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        drafter(**options)


class Unreadable(list[int]):
    """A prompt of which only the length may be looked at."""

    def _refuse(self, *args: Any) -> Any:
        raise AssertionError("the prompt was read again")

    __iter__ = __getitem__ = __add__ = _refuse


def test_a_prompt_is_read_once() -> None:
    made, req = drafter(), request([1, 2, 3], [1, 2])
    made.draft(decode_batch([req]))
    req.output_ids.append(3)
    batch = decode_batch([req])
    req.prompt_ids = Unreadable(req.prompt_ids)
    assert nodes(made.draft(batch))[0] == [3, 1, 2, 3, 1]
