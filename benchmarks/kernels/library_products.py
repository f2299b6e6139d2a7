"""Products with FP8 and 4-bit weights: libraries' kernels beside ours, at the layers of an 8B.

    python -m benchmarks.kernels.library_products [--json FILE] [--shapes qkv down] [--without NAME]

Libraries: sglang-kernel; what vLLM's wheel has compiled (CUTLASS, Marlin, Machete: its file is
loaded, vLLM itself is not imported); FlashInfer, which compiles at its first call; PyTorch. A
library that is not there, or that fails, is said and left out. Rows are rounded by the library's
own kernel where it has one, and that counts. Each product is first compared with float64 (1% of the
largest value), then timed as quantised.py does.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.kernels import quantised
from benchmarks.kernels.quantised import FORMS, GROUP, ROWS, SHAPES, Form, by_block, draw
from specengine.kernels.linear.fp8_linear_triton import quantise_rows
from specengine.kernels.linear.quantised import FP8, FP8_MAX, Fp8Input, Fp8Weight
from specengine.lab.environment import environment

OURS = ("bf16 matmul", "fp8 scaled_mm", "fp8 w8a8", "fp8 blocks", "int4")
MOST_ERROR = 0.01  # beside float64, of the largest value
UINT4_BIAS_8 = 4 << 8 | 8 << 17 | 1 << 50  # vLLM's number of the type: bits, bias, how NaNs are
EMPTY_SUM = 1e-10  # of a group of zeros, as a library's rounding asks


@dataclass(frozen=True)
class Columns:
    """An FP8 weight [N, K] as CUTLASS reads it. codes: [K, N], a column after the other; scale:
    float32 [1, N], or [K / 128, N / 128], a column after the other."""

    codes: Tensor
    scale: Tensor

    def dequantised(self) -> Tensor:
        """float32 [N, K]."""
        scale = self.scale.T
        if len(scale) != self.codes.shape[1]:
            scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return self.codes.T.float() * scale


@dataclass(frozen=True)
class FourBits:
    """A weight [N, K] in 4 bits and groups of GROUP columns, arranged for a library. dense: what it
    says, bfloat16 [N, K], or nothing in copies."""

    words: Tensor
    scale: Tensor
    dense: Tensor
    workspace: Tensor

    def dequantised(self) -> Tensor:
        return self.dense.float()


def columns_by_row(weight: Tensor) -> Columns:
    made = Fp8Weight.of(weight)
    return Columns(made.codes.T, made.scale.view(1, -1))


def columns_by_block(weight: Tensor) -> Columns:
    made = by_block(weight)
    return Columns(made.codes.T, made.scale.T)


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes 0 to 15, uint8 [N, K], and scales, bfloat16 [N, K / GROUP]: (code - 8) * scale."""
    groups = weight.float().view(len(weight), -1, GROUP)
    scale = (groups.abs().amax(2) / 7.5).bfloat16()
    codes = (groups / scale.float()[:, :, None] + 8).round().clamp(0, 15)
    return codes.to(torch.uint8).view(weight.shape), scale


def dense_of(codes: Tensor, scale: Tensor) -> Tensor:
    return ((codes.float() - 8) * scale.float().repeat_interleave(GROUP, 1)).bfloat16()


def gptq_words(codes: Tensor) -> Tensor:
    """[N, K] -> int32 [K / 8, N]: eight neighbouring inputs a word, the first in the low bits."""
    eights = codes.T.reshape(-1, 8, len(codes)).to(torch.int64)
    shifts = torch.arange(0, 32, 4, device=codes.device).view(1, 8, 1)
    words = (eights << shifts).sum(1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def marlin_scales(scale: Tensor) -> Tensor:
    """[N, K / GROUP] -> [K / GROUP, N], each 64 outputs as an 8 by 8 square turned over."""
    turned = scale.T.contiguous()
    return turned.view(len(turned), -1, 8, 8).transpose(2, 3).reshape(turned.shape).contiguous()


def for_marlin(weight: Tensor) -> FourBits:
    codes, scale = rounded(weight)
    outs, inputs = weight.shape
    order = torch.empty(0, dtype=torch.int32, device=weight.device)
    words = vllm_ops().gptq_marlin_repack(gptq_words(codes), order, inputs, outs, 4, False)
    count = torch.cuda.get_device_properties(weight.device).multi_processor_count
    locks = torch.zeros(count, dtype=torch.int32, device=weight.device)
    return FourBits(words, marlin_scales(scale), dense_of(codes, scale), locks)


def for_machete(weight: Tensor) -> FourBits:
    codes, scale = rounded(weight)
    words = gptq_words(codes).T.contiguous().T
    packed = vllm_ops().machete_prepack_B(words, torch.bfloat16, UINT4_BIAS_8, torch.bfloat16)
    empty = torch.empty(0, device=weight.device)
    return FourBits(packed, scale.T.contiguous(), dense_of(codes, scale), empty)


def marlin(x: Tensor, weight: FourBits) -> Tensor:
    (rows, inputs), outs = x.shape, weight.scale.shape[1]
    out: Tensor = vllm_ops().marlin_gemm(
        *(x, None, weight.words, None, weight.scale, None, None, None, None, None),
        *(weight.workspace, UINT4_BIAS_8, rows, outs, inputs, True, False, True, False),
    )
    return out


def machete(x: Tensor, weight: FourBits) -> Tensor:
    out: Tensor = vllm_ops().machete_mm(
        *(x, weight.words, UINT4_BIAS_8, None, weight.scale, None, GROUP, None, None, None)
    )
    return out


def cutlass(x: Tensor, weight: Columns) -> Tensor:
    """vLLM's, by row or in blocks."""
    if len(weight.scale) == 1:
        codes, scale = quantise_rows(x, Fp8Input())
    else:
        codes, scale = quantise_rows(x, Fp8Input(group=128))
        scale = scale.T.contiguous().T
    out = x.new_empty(len(x), weight.codes.shape[1])
    vllm_ops().cutlass_scaled_mm(out, codes, weight.codes, scale, weight.scale, None)
    return out


def sglang_by_row(x: Tensor, weight: Columns) -> Tensor:
    ops = sglang_ops()
    codes, scale = torch.empty_like(x, dtype=FP8), x.new_empty(len(x), 1, dtype=torch.float32)
    ops.sgl_per_token_quant_fp8(x, codes, scale)
    out: Tensor = ops.fp8_scaled_mm(codes, weight.codes, scale, weight.scale.T, x.dtype, None)
    return out


def sglang_by_block(x: Tensor, weight: Columns) -> Tensor:
    """It takes rows by four."""
    ops, rows = sglang_ops(), len(x)
    if rows % 4:
        x = F.pad(x, (0, 0, 0, -rows % 4))
    codes = torch.empty_like(x, dtype=FP8)
    scale = x.new_empty(x.shape[1] // 128, len(x), dtype=torch.float32).T
    ops.sgl_per_token_group_quant_8bit_v2(
        *(x, codes, scale, 128, EMPTY_SUM, -FP8_MAX, FP8_MAX, False, False, None)
    )
    out: Tensor = ops.fp8_blockwise_scaled_mm(codes, weight.codes, scale, weight.scale, x.dtype)
    return out[:rows]


def flashinfer_by_block(x: Tensor, weight: Fp8Weight) -> Tensor:
    multiply = import_module("flashinfer.gemm").fp8_blockscale_gemm_sm90
    out: Tensor = multiply(x, weight.codes, None, weight.scale)
    return out


@cache
def vllm_ops() -> Any:
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("vllm is not installed")
    folder = Path(next(iter(spec.submodule_search_locations)))
    for file in sorted(folder.glob("_C*.so")):
        torch.ops.load_library(file)  # type: ignore[no-untyped-call]
    return torch.ops._C


@cache
def sglang_ops() -> Any:
    import_module("sgl_kernel")
    return torch.ops.sgl_kernel


LIBRARIES: dict[str, Form] = {
    "sglang rows": Form(columns_by_row, sglang_by_row, 8),
    "vllm rows": Form(columns_by_row, cutlass, 8),
    "sglang blocks": Form(columns_by_block, sglang_by_block, 8),
    "vllm blocks": Form(columns_by_block, cutlass, 8),
    "flashinfer blocks": Form(by_block, flashinfer_by_block, 8),
    "marlin int4": Form(for_marlin, marlin, 4.125),
    "machete int4": Form(for_machete, machete, 4.125),
}


def error_of(form: Form, weight: Tensor) -> float:
    """The largest of all numbers of rows, beside float64 of what the weight says, of its largest
    value. Where rows are rounded, they are in float64, too, as ours round them."""
    made, errors = form.make(weight), list[float]()
    x = draw(max(ROWS), weight.shape[1])
    truth = expected(x, made)
    for rows in ROWS:
        out = form.multiply(x[:rows].contiguous(), made).double()
        errors.append(float((out - truth[:rows]).abs().max() / truth[:rows].abs().max()))
    return max(errors)


def expected(x: Tensor, made: Any) -> Tensor:
    if not isinstance(made, Columns):
        return quantised.expected(x, made)
    group = None if len(made.scale) == 1 else 128
    codes, scale = quantise_rows(x, Fp8Input(group=group))
    rows = codes.double().view(len(x), scale.shape[1], -1) * scale.double()[:, :, None]
    return rows.view(x.shape) @ made.dequantised().double().T


def usable(names: list[str], weight: Tensor) -> tuple[dict[str, Form], dict[str, str]]:
    """Those that run and are right, and what came of each."""
    forms, found = dict[str, Form](), dict[str, str]()
    for name in names:
        form = FORMS.get(name) or LIBRARIES[name]
        try:
            error = error_of(form, weight)
            torch.cuda.synchronize()
        except Exception as problem:
            found[name] = f"{type(problem).__name__}: {str(problem).splitlines()[0][:200]}"
        else:
            found[name] = f"error {error:.1e}"
            if error < MOST_ERROR:
                forms[name] = form
        print(f"{name:>18}: {found[name]}", flush=True)
    return forms, found


def time_shape(shape: str, forms: dict[str, Form]) -> list[dict[str, Any]]:
    outs, inputs = SHAPES[shape]
    weight, rows_us = draw(outs, inputs, inputs**-0.5), list[dict[str, Any]]()
    for name, form in forms.items():
        held = quantised.copies_of(partial(made_light, form), weight, form.bits)
        for rows in ROWS:
            us = quantised.graph_us(partial(form.multiply, draw(rows, inputs)), held)
            rows_us.append({"shape": shape, "form": name, "rows": rows, "us": us})
    return rows_us


def made_light(form: Form, weight: Tensor) -> Any:
    """Without what only a comparison needs."""
    made = form.make(weight)
    return replace(made, dense=made.dense[:0]) if isinstance(made, FourBits) else made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--without", nargs="+", choices=LIBRARIES, default=[])
    args = parser.parse_args()
    torch.manual_seed(0)
    names = [*OURS, *(name for name in LIBRARIES if name not in args.without)]
    forms, found = usable(names, draw(*SHAPES["o"], SHAPES["o"][1] ** -0.5))
    rows_us = list[dict[str, Any]]()
    for shape in args.shapes:
        timed = time_shape(shape, forms)
        rows_us += timed
        print(
            f"\n{shape} {list(SHAPES[shape])}, us a product\n{'':>18}", *(f"{r:>7}" for r in ROWS)
        )
        for name in forms:
            cells = (f"{one['us']:7.1f}" for one in timed if one["form"] == name)
            print(f"{name:>18}", *cells, flush=True)
    if args.json is not None:
        facts = {"environment": environment(), "checks": found, "forms": rows_us}
        args.json.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
