"""How fast a CPU multiplies SmolLM2's weights: every linear path that PyTorch has, side by side.

    python benchmarks/kernels/cpu_linear.py [--rows 1 4 8 16] [--layers 30] [--repeats 7]

Times one decoder's worth of matrix products (all layers, then the head), so that the weights come
from memory as they do in a real forward. Variants take turns; the minimum over the turns counts,
which makes the figures usable on a machine that others load too. Milliseconds. "same bits" tells
whether a row's result is the same whatever the number of rows beside it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))
import report

from specengine.layers.linear_cpu import NativeLinear

SHAPES = [(576, 960), (576, 576), (576, 3072), (1536, 576)]  # (in, out) of one layer
HEAD = (576, 49152)

NOTES = """\
The least of several turns of each path, on a machine that others may load too. same bits: a row's
result is the same whatever the number of rows beside it. Panels: kernels/native/linear.c, weights
in bfloat16, sums in float32; of float32 weights that are bfloat16 numbers it loses nothing.
"""

Multiply = Callable[[Tensor], Tensor]


def plain(weight: Tensor, rows: int) -> Multiply:
    return lambda x: F.linear(x, weight)


def mkl_packed(weight: Tensor, rows: int) -> Multiply:
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, rows)
    return lambda x: torch.ops.mkl._mkl_linear(x, packed, weight, None, x.shape[0])


def mkl_packed_for_512(weight: Tensor, rows: int) -> Multiply:
    return mkl_packed(weight, 512)


def onednn_packed(weight: Tensor, rows: int) -> Multiply:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def onednn_packed_for_512(weight: Tensor, rows: int) -> Multiply:
    return onednn_packed(weight, 512)


def int8(weight: Tensor, rows: int) -> Multiply:
    scale = weight.float().abs().amax(dim=1) / 127
    codes = (weight.float() / scale[:, None]).round().to(torch.int8)
    scale = scale.to(weight.dtype)
    return lambda x: torch.ops.aten._weight_int8pack_mm(x, codes, scale)


def int4(weight: Tensor, rows: int, group: int = 64) -> Multiply:
    n, k = weight.shape
    codes = torch.randint(0, 16, (n, k), dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    scales = torch.rand(k // group, n, 2).to(weight.dtype)
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group, scales)


def int4_group_32(weight: Tensor, rows: int) -> Multiply:
    return int4(weight, rows, 32)


def panels(weight: Tensor, rows: int) -> Multiply:
    kernel = NativeLinear(weight, None)
    return lambda x: kernel(x)


PATHS: dict[str, tuple[torch.dtype, Callable[[Tensor, int], Multiply]]] = {
    "fp32 F.linear": (torch.float32, plain),
    "fp32 MKL packed for the rows": (torch.float32, mkl_packed),
    "fp32 MKL packed for 512 rows": (torch.float32, mkl_packed_for_512),
    "fp32 oneDNN packed for the rows": (torch.float32, onednn_packed),
    "fp32 oneDNN packed for 512 rows": (torch.float32, onednn_packed_for_512),
    "fp32, bfloat16 panels": (torch.float32, panels),
    "bf16 F.linear": (torch.bfloat16, plain),
    "bf16 oneDNN packed for the rows": (torch.bfloat16, onednn_packed),
    "bf16 oneDNN packed for 512 rows": (torch.bfloat16, onednn_packed_for_512),
    "bf16, bfloat16 panels": (torch.bfloat16, panels),
    "int8 weight-only": (torch.bfloat16, int8),
    "int4 weight-only, groups of 64": (torch.bfloat16, int4),
    "int4 weight-only, groups of 32": (torch.bfloat16, int4_group_32),
}


def build(path: str, rows: int, layers: int) -> Callable[[], None]:
    dtype, make = PATHS[path]
    shapes = SHAPES * layers + [HEAD]
    products = [make(torch.randn(out, inner).to(dtype), rows) for inner, out in shapes]
    inputs = {inner: torch.randn(rows, inner).to(dtype) for inner, _ in shapes}

    def forward() -> None:
        for product, (inner, _) in zip(products, shapes, strict=True):
            product(inputs[inner])

    return forward


def measure(rows: int, layers: int, repeats: int, paths: list[str]) -> dict[str, float]:
    forwards = {path: build(path, rows, layers) for path in paths}
    best = dict.fromkeys(paths, float("inf"))
    for _ in range(repeats):
        for path, forward in forwards.items():
            start = time.perf_counter()
            forward()
            best[path] = min(best[path], time.perf_counter() - start)
    return best


def same_bits(path: str, rows: list[int]) -> bool:
    dtype, make = PATHS[path]
    for inner, out in [*SHAPES, HEAD]:
        product = make(torch.randn(out, inner).to(dtype), max(rows))
        x = torch.randn(max(rows), inner).to(dtype)
        whole = product(x)
        if not all(torch.equal(product(x[:few]), whole[:few]) for few in rows):
            return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", nargs="+", default=[""], help="paths whose name has one of these")
    args = parser.parse_args()
    paths = [path for path in PATHS if any(part in path for part in args.only)]
    columns = {rows: measure(rows, args.layers, args.repeats, paths) for rows in args.rows}
    results: list[dict[str, Any]] = [
        {"path": path}
        | {f"{rows} rows": column[path] * 1000 for rows, column in columns.items()}
        | {"same bits": "yes" if same_bits(path, args.rows) else "no"}
        for path in paths
    ]
    title = f"Matrix products of SmolLM2 on a CPU: {args.layers} layers and the head, ms"
    print(report.write("cpu", "cpu-linear", title, results, NOTES))


if __name__ == "__main__":
    main()
