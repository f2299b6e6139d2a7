"""Chains that C looks up against those of the index in Python."""

from __future__ import annotations

import gc
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specengine.draft.ngram import chains
from specengine.draft.ngram.drafter import NgramDrafter
from specengine.kernels.native import lookup
from tests.support.draft_batches import (
    decode_batch,
    drafter,
    growing,
    nodes,
    request,
    short_of_memory,
)

pytestmark = pytest.mark.skipif(not lookup.is_compiled(), reason="no C compiler")

FEW = st.integers(0, 2)
LARGEST = (1 << 31) - 1  # token ids are 32 bits wide


def in_python(**options: int) -> NgramDrafter:
    with patch.object(lookup, "is_compiled", return_value=False):
        return drafter(lambda req: len(req.output_ids) % 7, **options)


@settings(max_examples=300)
@given(
    st.lists(st.lists(st.lists(FEW, max_size=30), min_size=3, max_size=3), min_size=1, max_size=6),
    st.integers(1, 9),
    st.integers(0, 12),
    st.sampled_from([0, LARGEST - 2]),
    st.data(),
)
def test_drafts_are_the_same(
    rounds: list[list[list[int]]], low: int, more: int, first: int, data: st.DataObject
) -> None:
    """The texts of a batch grow, and are read piece by piece."""
    options = {"ngram_min_match": low, "ngram_max_match": low + more, "num_draft_tokens": 6}
    ours, theirs = drafter(lambda req: len(req.output_ids) % 7, **options), in_python(**options)
    assert (ours._in_c, theirs._in_c) == (True, False)
    for batch in growing(rounds, first, 1, ours, data):
        found, expected = ours.draft(batch), theirs.draft(batch)
        assert torch.equal(found.tokens, expected.tokens)
        assert torch.equal(found.parents, expected.parents)
        assert (found.num_nodes, found.is_chain) == (expected.num_nodes, True)


@pytest.mark.parametrize("before", [0, 255, 256, 5000, 70_000])
def test_long_texts(before: int) -> None:
    """Whatever room they outgrow, and however often a context occurred: the latest match stands."""
    generator = torch.Generator().manual_seed(before)
    noise = torch.randint(10, 40, (before,), generator=generator).tolist()
    ours = drafter(num_draft_tokens=4, ngram_max_match=12)
    req = request([1, 2, 3, 4, 5, 6, 7, 8, 9, *noise, 1], [2, 3, 4, 5])
    assert nodes(ours.draft(decode_batch([req])))[0] == [5, 6, 7, 8]
    req.output_ids += [60, 61, 1, 2, 3, 4, 5]
    assert nodes(ours.draft(decode_batch([req])))[0] == [5, 60, 61, 1]


def test_what_is_everywhere_is_compared_a_thousand_times_at_most() -> None:
    """The longest context of the latest thousand: 3 1 2 stood before, then 1 2 alone."""
    ours = drafter(num_draft_tokens=2, ngram_max_match=4)
    for often, expected in ((900, 77), (1200, 99)):
        req = request([3, 1, 2, 77, *[1, 2, 99] * often, 3, 1], [2])
        assert nodes(ours.draft(decode_batch([req])))[0] == [2, expected]


def test_texts_that_got_no_memory_stay_as_they_were() -> None:
    texts = [chains.ChainText(request([1, 2, 3], [place]), 2, 4) for place in range(3)]
    with (
        short_of_memory(lookup.LookupText, [4, 4, 0]),
        pytest.raises(MemoryError, match="a text of 0 tokens"),
    ):
        chains.draft_chains(texts, [3, 3, 3])
    assert [text.num_tokens for text in texts] == [4, 4, 0]
    assert chains.draft_chains(texts, [3, 3, 3]).num_nodes == [1, 1, 1]
    assert [text.num_tokens for text in texts] == [4, 4, 4]


@pytest.mark.parametrize("longest", [1 << 31, 1 << 32])
def test_contexts_longer_than_any_text(longest: int) -> None:
    req = request([1, 2, 3, 4, 1], [2])
    ours = drafter(num_draft_tokens=3, ngram_max_match=longest)
    assert nodes(ours.draft(decode_batch([req])))[0] == [2, 3, 4]
    never = drafter(num_draft_tokens=3, ngram_min_match=longest, ngram_max_match=longest)
    assert nodes(never.draft(decode_batch([req])))[0] == [2]


def test_a_text_that_was_never_made_is_not_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    none = staticmethod(lambda name: lambda *given: None)
    monkeypatch.setattr(lookup.LookupText, "functions", none)
    with pytest.raises(MemoryError):
        lookup.LookupText(2, 4)
    gc.collect()
