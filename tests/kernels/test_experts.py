"""Experts in Triton against the reference, which tests/target compares with
transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specengine.kernels.dispatch import MOST_SHARED
from specengine.kernels.experts import experts_triton, order_triton
from specengine.kernels.experts.experts import experts, room_for_parts
from specengine.kernels.experts.tiles import WHOLE
from specengine.kernels.experts.types import Activation, Chosen, ExpertWeights
from tests.kernels import offline_triton

HIDDEN, INNER = 80, 40


def make(count: int, device: torch.device, bias: bool = False, **options: Any) -> ExpertWeights:
    generator = torch.Generator().manual_seed(count)

    def normal(*shape: int) -> Tensor:
        return (0.3 * torch.randn(*shape, generator=generator)).to(device)

    weights = ExpertWeights(
        normal(count, 2 * INNER, HIDDEN), normal(count, HIDDEN, INNER), **options
    )
    if not bias:
        return weights
    return replace(weights, gate_up_bias=normal(count, 2 * INNER), down_bias=normal(count, HIDDEN))


def choose(rows: int, count: int, chosen: int, device: torch.device, skew: float = 1.0) -> Chosen:
    """skew: 0 sends all rows to the first experts."""
    generator = torch.Generator().manual_seed(rows)
    scores = skew * torch.rand(rows, count, generator=generator) - torch.arange(count)
    ids = (
        scores.topk(chosen).indices
        if skew < 1
        else torch.rand(rows, count, generator=generator).topk(chosen).indices
    )
    weights = torch.rand(rows, chosen, generator=generator)
    return Chosen(ids.int().to(device), weights.to(device))


def summed(out: Tensor) -> Tensor:
    return out.sum(0) if out.dim() == 3 else out


CASES = {
    "one row": (1, 8, 3, {}),
    "fewer slots than experts": (2, 16, 4, {}),
    "more slots than experts": (9, 5, 2, {}),
    "biases, clamped": (
        5,
        6,
        2,
        {"bias": True, "activation": Activation("clamped", 1.7, 0.4)},
    ),
    "weight before": (4, 6, 1, {"weighs_input": True}),
    "sorted": (70, 6, 2, {"bias": True}),
    "few rows of many experts each": (54, 12, 10, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_triton_equals_reference(name: str, device: torch.device) -> None:
    rows, count, chosen, options = CASES[name]
    weights = make(count, device, **options)
    picked = choose(rows, count, chosen, device)
    x = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(1)).to(device)
    expected = experts(x, picked, weights, backend="torch")
    found = summed(experts(x, picked, weights, backend="triton"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [40, 66])
def test_all_rows_on_the_same_experts(rows: int, device: torch.device) -> None:
    """One expert has more rows than a tile, and others have none."""
    weights, picked = make(5, device), choose(rows, 5, 2, device, skew=0.0)
    x = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(2)).to(device)
    expected = experts(x, picked, weights, backend="torch")
    found = summed(experts(x, picked, weights, backend="triton"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_row_does_not_depend_on_others(device: torch.device) -> None:
    """Within a tiling: the interpreter adds up steps of other sizes in another order, as a card
    does not (benchmarks/kernels/experts.py compares tilings)."""
    weights, picked = make(16, device), choose(9, 16, 3, device)
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(3)).to(device)
    together = experts(x, picked, weights, backend="triton")
    for row in (0, 4):
        one = Chosen(picked.ids_TK[row : row + 1], picked.weights_TK[row : row + 1])
        alone = experts(x[row : row + 1], one, weights, backend="triton")
        assert torch.equal(alone[:, 0], together[:, row])


def test_tiles_of_few_rows_follow_the_rows_of_an_expert() -> None:
    steps = [WHOLE.tiles_of(rows, 128, 8).gate_up.inputs for rows in (1, 16, 31, 32, 64)]
    assert steps == [128, 128, 128, 64, 64]
    assert len({WHOLE.tiles_of(rows, 128, 8).down for rows in (1, 64)}) == 1


@pytest.mark.parametrize("rows", [2, 70])
def test_parts_fill_the_room_that_is_made_for_them(rows: int, device: torch.device) -> None:
    weights, picked = make(6, device), choose(rows, 6, 2, device)
    x = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(4)).to(device)
    room = room_for_parts(x, 2, weights, 1, backend="triton")
    assert room is not None
    room[-1] = 7.0
    found = experts(x, picked, weights, room, backend="triton")
    assert found.data_ptr() == room.data_ptr()
    assert torch.equal(found, experts(x, picked, weights, backend="triton"))
    assert len(room) == len(found) + 1
    assert torch.equal(room[-1], torch.full_like(x, 7.0))


def test_sums_need_no_room(device: torch.device) -> None:
    weights = make(3, device)
    for rows in (0, 1, 64, 65, 256, 257):
        x = torch.empty(rows, HIDDEN, device=device)
        room = room_for_parts(x, 2, weights, 1, backend="triton")
        assert (room is None) is (rows in (0, 257))
        assert room_for_parts(x, 2, weights, 1, backend="torch") is None


def test_many_rows_are_summed_in_their_dtype(device: torch.device) -> None:
    """Past the rows whose parts the norm adds up."""
    weights, picked = make(3, device), choose(260, 3, 2, device)
    x = torch.randn(260, HIDDEN, generator=torch.Generator().manual_seed(4)).to(device)
    found = experts(x, picked, weights, backend="triton")
    assert found.shape == x.shape
    expected = experts(x, picked, weights, backend="torch")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_rows_that_go_in_pieces_are_those_of_one(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine rows by four: the last piece must not be the one that leaves parts."""
    monkeypatch.setattr(experts_triton, "PART_ROWS", 1)
    weights, chosen = make(8, device), choose(9, 8, 3, device)
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(1)).to(device)
    whole = experts(x, chosen, weights, backend="triton")
    monkeypatch.setattr(experts_triton, "SLICE", 4)
    torch.testing.assert_close(experts(x, chosen, weights, backend="triton"), whole)


def test_no_rows(device: torch.device) -> None:
    picked = Chosen(torch.empty(0, 2, dtype=torch.int32, device=device), torch.empty(0, 2))
    out = experts(torch.empty(0, HIDDEN, device=device), picked, make(3, device), backend="triton")
    assert summed(out).shape == (0, HIDDEN)


@pytest.mark.slow
def test_all_forms_compile_for_hopper(triton_cache: Path) -> None:
    """The interpreter takes what the compiler does not, and has no end of shared memory."""
    found = offline_triton.run(
        "tests.kernels.offline_experts", triton_cache, "2", "20", "70", "600"
    )
    assert len(found) == 11
    assert max(found.values()) <= MOST_SHARED


@pytest.mark.parametrize("most_compared", [2048, 0], ids=["compared", "counted"])
@pytest.mark.parametrize("count", [5, 300, 512])
def test_slots_are_sorted_by_expert_however_many_there_are(
    count: int, most_compared: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order_triton, "_MOST_COMPARED", most_compared)
    monkeypatch.setattr(order_triton, "_CHUNKS", 2)  # of three
    generator = torch.Generator().manual_seed(count)
    ids = torch.randint(0, count, (150, 2), generator=generator).int()
    ids[:130, 0] = count - 1  # a program that counts has slots of one expert alone, or nearly
    found = order_triton.order(ids.to(device), count, tile=16)
    flat = ids.flatten()
    assert found.slots.tolist() == flat.argsort(stable=True).tolist()
    assert found.stops.tolist() == torch.bincount(flat, minlength=count).cumsum(0).tolist()
    sizes, expected, start = torch.bincount(flat, minlength=count).tolist(), [], 0
    for expert, size in enumerate(sizes):
        firsts = range(start, start + size, 16)
        expected += [(expert, first, min(first + 16, start + size)) for first in firsts]
        start += size
    experts_of, firsts_of, ends_of = found.tiles.tolist()
    assert [*zip(experts_of, firsts_of, ends_of, strict=True)][: len(expected)] == expected
    assert experts_of[len(expected) :] == [count] * (found.max_tiles - len(expected))
