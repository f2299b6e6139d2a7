"""Decode forwards on a CPU: the engine's own operations, and decoder layers through torch.compile.

A graph runner for CPUs would pad a batch to a size and run what torch.compile has made for it. Here
each size is compiled by itself, which is the most that such a runner could give. It is kept only if
it wins: `ratio` above 1 means that it does.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import process_time
from typing import Any

import report
import torch

from specengine import LLM, SamplingParams
from specengine.core.batch import ForwardBatch
from specengine.layers.linear import Linear
from specengine.runner.loader import load
from specengine.runner.model_runner import ModelRunner

NOTES = """
Milliseconds of processor time of one thread of a decode forward, head included, the best of some,
in turns; contexts of about 40 tokens. native: weights packed, small operations in C. unpacked: the
same layers on plain weights. compiled: those through torch.compile, each size by itself, attention
outside. products: the packed products alone, below which no graph gets. ratio: native to compiled;
above 1 a graph runner would pay. seconds to compile: of one size. Random float32 weights are no
bfloat16 numbers, so MKL packs them, and loses to plain products at 1 and 2 requests: there the
graph is behind `unpacked`, which runs the same products. A graph runner for CPUs was not kept.
"""
SIZES = [1, 2, 4, 8, 16, 32]


@contextmanager
def packing(is_on: bool) -> Iterator[None]:
    inner = load.pack_linears
    load.pack_linears = inner if is_on else lambda *_: None  # type: ignore[assignment]
    try:
        yield
    finally:
        load.pack_linears = inner


def make(model: str, dtype: str, packed: bool) -> LLM:
    flags = {"device": "cpu", "dtype": dtype, "max_total_tokens": 4096}
    with packing(packed):
        return LLM(model, load_format="dummy", **flags)


def decode_batch(llm: LLM, size: int) -> ForwardBatch:
    """One of the last decode forwards of so many requests."""
    found: list[ForwardBatch] = []
    runner, inner = llm.engine.parts.worker.runner, ModelRunner.forward_decode

    def noted(self: ModelRunner, batch: ForwardBatch) -> torch.Tensor:
        found.append(batch)
        return inner(self, batch)

    prompts = [[(7 * i + 3 * j) % 400 + 5 for j in range(32)] for i in range(size)]
    ModelRunner.forward_decode = noted  # type: ignore[method-assign]
    try:
        llm.generate(prompts, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    finally:
        ModelRunner.forward_decode = inner  # type: ignore[method-assign]
    (batch,) = [one for one in found if one.batch_size == size][-1:]
    assert batch.attn_backend is runner.attn_backend
    return batch


def forward_of(llm: LLM, batch: ForwardBatch, compiles: bool = False) -> Callable[[], object]:
    runner = llm.engine.parts.worker.runner

    def run() -> object:
        batch.compiles = compiles
        batch.layer_features.clear()
        with torch.inference_mode():
            return runner.model.head.logits(runner.forward_decode(batch))

    return run


def products_of(llm: LLM, size: int) -> Callable[[], object]:
    model: Any = llm.engine.parts.worker.runner.model
    linears = [one for one in model.modules() if isinstance(one, Linear)]
    dtype = torch.float32 if llm.engine.parts.config.model.dtype == "float32" else torch.bfloat16
    inputs = {one: torch.randn(size, one.in_features).to(dtype) for one in linears}

    def run() -> None:
        with torch.inference_mode():
            for one, x in inputs.items():
                one(x)

    return run


def best_of(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Milliseconds."""
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(repeats):
        for name, run in runs.items():
            start = process_time()
            run()
            best[name] = min(best[name], process_time() - start)
    return {name: seconds * 1000 for name, seconds in best.items()}


def measure(model: str, dtype: str, sizes: list[int], repeats: int) -> Iterator[dict[str, Any]]:
    native, plain = make(model, dtype, packed=True), make(model, dtype, packed=False)
    for size in sizes:
        torch.compiler.reset()  # the first shape is compiled for itself
        batch = decode_batch(plain, size)
        compiled = forward_of(plain, batch, compiles=True)
        start = process_time()
        compiled()
        took = process_time() - start
        runs = {
            "native": forward_of(native, decode_batch(native, size)),
            "unpacked": forward_of(plain, batch),
            "compiled": compiled,
            "products": products_of(native, size),
        }
        found = best_of(runs, repeats)
        ratio = found["native"] / found["compiled"]
        yield {
            "dtype": dtype,
            "requests": size,
            **found,
            "ratio": ratio,
            "seconds to compile": took,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-shape")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for dtype in args.dtypes:
        for row in measure(args.model, dtype, args.sizes, args.repeats):
            rows.append(row)
            print(row, flush=True)
    title = "Decode forwards of SmolLM2-135M's shape with and without torch.compile, ms"
    print(report.write("cpu", "cpu-graphs", title, rows, NOTES))


if __name__ == "__main__":
    main()
