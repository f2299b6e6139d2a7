"""Chains that C drafts against those of the trees in Python."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise
from math import fsum
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specengine.core.config import SpecConfig
from specengine.core.request import Req
from specengine.core.spec import DraftProposal
from specengine.draft.proposals import Draft
from specengine.draft.suffix import chains
from specengine.draft.suffix.chains import ChainText
from specengine.draft.suffix.drafter import SuffixDrafter
from specengine.draft.suffix.expand import MAX_SUFFIXES, Expander, draft_sizes
from specengine.draft.suffix.match import Match
from specengine.draft.suffix.text import RequestText
from specengine.draft.suffix.tree import SuffixTree
from specengine.kernels.native import suffix
from specengine.kernels.native.suffix import ChainRules, SuffixText
from specengine.kernels.native.texts import extend
from tests.support.draft_batches import (
    begin,
    decode_batch,
    finish,
    growing,
    nodes,
    request,
    short_of_memory,
    suffix_drafter,
)

pytestmark = pytest.mark.skipif(not suffix.is_compiled(), reason="no C compiler")

LARGEST = (1 << 31) - 1  # token ids are 32 bits wide
TEXTS = st.integers(0, 3).flatmap(lambda most: st.lists(st.integers(0, most), max_size=40))
OPTIONS = st.fixed_dictionaries(
    {
        "suffix_max_depth": st.sampled_from([2, 3, 5, 8, 64]),
        "suffix_min_prob": st.sampled_from([0.01, 0.1, 0.3, 0.5, 1.0]),
        "suffix_factor": st.sampled_from([0.0, 0.5, 1.3, 2.0, 9.0]),
        "suffix_offset": st.sampled_from([-3.0, 0.0, 1.0, 4.0]),
    }
)


def limit(req: Req) -> int:
    return len(req.output_ids) % 9


def in_python(**options: Any) -> SuffixDrafter:
    with patch.object(suffix, "is_compiled", return_value=False):
        return suffix_drafter(limit, **options)


def rules_of(spec: SpecConfig) -> ChainRules:
    return ChainRules(draft_sizes(spec), spec.suffix_min_prob, MAX_SUFFIXES)


def assert_equal(found: DraftProposal, expected: DraftProposal) -> None:
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.parents, expected.parents)
    assert found.confidence is not None
    assert expected.confidence is not None
    assert found.confidence.dtype == expected.confidence.dtype
    assert torch.equal(found.confidence, expected.confidence)
    assert (found.num_nodes, found.ranks) == (expected.num_nodes, expected.ranks)
    assert (found.is_chain, found.draft_probs) == (True, None)


@settings(max_examples=300)
@given(
    st.lists(st.lists(TEXTS, min_size=3, max_size=3), min_size=1, max_size=6),
    OPTIONS,
    st.integers(2, 9),
    st.sampled_from([0, LARGEST - 3]),
    st.data(),
)
def test_drafts_are_the_same(
    rounds: list[list[list[int]]],
    options: dict[str, Any],
    most: int,
    first: int,
    data: st.DataObject,
) -> None:
    """The texts of a batch grow, and are read piece by piece."""
    options |= {"num_draft_tokens": most, "min_match": data.draw(st.sampled_from([0, 0, 2, 4]))}
    ours, theirs = suffix_drafter(limit, **options), in_python(**options)
    for batch in growing(rounds, first, first + 1, ours, data):
        assert_equal(ours.draft(batch), theirs.draft(batch))
        for req in batch.reqs:
            assert ours.match_length(req) == theirs.match_length(req)
            assert ours.draft_one(req) == theirs.draft_one(req)
    assert all(isinstance(text, ChainText) for text in ours._texts.values())
    assert all(isinstance(text, RequestText) for text in theirs._texts.values())


@settings(max_examples=200)
@given(TEXTS, OPTIONS, st.sampled_from([-1, 0, 1, 2, 7, 100]))
def test_after_every_token(text: list[int], options: dict[str, Any], most: int) -> None:
    spec = SpecConfig(algorithm="SUFFIX", **options)
    tree, ours = SuffixTree(spec.suffix_max_depth), SuffixText(spec.suffix_max_depth)
    expander, rules = Expander(spec), rules_of(spec)
    for token in text:
        tree.extend([token])
        extend([ours], [[token]])
        assert (ours.num_tokens, ours.match_length) == (len(tree.tokens), tree.length)
        expected = expander.best(token, Match.own(tree), most)
        assert ours.draft(most, rules) == (expected.tokens, expected.confidence)


def fibonacci_word(length: int) -> list[int]:
    shorter, longer = [0], [0, 1]
    while len(longer) < length:
        shorter, longer = longer, longer + shorter
    return longer[:length]


def noise(length: int, most: int) -> list[int]:
    generator = torch.Generator().manual_seed(most)
    return torch.randint(0, most + 1, (length,), generator=generator).tolist()


LONG = 12_000
WORDS = {
    "one token": [5] * LONG,
    "one token, then another": [*[5] * LONG, 6, *[5] * 100],
    "runs of any length": [token for run in range(150) for token in [*[5] * run, 6]],
    "period 1": [3, *[1] * LONG],
    "period 7": [*range(7)] * (LONG // 7),
    "period 1000": [*range(1000)] * (LONG // 1000),
    "Fibonacci": fibonacci_word(LONG),
    "Thue-Morse": [number.bit_count() % 2 for number in range(LONG)],
    "two tokens": noise(LONG, 1),
    "tokens that never repeat": [*range(LONG)],
    "many children": [token for other in range(LONG // 2) for token in (1, 2 + other)],
    "100,000 tokens": [*noise(50_000, 4), *fibonacci_word(50_000)],
}


@pytest.mark.parametrize("name", WORDS)
@pytest.mark.parametrize("max_depth", [16, 2000])
def test_long_texts(name: str, max_depth: int) -> None:
    """Whatever room they outgrow, read in portions that grow."""
    text, spec = WORDS[name], SpecConfig(algorithm="SUFFIX", suffix_max_depth=max_depth)
    tree, ours = SuffixTree(max_depth), SuffixText(max_depth)
    expander, rules = Expander(spec), rules_of(spec)
    marks = [0, 1, 2, 3, 60, 64, 65, 127, 128, 500, 3000, len(text) - 50, len(text)]
    for start, stop in pairwise(marks):
        tree.extend(text[start:stop])
        extend([ours], [text[start:stop]])
        assert (ours.num_tokens, ours.match_length) == (stop, tree.length)
        expected = expander.best(text[stop - 1], Match.own(tree), 50)
        assert ours.draft(50, rules) == (expected.tokens, expected.confidence)


def test_hundreds_in_one_call() -> None:
    texts = [noise(20 + place, 1 + place % 4) for place in range(300)]
    reqs = [request(text, [1, 0]) for text in texts]
    ours, theirs = suffix_drafter(limit), in_python()
    for more in range(3):
        for req in reqs:
            req.output_ids += req.prompt_ids[more : 4 * more]
        batch = decode_batch(reqs)
        assert_equal(ours.draft(batch), theirs.draft(batch))


def test_requests_that_left_are_forgotten_and_taken_up_again() -> None:
    made, req = suffix_drafter(), request([1, 2, 3], [1, 2])
    made.index_ahead(req, 9)
    assert not made._texts
    begin(made, req)
    made.index_ahead(req, 4)
    text = made._texts[req]
    assert text.num_tokens == 4
    before = nodes(made.draft(decode_batch([req])))
    assert (before[0], text.num_tokens) == ([2, 3, 1, 2, 3], 5)
    made.release(req)
    made.release(req)
    made.index_ahead(req, 9)
    assert not made._texts
    assert nodes(made.draft(decode_batch([req]))) == before
    assert made._texts[req] is not text


def test_texts_are_freed_with_their_drafter() -> None:
    freed: list[int] = []
    given = SuffixText.functions("text_free")

    def free(pointer: int) -> None:
        freed.append(pointer)
        given(pointer)

    made, reqs = suffix_drafter(), [request([1, 2], [place]) for place in range(3)]
    made.draft(decode_batch(reqs))
    texts: list[Any] = [made._texts[req] for req in reqs]
    pointers = [text.text.pointer for text in texts]
    for text in texts:
        text.text._free = free
    del texts, text
    finish(reqs[0])
    made.release(reqs[0])
    assert freed == pointers[:1]
    gone = weakref.ref(made)
    del made
    gc.collect()
    assert gone() is None
    assert sorted(freed) == sorted(pointers)


@pytest.mark.parametrize("options", [{"suffix_branches": 2}, {"suffix_shared_corpus": True}])
def test_trees_and_shared_texts_stay_in_python(options: dict[str, Any]) -> None:
    made, req = suffix_drafter(**options), request([1, 2, 3], [1, 2])
    made.draft(decode_batch([req]))
    assert isinstance(made._texts[req], RequestText)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = decode_batch([request([1, 2, 3], [1, 2])])
    expected = suffix_drafter(limit).draft(batch)
    monkeypatch.setattr(suffix, "library", lambda name: None)
    made = suffix_drafter(limit)
    assert_equal(expected, made.draft(batch))
    assert isinstance(made._texts[batch.reqs[0]], RequestText)


@pytest.mark.parametrize("is_compensated", [False, True])
def test_sums_are_rounded_as_python_rounds_them(is_compensated: bool) -> None:
    """0 0 promises 1/3 three times, 0 alone 0.6 + 0.2 + 0.2: the same but for rounding."""
    text, spec = [0, 0, 0, 2, 0, 0, 1, 0, 0], SpecConfig(algorithm="SUFFIX", suffix_factor=9.0)
    tree, ours, rules = SuffixTree(64), SuffixText(64), rules_of(spec)
    tree.extend(text)
    extend([ours], [text])

    def drafted() -> list[int]:
        return Expander(spec).best(0, Match.own(tree), 3).tokens

    assert ours.draft(3, rules)[0] == drafted(), "as this Python sums"

    def promised(draft: Draft) -> float:
        total, confidence = 0.0, draft.confidence or [1.0]
        for prob in confidence:
            total += prob
        return (fsum(confidence) if is_compensated else total) - 1.0

    rules._rules.is_compensated = is_compensated
    with patch.object(Draft, "num_expected", property(promised)):
        expected = drafted()
    assert ours.draft(3, rules)[0] == expected
    assert expected == ([0, 1, 0, 0] if is_compensated else [0, 0, 1, 0])


def test_texts_without_memory_can_go_on() -> None:
    """The second took one token of two, the third none."""
    rules = rules_of(SpecConfig(algorithm="SUFFIX"))
    texts = [ChainText(request([place], [place]), 64, rules) for place in range(3)]
    with (
        short_of_memory(SuffixText, [2, 1, 0]),
        pytest.raises(MemoryError, match="a text of 1 tokens"),
    ):
        chains.draft_chains(texts, [3, 3, 3], rules)
    assert [text.num_tokens for text in texts] == [2, 1, 0]
    proposal = chains.draft_chains(texts, [3, 3, 3], rules)
    assert [text.num_tokens for text in texts] == [2, 2, 2]
    assert [nodes(proposal, place)[0] for place in range(3)] == [[0] * 3, [1] * 3, [2] * 3]


def test_a_text_that_was_never_made_is_not_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    none = staticmethod(lambda name: lambda *given: None)
    monkeypatch.setattr(SuffixText, "functions", none)
    with pytest.raises(MemoryError):
        SuffixText(64)
    gc.collect()
