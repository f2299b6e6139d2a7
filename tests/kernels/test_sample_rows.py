from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from specengine.kernels.dispatch import Backend
from specengine.kernels.sample.keyed_uniform import keyed_uniform
from specengine.kernels.sample.sample_rows import sample_rows
from specengine.kernels.sample.sample_rows_ref import WEIGHT_BITS, exp_below_
from specengine.kernels.sample.types import (
    MIN_P,
    SEED,
    SHIFT,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    ChoiceTable,
    DrawPlaces,
)
from tests.support.chi_squared import chisquare

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Params:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    shift: int = 0


def table_of(options: list[Params], vocab: int, device: torch.device) -> ChoiceTable:
    table = ChoiceTable.of(len(options), CPU)
    for slot, option in enumerate(options):
        for index, number in (
            (TEMPERATURE, option.temperature),
            (TOP_P, option.top_p),
            (MIN_P, option.min_p),
        ):
            table.column(index)[slot] = number
        table.words[slot, TOP_K] = option.top_k or vocab
        table.words[slot, SEED], table.words[slot, SHIFT] = option.seed, option.shift
    return ChoiceTable(table.words.to(device))


def one_by_one(places: int, device: torch.device) -> DrawPlaces:
    slots = torch.arange(places, device=device)
    return DrawPlaces(slots, 3 * slots)


def read_plainly(logits: list[float], option: Params, uniform: float) -> int:
    """The docstring, a token at a time."""
    if option.temperature == 0.0:
        return logits.index(max(logits))
    scaled = torch.tensor([logits]) / torch.tensor(option.temperature)
    e = exp_below_(scaled - scaled.max())[0].tolist()
    weights = [math.floor(x * 2**WEIGHT_BITS) for x in e]
    floor, order = 0.0, sorted(range(len(e)), key=lambda token: -e[token])
    best = order[: option.top_k] if option.top_k else order
    if option.top_k:
        floor = e[best[-1]]
    if option.top_p < 1.0:
        limit, before = option.top_p * float(sum(weights[token] for token in best)), 0
        for token in order:
            if before < limit:
                last = e[token]
            before += weights[token]
        floor = max(floor, last)
    floor = max(floor, float(torch.tensor(option.min_p)))
    kept = [w if x >= floor else 0 for w, x in zip(weights, e, strict=True)]
    target, before = min(math.floor(uniform * float(sum(kept))), sum(kept) - 1), 0
    for token, weight in enumerate(kept):
        before += weight
        if before > target:
            return token
    return 0


EVERY_KIND = [
    Params(),
    Params(0.0),
    Params(0.4, seed=-7),
    Params(top_k=3, seed=1),
    Params(top_p=0.7, seed=2),
    Params(min_p=0.2, seed=3),
    Params(1.7, 5, 0.6, 0.05, seed=2**62, shift=-2),
    Params(1e-10),
    Params(1e10, top_k=1000, top_p=0.999),
    Params(top_k=1),
    Params(top_p=1e-12),
    Params(min_p=1.0),
]

logits_lists = st.lists(
    st.sampled_from([0.0, 1.0, 1.0, 2.5, -3.0, 7.0, -math.inf, -30.0, 0.1]), min_size=5, max_size=40
).filter(lambda logits: max(logits) > -math.inf)


@settings(max_examples=200)
@given(logits_lists, st.sampled_from(EVERY_KIND), st.integers(0, 10**6))
def test_the_reference_reads_as_its_docstring(
    logits: list[float], option: Params, start: int
) -> None:
    vocab = len(logits)
    option = Params(**{**vars(option), "top_k": 0 if option.top_k >= vocab else option.top_k})
    places = DrawPlaces(torch.tensor([0]), torch.tensor([start]))
    got = sample_rows(torch.tensor([logits]), table_of([option], vocab, CPU), places, 0)
    position = torch.tensor([start + option.shift])
    uniform = keyed_uniform(torch.tensor([option.seed]), position, 0)
    assert got.tolist() == [read_plainly(logits, option, float(uniform))]


def assert_the_same(
    logits: Tensor, options: list[Params], backend: Backend, nodes: int = 1, stream: int = 0
) -> None:
    table = table_of(options, logits.shape[1], logits.device)
    one = one_by_one(len(options), logits.device)
    places = DrawPlaces(one.slots_B, one.starts_B, nodes)
    on_cpu = DrawPlaces(one.slots_B.cpu(), one.starts_B.cpu(), nodes)
    expected = sample_rows(logits.cpu(), ChoiceTable(table.words.cpu()), on_cpu, stream)
    found = sample_rows(logits, table, places, stream, backend=backend)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("scale", [0.5, 4.0])
def test_the_kernel_gives_the_same_tokens(
    scale: float, device: torch.device, row_backend: Backend
) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = (scale * torch.randn(2 * len(EVERY_KIND), 300, generator=generator)).to(device)
    assert_the_same(logits, EVERY_KIND, row_backend, nodes=2, stream=1)


@pytest.mark.parametrize("row_backend", ["torch", "triton", "cuda"], indirect=True)
def test_rows_of_a_tree_draw_at_their_depth(device: torch.device, row_backend: Backend) -> None:
    logits = torch.randn(1, 200, device=device).expand(4, -1)
    table = table_of([Params(seed=5)], 200, device)
    slot, start = torch.tensor([0], device=device), torch.tensor([9], device=device)
    chain = sample_rows(logits, table, DrawPlaces(slot, start, 4), 0, backend=row_backend)
    depths = torch.tensor([0, 1, 1, 2], device=device)
    tree = DrawPlaces(slot, start, 4, depths)
    found = sample_rows(logits, table, tree, 0, backend=row_backend)
    assert found.tolist() == chain[depths].tolist()
    assert len(set(chain.tolist())) > 1


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(logits_lists, st.lists(st.sampled_from(EVERY_KIND), min_size=2, max_size=3))
def test_the_kernel_breaks_ties_alike(
    device: torch.device, row_backend: Backend, logits: list[float], options: list[Params]
) -> None:
    options = [Params(**{**vars(one), "top_k": min(one.top_k, len(logits))}) for one in options]
    assert_the_same(torch.tensor([logits] * len(options), device=device), options, row_backend)


def test_rows_of_several_blocks(device: torch.device, row_backend: Backend) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(3, 9000, generator=generator).to(device)
    options = [Params(0.9), Params(top_p=0.9), Params(top_k=4000, top_p=0.99)]
    assert_the_same(logits, options, row_backend)


def test_more_in_the_interval_than_a_block_holds(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specengine.kernels.sample import sample_rows_triton

    monkeypatch.setattr(sample_rows_triton, "_MAX_BLOCK", 32)
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(8))
    logits[1:3] = logits[1:3].round()  # more equals than a block holds
    options = [
        Params(top_p=0.8),
        Params(top_p=0.5),
        Params(top_k=40, top_p=0.9),
        Params(top_k=90),
    ]
    assert_the_same(logits.to(device), options, "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("vocab", [49_152, 128_256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_vocabularies(vocab: int, dtype: torch.dtype, row_backend: Backend) -> None:
    generator = torch.Generator().manual_seed(vocab)
    options = [Params(**{**vars(one), "seed": seed}) for seed in range(6) for one in EVERY_KIND]
    for scale in (0.0, 0.3, 2.0, 8.0):
        logits = scale * torch.randn(len(options), vocab, generator=generator)
        assert_the_same(logits.to(dtype).float().cuda(), options, row_backend)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("row_backend", ["torch", "triton", "cuda"], indirect=True)
def test_broken_logits_stay_inside_the_vocabulary(
    device: torch.device, row_backend: Backend
) -> None:
    logits = torch.full((4, 50), math.nan, device=device)
    logits[1] = -math.inf
    logits[2, 7] = math.inf
    table = table_of([Params(), Params(top_k=3), Params(top_p=0.5), Params(0.0)], 50, device)
    tokens = sample_rows(logits, table, one_by_one(4, device), 0, backend=row_backend)
    assert all(0 <= token < 50 for token in tokens.tolist())


def test_writing_over_the_logits(device: torch.device) -> None:
    logits = torch.randn(2, 60, device=device)
    table, places = (
        table_of([Params(), Params(top_p=0.8)], 60, device),
        one_by_one(2, device),
    )
    before = logits.clone()
    expected = sample_rows(logits, table, places, 0, backend="triton")
    assert torch.equal(logits, before)
    tokens = sample_rows(logits, table, places, 0, in_place=True, backend="triton")
    assert torch.equal(tokens, expected)


@pytest.mark.parametrize(
    ("option", "shares"),
    [
        (Params(0.5), [16, 4, 4, 1]),
        (Params(top_k=2), [4, 2, 2, 0]),  # what is equal to the last one stays
        (Params(top_p=0.4), [1, 0, 0, 0]),
        (Params(top_p=0.5), [4, 2, 2, 0]),
        (Params(min_p=0.4), [4, 2, 2, 0]),
        (Params(), [4, 2, 2, 1]),
    ],
    ids=str,
)
def test_tokens_follow_the_distribution(option: Params, shares: list[int]) -> None:
    """Over seeds and positions, χ²."""
    seeds, nodes = 500, 8
    logits = torch.tensor([[4.0, 2.0, 2.0, 1.0]]).log().expand(seeds * nodes, -1)
    options = [Params(**{**vars(option), "seed": seed}) for seed in range(seeds)]
    places = DrawPlaces(torch.arange(seeds), torch.zeros(seeds, dtype=torch.int64), nodes)
    tokens = sample_rows(logits, table_of(options, 4, CPU), places, 0)
    counts = torch.bincount(tokens, minlength=4)
    expected = torch.tensor(shares).double() * seeds * nodes / sum(shares)
    assert not bool(counts[expected == 0].any())
    kept = expected > 0
    p_value = chisquare(counts[kept].numpy(), expected[kept].numpy()).pvalue
    assert p_value > 1e-3 or int(kept.sum()) == 1
