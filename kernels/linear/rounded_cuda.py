"""Rows that are rounded to FP8 where they are made, in CUDA C++: with the bits of the kernels in
Triton, which need more instructions and barriers, and give a row to one program."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specengine.kernels.cuda import program
from specengine.kernels.cuda.program import compiled
from specengine.kernels.dispatch import Backend, has_dependent_launch
from specengine.kernels.linear.quantised import FP8, Fp8Input
from specengine.kernels.linear.rounded import WHOLE_ROWS, put_beside, rounding_of
from specengine.kernels.sizes import cdiv, power_of_2

_SOURCE = Path(__file__).parents[1] / "cuda" / "rounded_rows.cu"
_AS_IT_IS, _ACTIVATED, _NORMED, _ADDED_NORMED = range(4)
_PIECE = 8  # values of a thread that lie together
_OF_WARP = 32 * _PIECE
_NORM_COLUMNS = range(144, 4097, 16)  # of a norm: as many as a thread of Triton's has a piece of


@dataclass(frozen=True)
class RowForm:
    """blocks: that share a row. warps: of a block. pieces: of eight values, of a thread."""

    blocks: int
    warps: int
    pieces: int = 1
    early: int = 0

    @classmethod
    def of(cls, columns: int) -> RowForm:
        warps = cdiv(columns, _OF_WARP)
        blocks = 8 if warps > 32 else 1
        return cls(blocks, cdiv(warps, blocks))

    @property
    def columns(self) -> int:
        return self.blocks * self.warps * self.pieces * _OF_WARP

    @property
    def shared_bytes(self) -> int:
        return 8 + 4 * self.warps * (self.blocks + self.pieces)


def takes(x: Tensor, columns: int, into: Fp8Input | None, backend: Backend) -> bool:
    """Whether a kernel of these makes the rows, which have so many columns, from those of x
    [T, ...], and rounds them: as a whole, in half precision, whole 16 bytes everywhere."""
    if rounding_of(into, columns) != WHOLE_ROWS or columns % 16 or len(x) == 0 or not _fits(x):
        return False
    if backend != "auto":
        return backend == "cuda"
    return has_dependent_launch(x) and program.available()


def takes_norm(
    x: Tensor, residual: Tensor, weight: Tensor, into: Fp8Input | None, backend: Backend
) -> bool:
    """The same of a norm. residual: x, where there is none."""
    return (
        takes(x, x.shape[1], into, backend)
        and x.shape[1] in _NORM_COLUMNS
        and weight.dtype == x.dtype
        and weight.data_ptr() % 16 == 0
        and _fits(residual)
    )


def _fits(x: Tensor) -> bool:
    is_half = x.dtype in (torch.bfloat16, torch.float16)
    return is_half and x.stride(1) == 1 and x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0


def quantise_rows(x: Tensor, form: RowForm | None = None) -> tuple[Tensor, Tensor]:
    """x: [T, K] -> codes float8_e4m3fn [T, K], scales float32 [T, 1]."""
    codes, scale = _room(x, x.shape[1])
    _launch(_AS_IT_IS, form or RowForm.of(x.shape[1]), x, x, x, x, x, codes, scale, 0.0)
    return codes, scale


def silu_and_mul(x: Tensor, form: RowForm | None = None) -> Tensor:
    """x: [T, 2I] -> [T, I], rounded, too."""
    width = x.shape[1] // 2
    out = torch.empty((len(x), width), dtype=x.dtype, device=x.device)
    codes, scale = _room(x, width)
    _launch(_ACTIVATED, form or RowForm.of(width), x, x, x, out, x, codes, scale, 0.0)
    return put_beside(out, codes, scale)


def norm_form(hidden: int, pieces: int = 1, early: int = 0) -> RowForm:
    """That of norm_triton.py."""
    return RowForm(1, power_of_2(hidden) // (32 * _PIECE * pieces), pieces, early)


def rms_norm(x: Tensor, weight: Tensor, eps: float, pieces: int = 1, early: int = 0) -> Tensor:
    """x: [T, H] -> [T, H], rounded, too."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    codes, scale = _room(x, x.shape[1])
    form = norm_form(x.shape[1], pieces, early)
    _launch(_NORMED, form, x, x, weight, out, x, codes, scale, eps)
    return put_beside(out, codes, scale)


def fused_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    pieces: int = 1,
    early: int = 0,
) -> tuple[Tensor, Tensor]:
    """As norm.fused_add_rms_norm, the first result rounded, too."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out)
    codes, scale = _room(x, x.shape[1])
    form = norm_form(x.shape[1], pieces, early)
    _launch(_ADDED_NORMED, form, x, residual, weight, out, total, codes, scale, eps)
    return put_beside(out, codes, scale), total


def _room(x: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    codes = torch.empty((len(x), columns), dtype=FP8, device=x.device)
    return codes, torch.empty((len(x), 1), dtype=torch.float32, device=x.device)


def _launch(
    makes: int,
    form: RowForm,
    x: Tensor,
    residual: Tensor,
    gain: Tensor,
    out: Tensor,
    total: Tensor,
    codes: Tensor,
    scale: Tensor,
    eps: float,
) -> None:
    rows, columns = codes.shape
    assert columns <= form.columns
    assert columns % _PIECE == 0
    defines = (
        ("TYPE", 0 if x.dtype == torch.bfloat16 else 1),
        ("MAKES", makes),
        ("CLUSTER", form.blocks),
        ("WARPS", form.warps),
        ("PIECES", form.pieces),
        ("EARLY", form.early),
    )
    shared, device = form.shared_bytes, x.device.index or 0
    compiled(_SOURCE, "rounded_rows", defines, shared, device).launch(
        (rows * form.blocks, 1, 1),
        32 * form.warps,
        shared,
        (
            x,
            residual,
            gain,
            out,
            total,
            codes,
            scale,
            x.stride(0),
            residual.stride(0),
            columns,
            eps,
        ),
    )
