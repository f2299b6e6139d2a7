"""Logprobs, and what follows a prefill."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from specengine.core.batch import ScheduleBatch
from specengine.core.forward_mode import ForwardMode
from specengine.core.interfaces import LogitsOutput
from specengine.core.request import Req, TokenLogprob
from specengine.core.sampling import SamplingParams
from specengine.core.sampling_batch import SamplingBatch
from specengine.core.spec import PrefillResult
from specengine.layers import logits as pipeline
from specengine.layers.logprobs import token_logprobs
from specengine.layers.prefill_sampler import sample_prefill
from tests.device import DEVICE

VOCAB = 11


def table() -> Tensor:
    """Logits of the token after each token: what a model would say, at every position."""
    logits = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))
    return logits.to(DEVICE)


def make_req(prompt: list[int], output: list[int] | None = None, **options: Any) -> Req:
    options = {"temperature": 0.0, **options}
    return Req("r", prompt, SamplingParams(**options), req_pool_idx=0, output_ids=output or [])


def check(got: TokenLogprob, previous: int, token: int, top: int) -> None:
    expected = table()[previous].log_softmax(-1)
    order = expected.argsort(descending=True)[:top].tolist()
    assert got.token == token
    assert got.logprob == pytest.approx(float(expected[token]), abs=1e-5)
    assert [t for t, _ in got.top] == order
    assert [p for _, p in got.top] == pytest.approx(expected[order].tolist(), abs=1e-5)


def prefill(reqs: list[Req], spans: list[tuple[int, int]], samples: list[bool]) -> PrefillResult:
    """Run the table over tokens start..end of each request, in one prefill batch."""
    batch = ScheduleBatch(
        reqs=reqs,
        forward_mode=ForwardMode.EXTEND,
        input_ids=[t for req, (a, b) in zip(reqs, spans, strict=True) for t in req.token_ids[a:b]],
        prefix_lens=[a for a, _ in spans],
        extend_lens=[b - a for a, b in spans],
        samples=samples,
        sampling=SamplingBatch.from_reqs(reqs, VOCAB, DEVICE),
    )
    worker_batch = batch.get_model_worker_batch()
    rows = worker_batch.logits_rows
    return sample_prefill(LogitsOutput(table()[worker_batch.input_ids[rows]]), batch)


def test_logprobs_of_chosen_tokens_and_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, rows, tokens, counts = table(), [3, 1, 1, 10], [0, 5, 2, 9], [0, 2, VOCAB, 1]
    for budget in (2**24, 2 * VOCAB):
        monkeypatch.setattr(pipeline, "_MAX_ELEMENTS", budget)
        index = torch.tensor([rows, tokens], device=DEVICE)
        found = token_logprobs(logits, index[0], index[1], counts)
        for got, row, token, count in zip(found, rows, tokens, counts, strict=True):
            check(got, row, token, count)


def test_more_alternatives_than_tokens() -> None:
    index = torch.tensor([[0], [2]], device=DEVICE)
    [got] = token_logprobs(table()[:, :4], index[0], index[1], [20])
    assert sorted(t for t, _ in got.top) == [0, 1, 2, 3]


def test_first_tokens_of_those_that_sample() -> None:
    """The middle request is an unfinished chunk, the last one rides along decoding."""
    reqs = [make_req([1, 2, 3]), make_req([4, 5, 6, 7]), make_req([8], [2, 4])]
    result = prefill(reqs, [(0, 3), (0, 2), (2, 3)], [True, False, True])
    best = table().argmax(-1).tolist()
    assert result.tokens == [best[3], None, best[4]]
    assert result.logprobs == [None, None, None]
    assert result.prompt_logprobs == [[], [], []]


def test_sampling_parameters_follow_their_request() -> None:
    reqs = [make_req([1, 2]), make_req([3, 4]), make_req([3, 4], logit_bias={7: 100.0})]
    result = prefill(reqs, [(0, 1), (0, 2), (0, 2)], [False, True, True])
    assert result.tokens == [None, int(table()[4].argmax()), 7]


def test_logprobs_of_first_tokens() -> None:
    reqs = [make_req([1, 2]), make_req([3, 4], logprobs=2), make_req([5], logprobs=0)]
    result = prefill(reqs, [(0, 1), (0, 2), (0, 1)], [False, True, True])
    assert result.logprobs[0] is None
    for i, previous, top in ((1, 4, 2), (2, 5, 0)):
        got = result.logprobs[i]
        assert got is not None
        check(got, previous, int(table()[previous].argmax()), top)


@pytest.mark.parametrize("cuts", [[0, 6], [0, 1, 6], [0, 2, 4, 6], [0, 5, 6]])
def test_prompt_logprobs_over_chunks(cuts: list[int]) -> None:
    """The chunks together give one entry a prompt token, None for the first."""
    prompt = [3, 1, 4, 1, 5, 9]
    other = make_req([2, 6], logprobs=1)
    req = make_req(prompt, prompt_logprobs=3)
    entries: list[TokenLogprob | None] = []
    token = None
    for start, end in pairwise(cuts):
        result = prefill([other, req], [(0, 2), (start, end)], [True, end == 6])
        entries += result.prompt_logprobs[1]
        token = result.tokens[1]
        assert result.prompt_logprobs[0] == []
        assert result.tokens[0] == int(table()[6].argmax())
    assert token == int(table()[9].argmax())
    assert len(entries) == len(prompt)
    assert entries[0] is None
    for place, entry in enumerate(entries[1:], start=1):
        assert entry is not None
        check(entry, prompt[place - 1], prompt[place], 3)


def test_a_retracted_request_gives_no_prompt_logprobs_again() -> None:
    req = make_req([1, 2, 3], [4, 5], prompt_logprobs=1)
    result = prefill([req], [(0, 4)], [False])
    assert result.prompt_logprobs == [[]]
    assert result.tokens == [None]


def test_logprobs_are_of_the_raw_distribution() -> None:
    req = make_req([1, 2], temperature=0.0, logit_bias={5: 100.0}, logprobs=1)
    result = prefill([req], [(0, 2)], [True])
    assert result.logprobs[0] is not None
    check(result.logprobs[0], 2, 5, 1)
