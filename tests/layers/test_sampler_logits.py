"""The logits pipeline against a per-token reading of the parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from specengine.core.grammar import TokenMask
from specengine.core.interfaces import LogitsOutput
from specengine.core.request import Req
from specengine.core.sampling import SamplingParams
from specengine.core.sampling_batch import SamplingBatch
from specengine.layers import logits as pipeline
from specengine.layers.logits import PathTokens, RowMap, edit_logits, target_weights
from specengine.layers.sampler import Sampler
from tests.device import DEVICE
from tests.layers.sampling_reading import distribution, edited

VOCAB = 12

OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 1e-9},
    {"temperature": 1e12},
    {"top_k": 3},
    {"top_k": 500},
    {"top_p": 0.6},
    {"top_p": 1e-12},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 5, "top_p": 0.7, "min_p": 0.1, "temperature": 1.7},
    {"frequency_penalty": 0.7},
    {"presence_penalty": -1.3},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.5, "frequency_penalty": -0.4, "presence_penalty": 0.9},
    {"logit_bias": {0: 5.0, 7: -100.0}},
    {"min_tokens": 4, "stop_token_ids": (2, 3)},
    {"min_tokens": 4, "stop_token_ids": (2, 3), "ignore_eos": True},
    {"min_tokens": 2, "stop_token_ids": (2, 3)},
    {"logit_bias": {1: 4.0}, "repetition_penalty": 1.5, "min_tokens": 9, "top_p": 0.8},
]


def make_req(options: dict[str, Any], prompt: list[int], output: list[int]) -> Req:
    params = SamplingParams(**{"max_tokens": None, **options})
    return Req("r", prompt, params, eos_ids=frozenset({5, 99}), output_ids=list(output))


def random_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    logits = 2.0 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    return logits.to(DEVICE)


def weights_of(logits: Tensor, reqs: list[Req], rows: RowMap | None = None) -> Tensor:
    """Normalised, so that they are the probabilities."""
    rows = rows or RowMap()
    sampling = SamplingBatch.from_reqs(reqs, logits.shape[1], DEVICE)
    assert sampling.random is not None
    weights = target_weights(edit_logits(logits, sampling, rows), sampling.random, rows)
    return weights / weights.sum(-1, keepdim=True)


def close(got: Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(got.cpu(), torch.tensor(expected), rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_each_parameter_alone(options: dict[str, Any]) -> None:
    req = make_req(options, [1, 4, 4], [6, 6, 7])
    logits = random_logits(1)
    close(weights_of(logits, [req]), [distribution(logits[0].tolist(), req)])


def test_all_of_them_in_one_batch() -> None:
    """What one request asks changes nothing for another."""
    reqs = [make_req(o, [1, 4, i % 3], [6, 6, 7, i % 5][: i % 4]) for i, o in enumerate(OPTIONS)]
    logits = random_logits(len(reqs))
    expected = [distribution(row, req) for row, req in zip(logits.tolist(), reqs, strict=True)]
    close(weights_of(logits, reqs), expected)


token_lists = st.lists(st.integers(0, VOCAB - 1), max_size=6)


@settings(max_examples=150)
@given(
    st.lists(
        st.tuples(st.sampled_from(OPTIONS), token_lists, token_lists, token_lists),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 1000),
)
def test_rows_count_the_tokens_above_them(
    cases: list[tuple[dict[str, Any], list[int], list[int], list[int]]], seed: int
) -> None:
    """Row d of a request decides the token after d tokens of its path."""
    reqs = [make_req(options, [0, *prompt], output) for options, prompt, output, _ in cases]
    owner = [i for i, case in enumerate(cases) for _ in range(len(case[3]) + 1)]
    above = [case[3][:depth] for case in cases for depth in range(len(case[3]) + 1)]
    lengths = [len(path) for path in above]
    width = max(lengths) + 1
    rows = RowMap(
        torch.tensor(owner, device=DEVICE),
        torch.tensor(lengths, device=DEVICE),
        PathTokens(
            torch.tensor([path + [0] * (width - len(path)) for path in above]),
            torch.arange(width) < torch.tensor(lengths)[:, None],
        ).to(DEVICE),
    )
    logits = random_logits(len(owner), seed)
    sampling = SamplingBatch.from_reqs(reqs, VOCAB, DEVICE)
    before = logits.clone()
    got = edit_logits(logits, sampling, rows)
    assert torch.equal(logits, before), "raw logits are read again for logprobs"
    expected = [
        edited(row, reqs[i], path)
        for row, i, path in zip(logits.tolist(), owner, above, strict=True)
    ]
    torch.testing.assert_close(got.cpu(), torch.tensor(expected), rtol=1e-5, atol=1e-5)


@settings(max_examples=60)
@given(st.integers(0, 5000), st.floats(0.05, 0.999), st.sampled_from([0, 0, 300, 700]))
@example(45, 0.05078125, 0)  # two equal logits at the cut
def test_nuclei_larger_than_the_first_candidates(seed: int, top_p: float, top_k: int) -> None:
    logits = random_logits(2, seed, vocab=1500) / 4
    flat = make_req({"top_p": top_p, "top_k": top_k}, [1], [])
    sharp = make_req({"temperature": 0.05, "top_p": top_p}, [1], [])
    got = weights_of(logits, [flat, sharp])
    for row, req, probs in zip(logits.tolist(), (flat, sharp), got, strict=True):
        expected = torch.tensor(distribution(row, req), device=DEVICE)
        # float32 may put a token at the very edge of the nucleus on the other side of it
        assert int(((probs > 0) != (expected > 0)).sum()) <= 1
        assert float((probs - expected).abs().sum()) < 0.01


def test_ties_at_the_cut_stay() -> None:
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]], device=DEVICE)
    for options in ({"top_k": 2}, {"top_p": 0.75}):
        kept = weights_of(logits, [make_req(options, [0], [])]) > 0
        assert kept.tolist() == [[True, True, True, True, False]]


def test_top_p_keeps_the_shortest_run_that_reaches_it() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]], device=DEVICE).log()
    for top_p, count in ((0.5, 1), (0.51, 2), (0.75, 2), (0.76, 4), (1.0, 4)):
        kept = weights_of(logits, [make_req({"top_p": top_p}, [0], [])]) > 0
        assert int(kept.sum()) == count, top_p


def test_nobody_edits_nothing_is_copied() -> None:
    logits = random_logits(2)
    sampling = SamplingBatch.from_reqs([make_req({}, [1], [])] * 2, VOCAB, DEVICE)
    assert edit_logits(logits, sampling, RowMap()) is logits


def test_many_rows_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_MAX_ELEMENTS", 3 * VOCAB + 1)
    parts = list(pipeline.row_chunks(8, VOCAB))
    assert parts == [slice(0, 3), slice(3, 6), slice(6, 8)]
    assert list(pipeline.row_chunks(2, 10**9)) == [slice(0, 1), slice(1, 2)]


def token_mask(allowed: list[set[int] | None]) -> TokenMask:
    """A row each; None leaves every token."""
    masks = [row for row in allowed if row is not None]
    words = torch.tensor([[sum(1 << token for token in row)] for row in masks], dtype=torch.int32)
    places = iter(range(len(masks)))
    slots = [-1 if row is None else next(places) for row in allowed]
    return TokenMask(words.to(DEVICE), torch.tensor(slots, dtype=torch.int32, device=DEVICE))


def test_a_mask_forbids_tokens_in_its_rows_alone() -> None:
    reqs = [make_req({"temperature": 0.7, "top_k": 3}, [1], [])] * 3
    logits = random_logits(3)
    sampling = SamplingBatch.from_reqs(reqs, VOCAB, DEVICE)
    before = edit_logits(logits, sampling, RowMap())
    sampling.mask = token_mask([{1, 5}, None, {0}])
    after = edit_logits(logits, sampling, RowMap())
    for row, allowed in enumerate([{1, 5}, set(range(VOCAB)), {0}]):
        for token in range(VOCAB):
            expected = before[row, token].item() if token in allowed else float("-inf")
            assert after[row, token].item() == expected


def test_what_is_masked_has_no_weight() -> None:
    """None at all: a rule may hold a uniform of 0 against it."""
    sampling = SamplingBatch.from_reqs([make_req({}, [1], [])], VOCAB, DEVICE)
    sampling.mask = token_mask([{1, 5}])
    assert sampling.random is not None
    edited_RV = edit_logits(random_logits(1), sampling, RowMap())
    weights_RV = target_weights(edited_RV, sampling.random, RowMap())
    assert weights_RV.nonzero()[:, 1].tolist() == [1, 5]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masks_reach_every_chunk_of_rows(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows map to requests in another order than to masks."""
    monkeypatch.setattr(pipeline, "_MAX_ELEMENTS", 2 * VOCAB)
    reqs = [make_req({"temperature": temperature, "seed": 3}, [1], [])] * 4
    sampling = SamplingBatch.from_reqs(reqs, VOCAB, DEVICE)
    sampling.mask = token_mask([{7}, None, {3}, {2}, {9, 10}])
    assert not sampling.is_plain
    owners, depths = [3, 3, 1, 0, 2], [0, 1, 0, 0, 0]
    rows = RowMap(torch.tensor(owners, device=DEVICE), torch.tensor(depths, device=DEVICE))
    tokens = Sampler()(LogitsOutput(random_logits(5)), sampling, rows).tolist()
    assert [tokens[0], tokens[2], tokens[3]] == [7, 3, 2]
    assert tokens[4] in (9, 10)


def test_grammars_see_to_min_tokens_themselves() -> None:
    """Their masks hold back what ends the output, but not where nothing else is allowed."""
    req = make_req({"min_tokens": 4, "temperature": 0.0}, [1], [])
    assert SamplingBatch.from_reqs([req], VOCAB, DEVICE).edits is not None
    req.grammar = object()  # type: ignore[assignment]
    assert SamplingBatch.from_reqs([req], VOCAB, DEVICE).edits is None
