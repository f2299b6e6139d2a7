from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from specengine.kernels.attention.rope import rope_store_kv, rotate_heads
from specengine.kernels.dispatch import Backend

SLOTS = 12


@dataclass
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor
    cos_sin: Tensor
    k_cache: Tensor
    v_cache: Tensor
    loc: Tensor

    def run(self, backend: str, rotate: bool = True) -> Tensor:
        return rope_store_kv(
            self.q,
            self.k,
            self.v,
            self.positions,
            self.cos_sin if rotate else None,
            self.k_cache,
            self.v_cache,
            self.loc,
            backend=backend,  # type: ignore[arg-type]
        )

    def rotated(self, backend: Backend) -> tuple[Tensor, Tensor]:
        return rotate_heads(self.q, self.k, self.positions, self.cos_sin, backend=backend)


def inputs(
    rotary_dim: int = 16,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Inputs:
    """Three tokens of 4 query and 2 KV heads, cut from one qkv tensor, to scattered slots."""
    torch.manual_seed(0)
    qkv = torch.randn(3, 8, head_dim).to(dtype).to(device)
    angles = torch.outer(torch.arange(32.0), torch.rand(rotary_dim // 2))
    return Inputs(
        q=qkv[:, :4],
        k=qkv[:, 4:6],
        v=qkv[:, 6:],
        positions=torch.tensor([5, 0, 31], device=device),
        cos_sin=torch.cat((angles.cos(), angles.sin()), -1).to(device),
        k_cache=torch.zeros(SLOTS, 2, head_dim, dtype=dtype, device=device),
        v_cache=torch.zeros(SLOTS, 2, head_dim, dtype=dtype, device=device),
        loc=torch.tensor([7, 2, 11], device=device),
    )


def rotated_by_hand(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """The definition: pair (i, i + half) turns by the angle of frequency i."""
    half = cos_sin.shape[1] // 2
    out = x.double().clone()
    for t, position in enumerate(positions.tolist()):
        for i in range(half):
            cos, sin = cos_sin[position, i].double(), cos_sin[position, half + i].double()
            first, second = x[t, :, i].double(), x[t, :, half + i].double()
            out[t, :, i] = first * cos - second * sin
            out[t, :, half + i] = second * cos + first * sin
    return out


@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_reference_equals_the_definition(rotary_dim: int) -> None:
    given = inputs(rotary_dim)
    q, k = given.q.clone(), given.k.clone()
    out = given.run("torch")
    expected_k = rotated_by_hand(k, given.positions, given.cos_sin)
    torch.testing.assert_close(out.double(), rotated_by_hand(q, given.positions, given.cos_sin))
    torch.testing.assert_close(given.k_cache[given.loc].double(), expected_k)
    assert torch.equal(given.v_cache[given.loc], given.v)
    assert torch.equal(given.q, q)
    assert torch.equal(given.k, k)


def test_other_slots_stay_untouched() -> None:
    given = inputs()
    given.run("torch")
    others = [slot for slot in range(SLOTS) if slot not in given.loc.tolist()]
    assert not given.k_cache[others].any()
    assert not given.v_cache[others].any()


def test_without_rotation_only_the_write_remains() -> None:
    given = inputs()
    assert torch.equal(given.run("torch", rotate=False), given.q)
    assert torch.equal(given.k_cache[given.loc], given.k)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_rounds_once(dtype: torch.dtype) -> None:
    given = inputs(dtype=dtype)
    expected = rotated_by_hand(given.q, given.positions, given.cos_sin)
    assert torch.equal(given.run("torch"), expected.float().to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rotary_dim", "head_dim"), [(16, 16), (8, 16), (24, 24)])
def test_triton_equals_reference(
    device: torch.device, rotary_dim: int, head_dim: int, dtype: torch.dtype
) -> None:
    ref = inputs(rotary_dim, head_dim, dtype, device)
    ours = inputs(rotary_dim, head_dim, dtype, device)
    tolerance = 1e-6 if dtype is torch.float32 else 2e-3
    q_ref, q_ours = ref.run("torch"), ours.run("triton")
    torch.testing.assert_close(q_ours, q_ref, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours.k_cache, ref.k_cache, rtol=tolerance, atol=tolerance)
    assert torch.equal(ours.v_cache, ref.v_cache)


def test_triton_without_rotation(device: torch.device) -> None:
    given = inputs(device=device)
    assert torch.equal(given.run("triton", rotate=False), given.q)
    assert torch.equal(given.k_cache[given.loc], given.k)
    assert torch.equal(given.v_cache[given.loc], given.v)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_zero_tokens(backend: str, device: torch.device) -> None:
    given = inputs(device=device)
    for name in ("q", "k", "v", "positions", "loc"):
        setattr(given, name, getattr(given, name)[:0])
    assert given.run(backend).shape == (0, 4, 16)
    assert not given.k_cache.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rotary_dim", "head_dim"), [(16, 16), (8, 16), (24, 24)])
def test_rotation_alone_equals_that_of_the_write(
    device: torch.device, rotary_dim: int, head_dim: int, dtype: torch.dtype
) -> None:
    given = inputs(rotary_dim, head_dim, dtype, device)
    before = given.q.clone(), given.k.clone()
    backends: tuple[Backend, ...] = ("torch", "triton")
    for backend in backends:
        q, k = given.rotated(backend)
        assert q.is_contiguous()
        assert k.is_contiguous()
        assert torch.equal(q, given.run(backend))
        assert torch.equal(k, given.k_cache[given.loc])
    assert torch.equal(given.q, before[0])
    assert torch.equal(given.k, before[1])


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_rotation_alone_of_zero_tokens(backend: Backend, device: torch.device) -> None:
    given = inputs(device=device)
    for name in ("q", "k", "positions"):
        setattr(given, name, getattr(given, name)[:0])
    q, k = given.rotated(backend)
    assert q.shape == (0, 4, 16)
    assert k.shape == (0, 2, 16)
