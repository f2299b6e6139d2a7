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
_MOST_WARPS = 32
# Blocks share a row of more columns than a block has threads for, where there are few rows.
_BLOCKS, _FEW_ROWS = 8, 64
_NORM_COLUMNS = range(144, 4097, 16)  # of which each thread of Triton's has a piece


@dataclass(frozen=True)
class RowForm:
    """blocks: that share a row. warps: of a block. pieces: of eight values, of a thread."""

    blocks: int
    warps: int
    pieces: int = 1

    @classmethod
    def of(cls, rows: int, columns: int) -> RowForm:
        """As swept at the layers of an 8B on an H200 (benchmarks/kernels/rounded_rows.py). A row
        has the same bits in all forms."""
        warps = cdiv(columns, _PIECE * 32)
        if rows <= _FEW_ROWS and warps > _MOST_WARPS:
            return cls(_BLOCKS, cdiv(warps, _BLOCKS))
        pieces = cdiv(warps, _MOST_WARPS)
        return cls(1, cdiv(warps, pieces), pieces)

    @property
    def columns(self) -> int:
        return self.blocks * self.warps * self.pieces * 32 * _PIECE

    @property
    def shared_bytes(self) -> int:
        return 8 + 4 * self.warps * (self.blocks + 1)


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
    return _rounded(_AS_IT_IS, x, x, form=form)


def silu_and_mul(x: Tensor, form: RowForm | None = None) -> Tensor:
    """x: [T, 2I] -> [T, I], rounded, too."""
    out = x.new_empty(len(x), x.shape[1] // 2)
    return put_beside(out, *_rounded(_ACTIVATED, x, out, form=form))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x: [T, H] -> [T, H], rounded, too."""
    out = x.new_empty(x.shape)
    return put_beside(out, *_rounded(_NORMED, x, out, gain=weight, eps=eps))


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """As norm.fused_add_rms_norm, the first result rounded, too."""
    out, total = x.new_empty(x.shape), x.new_empty(x.shape)
    rounded = _rounded(_ADDED_NORMED, x, out, residual=residual, gain=weight, total=total, eps=eps)
    return put_beside(out, *rounded), total


def _rounded(
    makes: int,
    x: Tensor,
    out: Tensor,
    *,
    residual: Tensor | None = None,
    gain: Tensor | None = None,
    total: Tensor | None = None,
    eps: float = 0.0,
    form: RowForm | None = None,
) -> tuple[Tensor, Tensor]:
    """Codes and scales of the rows that are written to out, which of _AS_IT_IS only lends its
    shape."""
    rows, columns = out.shape
    if gain is not None:
        form = RowForm(1, power_of_2(columns) // (32 * _PIECE))  # that of norm_triton.py
    form = form or RowForm.of(rows, columns)
    assert columns <= form.columns
    codes = torch.empty((rows, columns), dtype=FP8, device=x.device)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    defines = (
        ("TYPE", 0 if x.dtype == torch.bfloat16 else 1),
        ("MAKES", makes),
        ("CLUSTER", form.blocks),
        ("WARPS", form.warps),
        ("PIECES", form.pieces),
    )
    shared, device = form.shared_bytes, x.device.index or 0
    stride_residual = 0 if residual is None else residual.stride(0)
    given = x, residual, gain, out, total, codes, scale
    compiled(_SOURCE, "rounded_rows", defines, shared, device).launch(
        (rows * form.blocks, 1, 1),
        32 * form.warps,
        shared,
        (*given, x.stride(0), stride_residual, columns, eps),
    )
    return codes, scale
