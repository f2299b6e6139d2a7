from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specengine.core.interfaces import LogitsOutput
from specengine.core.request import Req
from specengine.core.sampling import SamplingParams
from specengine.core.sampling_batch import SamplingBatch
from specengine.kernels.sample.sample_rows_ref import invert_cdf
from specengine.layers import logits as pipeline
from specengine.layers.logits import RowMap, edit_logits, target_weights
from specengine.layers.sampler import Sampler
from tests.device import DEVICE
from tests.layers.sampling_reading import distribution
from tests.support.chi_squared import chisquare


def make_req(seed: int = 0, output: int = 0, **options: Any) -> Req:
    return Req("r", [0], SamplingParams(**options), seed=seed, output_ids=[1] * output)


def sample(logits: Tensor, reqs: list[Req], rows: RowMap | None = None) -> list[int]:
    sampling = SamplingBatch.from_reqs(reqs, logits.shape[1], DEVICE)
    return Sampler()(LogitsOutput(logits.to(DEVICE)), sampling, rows or RowMap()).tolist()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.4},
        {"top_k": 4},
        {"top_p": 0.7},
        {"min_p": 0.15},
        {"repetition_penalty": 3.0},
        {"logit_bias": {2: 3.0}},
    ],
    ids=str,
)
def test_distribution_is_the_one_asked_for(options: dict[str, Any]) -> None:
    """Integrated over the uniform, not sampled: it takes the middles of equal cells."""
    logits = 1.5 * torch.randn(1, 9, generator=torch.Generator().manual_seed(3))
    cells = 20_000
    req = make_req(**options)
    sampling = SamplingBatch.from_reqs([req], 9, DEVICE)
    assert sampling.random is not None
    edited = edit_logits(logits.to(DEVICE), sampling, RowMap())
    weights = target_weights(edited, sampling.random, RowMap())
    uniforms = (torch.arange(cells, dtype=torch.float64, device=DEVICE) + 0.5) / cells
    tokens = invert_cdf(weights.expand(cells, -1), uniforms)
    got = torch.bincount(tokens, minlength=9).cpu() / cells
    expected = torch.tensor(distribution(logits[0].tolist(), req))
    assert float((got - expected).abs().max()) <= 1.01 / cells
    assert not bool(((expected == 0) & (got > 0)).any())


def test_keyed_draws_follow_the_distribution() -> None:
    """Over seeds at one position, and over positions of one seed."""
    logits = torch.randn(1, 6, generator=torch.Generator().manual_seed(5))
    expected = logits.softmax(-1)[0].numpy() * 4000
    by_seed = [make_req(seed=s) for s in range(4000)]
    by_position = [make_req(seed=7, output=n) for n in range(0, 4000)]
    for reqs in (by_seed, by_position):
        tokens = sample(logits.expand(4000, -1), reqs)
        counts = torch.bincount(torch.tensor(tokens), minlength=6).numpy()
        assert chisquare(counts, expected * counts.sum() / expected.sum()).pvalue > 1e-3


def test_a_seed_reproduces_its_tokens_in_any_company() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    options: list[dict[str, Any]] = [
        {"temperature": 0.8},
        {"temperature": 0.0},
        {"top_p": 0.9},
        {"top_k": 7, "temperature": 2.0},
        {"min_p": 0.05, "repetition_penalty": 1.2},
        {"logit_bias": {3: 2.0}, "frequency_penalty": 0.5},
    ]
    reqs = [make_req(seed=10 + i, output=i, **o) for i, o in enumerate(options)]
    alone = [sample(logits[i : i + 1], [req])[0] for i, req in enumerate(reqs)]
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4], [2, 5], [4, 4, 0]):
        together = sample(logits[order], [reqs[i] for i in order])
        assert together == [alone[i] for i in order]


def test_rows_draw_at_the_position_they_decide() -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(2)).expand(5, -1)
    decoded = [sample(logits[:1], [make_req(seed=3, output=n)])[0] for n in range(5)]
    rows = RowMap(torch.zeros(5, dtype=torch.int64, device=DEVICE), torch.arange(5, device=DEVICE))
    assert sample(logits, [make_req(seed=3)], rows) == decoded
    assert len(set(decoded)) > 1


def test_greedy_takes_the_best_and_the_lowest_id_among_equals() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 1.0, 3.0, 3.0]])
    assert sample(logits, [make_req(temperature=0.0), make_req(top_k=1)]) == [1, 0]


def test_greedy_and_sampled_rows_mix() -> None:
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(4)).expand(8, -1)
    reqs = [make_req(seed=i, temperature=1.0 if i % 2 else 0.0) for i in range(8)]
    tokens = sample(logits, reqs)
    assert set(tokens[::2]) == {int(logits[0].argmax())}
    assert tokens[1::2] == [sample(logits[:1], [req])[0] for req in reqs[1::2]]


def test_greedy_batches_take_the_argmax_of_the_graph() -> None:
    taken = torch.tensor([2, 0], device=DEVICE)
    output = LogitsOutput(torch.zeros(2, 3, device=DEVICE), taken)
    greedy = SamplingBatch.from_reqs([make_req(temperature=0.0)] * 2, 3, DEVICE)
    assert Sampler()(output, greedy) is taken
    biased = [make_req(temperature=0.0, logit_bias={1: 1.0}), make_req(temperature=0.0)]
    edited = SamplingBatch.from_reqs(biased, 3, DEVICE)
    assert Sampler()(output, edited).tolist() == [1, 0]


def test_rows_taken_in_parts_choose_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(7, 20, generator=torch.Generator().manual_seed(6))
    options: list[dict[str, Any]] = [{"top_p": 0.8}, {"frequency_penalty": 1.0}, {"top_k": 1}]
    reqs = [make_req(seed=i, output=i, **options[i % 3]) for i in range(7)]
    owners, depths = [0, 0, 1, 1, 2, 5, 5], [0, 1, 0, 1, 0, 0, 1]
    rows = RowMap(torch.tensor(owners, device=DEVICE), torch.tensor(depths, device=DEVICE))
    whole = sample(logits, reqs), sample(logits, reqs, rows)
    monkeypatch.setattr(pipeline, "_MAX_ELEMENTS", 50)
    assert (sample(logits, reqs), sample(logits, reqs, rows)) == whole


@settings(max_examples=200)
@given(
    st.lists(st.sampled_from([0.0, 0.0, 1e-30, 1e-9, 0.3, 1.0]), min_size=1, max_size=12).filter(
        lambda weights: max(weights) > 0.1
    ),
    st.sampled_from([0.0, 2.0**-53, 0.5, 1.0 - 2.0**-53]),
)
def test_never_a_token_of_weight_zero(weights: list[float], uniform: float) -> None:
    uniforms = torch.tensor([uniform], dtype=torch.float64, device=DEVICE)
    token = int(invert_cdf(torch.tensor([weights], device=DEVICE), uniforms))
    assert weights[token] > 0


def test_cumulative_sums_of_a_large_vocabulary_do_not_drift() -> None:
    """Half of the mass is spread over 100,000 tokens too small for float32 sums."""
    weights = torch.full((1, 200_001), 0.25 / 100_000, device=DEVICE)
    weights[0, 100_000] = 0.5
    for uniform, token in ((0.24, 96_000), (0.2501, 100_000), (0.7499, 100_000), (0.76, 104_001)):
        uniforms = torch.tensor([uniform], dtype=torch.float64, device=DEVICE)
        index = int(invert_cdf(weights, uniforms))
        assert abs(index - token) <= 2


def test_broken_logits_never_index_outside_the_vocabulary() -> None:
    logits = torch.full((1, 5), float("nan"))
    assert 0 <= sample(logits, [make_req()])[0] < 5
