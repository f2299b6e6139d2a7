"""Which kernels start before a norm ahead of them has ended: those that wait by themselves, before
they read its rows and before they let another start (int4.cuh says why that is enough)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from specengine.kernels.linear import norm, norm_triton
from specengine.kernels.linear.int4_tiles import Tile
from specengine.kernels.linear.int4_turn_tiles import TurnTile
from specengine.kernels.linear.int_linear import int_linear, waits
from specengine.kernels.linear.int_linear_cuda import _SOURCES
from tests.kernels import offline_triton
from tests.kernels.captured import assert_waits
from tests.kernels.test_int_linear_cuda import draw, weight_of

KERNELS = sorted({tile.kernel for tile in (*get_args(Tile), TurnTile)})
WAIT, ALLOW = "wait_for_last_kernel();", "allow_next_kernel();"


def text_of(source: Path, seen: set[Path]) -> str:
    """With what it includes, but for ptx.cuh, which defines both."""
    seen |= {source, source.parent / "ptx.cuh"}
    text = source.read_text()
    for name in re.findall(r'#include "(.*)"', text):
        if (header := source.parent / name) not in seen:
            text += text_of(header, seen)
    return text


def steps_of(text: str) -> list[str]:
    return re.findall(r"wait_for_last_kernel\(\);|allow_next_kernel\(\);|griddepcontrol\.\w+", text)


def waits_first(text: str) -> bool:
    """Whether a kernel waits in one place, and behind that lets the next one start."""
    return steps_of(text) == [WAIT, ALLOW]


@pytest.mark.parametrize("kernel", KERNELS)
def test_products_with_4_bit_weights_wait_before_they_let_the_next_kernel_start(
    kernel: str,
) -> None:
    text = text_of(_SOURCES / f"{kernel}.cu", set())
    assert waits_first(text)
    planted = text.replace(WAIT, "?").replace(ALLOW, WAIT).replace("?", ALLOW)
    assert not waits_first(planted)
    assert not waits_first(text.replace(WAIT, ""))
    assert not waits_first(ALLOW + text)


@pytest.mark.parametrize("kernel", ["int4_rows", "int4_turns"])
def test_rows_are_read_behind_the_wait_alone(kernel: str) -> None:
    _, body = (_SOURCES / f"{kernel}.cu").read_text().split('extern "C"')
    ahead, behind = re.sub("//.*", "", body).split(") {", 1)[1].split(WAIT)
    names_x = re.compile(r"(?<!\.)\bx\b")  # and not threadIdx.x
    assert names_x.search(behind)
    assert not names_x.search(ahead)


def test_in_triton_a_norm_of_awaited_rows_alone_lets_the_next_kernel_start_at_once(
    triton_cache: Path,
) -> None:
    """Its product with 4-bit weights does so late."""
    found = offline_triton.run("tests.kernels.offline_awaited", triton_cache)
    late, early = ["wait", "launch_dependents"], ["launch_dependents", "wait"]
    norms = ["_rms_norm_kernel", "_add_rms_norm_kernel"]
    assert found == [
        *([name, False, late] for name in norms),
        *([name, True, early] for name in norms),
        ["_int_kernel", False, late],
    ]


@pytest.mark.parametrize("awaited", [False, True])
def test_a_norm_tells_its_kernel_that_rows_are_awaited(
    awaited: bool, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    told: list[bool] = []

    def spied(name: str) -> None:
        kernel = getattr(norm_triton, name)

        def run(*given: object) -> object:
            told.append(bool(given[-1]) if isinstance(given[-1], bool) else False)
            return kernel(*given)

        monkeypatch.setattr(norm_triton, name, run)

    for name in ("rms_norm", "fused_add_rms_norm"):
        spied(name)
    x, gain = torch.randn(3, 32, device=device), torch.rand(32, device=device)
    normed = norm.rms_norm(x, gain, 1e-5, awaited=awaited, backend="triton")
    both = norm.fused_add_rms_norm(x, x.flip(0), gain, 1e-5, awaited=awaited, backend="triton")
    assert told == [awaited, awaited]
    found: list[Tensor] = [normed, *both]
    plain = norm.fused_add_rms_norm(x, x.flip(0), gain, 1e-5, backend="triton")
    expected = [norm.rms_norm(x, gain, 1e-5, backend="triton"), *plain]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("rows", [1, 8, 64])  # each of the kernels in CUDA C++
def test_products_behind_norms_read_what_the_norms_have_written(rows: int) -> None:
    torch.manual_seed(0)
    device = torch.device("cuda")
    gain = torch.rand(2048, device=device).bfloat16()
    weights = [weight_of(device, 2048, 2048, 128) for _ in range(3)]

    def run(x: Tensor) -> tuple[Tensor, ...]:
        found, stream = [x], x
        for weight in weights:
            given = found[-1], stream, gain, 1e-5
            normed, stream = norm.fused_add_rms_norm(*given, awaited=waits(weight))
            found += [normed, int_linear(normed, weight)]
        return (*found, stream)

    assert all(waits(weight) for weight in weights)
    assert_waits(draw(device, rows, 2048), run)
