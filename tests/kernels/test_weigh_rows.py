from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from specengine.kernels.dispatch import Backend
from specengine.kernels.sample.sample_rows import sample_rows
from specengine.kernels.sample.sample_rows_ref import WEIGHT_BITS, exp_below_
from specengine.kernels.sample.types import ChoiceTable, DrawPlaces
from specengine.kernels.sample.weigh_rows import weigh_rows
from tests.kernels.test_sample_rows import CPU, EVERY_KIND, Params, one_by_one, table_of


def weighed(
    logits: Tensor, options: list[Params], nodes: int = 1, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """Tokens and weights, on the CPU."""
    one = one_by_one(len(options), logits.device)
    table, weights = table_of(options, logits.shape[1], logits.device), logits.clone()
    places = DrawPlaces(one.slots_B, one.starts_B, nodes)
    tokens = weigh_rows(weights, table, places, 1, backend=backend)
    return tokens.cpu(), weights.cpu()


def random_logits(rows: int, vocab: int, seed: int = 3) -> Tensor:
    logits = 4.0 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    logits[::2] = logits[::2].round()  # equals, at borders as well
    logits[:, 5] = -math.inf
    return logits


def kept_plainly(logits: Tensor, option: Params) -> list[float]:
    """The docstrings, a token at a time."""
    if option.temperature == 0.0:
        best = logits.tolist().index(float(logits.max()))
        return [float(token == best) for token in range(len(logits))]
    scaled = logits[None] / torch.tensor(option.temperature)
    e = exp_below_(scaled - scaled.max())[0].tolist()
    order = sorted(range(len(e)), key=lambda token: -e[token])
    best_k = order[: option.top_k] if option.top_k else order
    floor, last = e[best_k[-1]] if option.top_k else 0.0, 0.0
    weights = [math.floor(x * 2**WEIGHT_BITS) for x in e]
    if option.top_p < 1.0:
        limit, before = option.top_p * float(sum(weights[token] for token in best_k)), 0
        for token in order:
            last = e[token] if before < limit else last
            before += weights[token]
        floor = max(floor, last)
    floor = max(floor, float(torch.tensor(option.min_p)))
    pairs = zip(e, weights, strict=True)
    return [x if x >= floor and weight else 0.0 for x, weight in pairs]


def test_the_reference_reads_as_its_docstring() -> None:
    options = [Params(**{**vars(one), "top_k": one.top_k % 40}) for one in EVERY_KIND]
    logits = random_logits(len(options), 40)
    _, weights = weighed(logits, options)
    for row, option, found in zip(logits, options, weights.tolist(), strict=True):
        assert found == kept_plainly(row, option), option


@pytest.mark.parametrize("vocab", [300, 9000])
def test_the_kernel_gives_the_same_bits(
    vocab: int, device: torch.device, row_backend: Backend
) -> None:
    options = (
        EVERY_KIND if vocab < 1000 else [Params(0.9), Params(0.0), Params(top_k=4000, top_p=0.99)]
    )
    logits = random_logits(2 * len(options), vocab)
    found = weighed(logits.to(device), options, nodes=2, backend=row_backend)
    expected = weighed(logits, options, nodes=2, backend="torch")
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1].view(torch.int32), expected[1].view(torch.int32))


@pytest.mark.parametrize("row_backend", ["torch", "triton", "cuda"], indirect=True)
def test_tokens_are_those_that_are_sampled(device: torch.device, row_backend: Backend) -> None:
    logits = random_logits(2 * len(EVERY_KIND), 200).to(device)
    found, _ = weighed(logits, EVERY_KIND, nodes=2, backend=row_backend)
    one, table = one_by_one(len(EVERY_KIND), CPU), table_of(EVERY_KIND, 200, CPU)
    places = DrawPlaces(one.slots_B, one.starts_B, 2)
    assert found.tolist() == sample_rows(logits.cpu(), table, places, 1).tolist()


@pytest.mark.parametrize("row_backend", ["torch", "triton", "cuda"], indirect=True)
def test_rows_that_lie_apart_and_depths(device: torch.device, row_backend: Backend) -> None:
    """Nothing between the rows is written."""
    logits = random_logits(4, 100).to(device)
    expected = logits.clone()
    table = ChoiceTable(table_of([Params(seed=5)], 100, device).words)
    slot, start = torch.tensor([0], device=device), torch.tensor([9], device=device)
    tokens = weigh_rows(expected, table, DrawPlaces(slot, start, 4), 0, backend=row_backend)
    wide = torch.full((4, 160), 7.0, device=device)
    depths = torch.tensor([3, 1, 2, 0], device=device)
    wide[:, :100] = logits[depths]
    places = DrawPlaces(slot, start, 4, depths)
    found = weigh_rows(wide[:, :100], table, places, 0, backend=row_backend)
    assert torch.equal(found, tokens[depths])
    assert torch.equal(wide[:, :100], expected[depths])
    assert bool((wide[:, 100:] == 7.0).all())


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("vocab", [49_152, 128_256])
def test_large_vocabularies(vocab: int, row_backend: Backend) -> None:
    options = [Params(**{**vars(one), "seed": seed}) for seed in range(4) for one in EVERY_KIND]
    logits = random_logits(len(options), vocab)
    found, expected = weighed(logits.cuda(), options, backend=row_backend), weighed(logits, options)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1].view(torch.int32), expected[1].view(torch.int32))
