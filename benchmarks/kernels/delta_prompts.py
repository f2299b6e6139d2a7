"""The gated delta rule over prompts, of Qwen3-Next's shape, on a GPU: token by token and in chunks.

    git show 847e2277:kernels/delta/delta_prompt_triton.py > BEFORE.py
    python -m benchmarks.kernels.delta_prompts [--other BEFORE.py] [--cases 64x30] [--json FILE]

Each form of a program (columns of a head's memory, warps) is compared with the reference in
PyTorch, and a prompt alone with the same one beside others, bit for bit. Then microseconds of a
layer, of graphs over several layers in turns, by requests x tokens of each: each form, chunks, what
makes tokens ready and what keeps the convolution's inputs by themselves, and --other, an older
delta_prompt_triton.py. "bytes": writing the memory once at the speed of a copy. Takes about 60 s on
an H200.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.delta_forms import captured, load
from benchmarks.kernels.delta_rule import SHAPE, make_inputs, make_pool, make_weights
from benchmarks.kernels.experts import copy_speed
from benchmarks.kernels.fp8_products import in_turns
from specengine.kernels.delta import (
    delta_chunks_ref,
    delta_chunks_triton,
    delta_prompt_triton,
    delta_tokens_triton,
)
from specengine.kernels.delta.delta_decode_triton import Form
from specengine.kernels.delta.delta_prompt_triton import FORM
from specengine.kernels.delta.types import DeltaInputs, PromptBatch
from specengine.kernels.precompile import precompile

PROGRAMS = ((16, 1), (16, 2), (32, 1), (32, 2), (32, 4), (64, 2), (64, 4), (128, 4), (128, 8))
FORMS = [Form(*one) for one in PROGRAMS]
CASES = ("64x30", "8x30", "1x30", "8x256", "1x512", "1x2048")
DTYPE = torch.bfloat16

Extend = Callable[..., Tensor]


def batch_of(lens: list[int], first: int = 0) -> PromptBatch:
    """Every other request follows a prefix."""
    rows = torch.arange(first + 1, first + 1 + len(lens), device="cuda")
    prefixes = [(first + index) % 2 * 5 for index in range(len(lens))]
    batch = PromptBatch(rows, lens, prefixes)
    assert batch.places.num_saves == 0  # sent before anything is captured
    return batch


def after(extend: Extend, lens: list[int], only: int | None = None) -> tuple[Tensor, Tensor]:
    """The last request's outputs and memory; only: of that one alone."""
    pool, given = make_pool(len(lens), 1, 1, DTYPE), make_inputs(sum(lens), DTYPE)
    weights = make_weights(DTYPE)
    if only is None:
        batch, rows = batch_of(lens), slice(None)
    else:
        start = sum(lens[:only])
        batch, rows = batch_of([lens[only]], only), slice(start, start + lens[only])
    parts = (one[rows] for one in (given.mixed_TC, given.write_TM, given.decay_TM))
    state = pool.state(0)
    out = extend(DeltaInputs(*parts), weights, state, batch, SHAPE)
    row = len(lens) if only is None else only + 1
    return out[-lens[row - 1] :], state.memory[row]


def check(extend: Extend) -> None:
    """Raises AssertionError for kernels that are wrong."""
    lens = [30, 1, 7, 33, 64, 30]
    found, alone = after(extend, lens), after(extend, lens, len(lens) - 1)
    for one, other, own in zip(found, after(delta_chunks_ref.extend, lens), alone, strict=True):
        torch.testing.assert_close(one, other, atol=0.03, rtol=0.03)
        assert torch.equal(one, own), "a prompt depends on those beside it"


def measure(case: str, before: Extend | None, speed: float) -> dict[str, Any]:
    requests, tokens = map(int, case.split("x"))
    layers = max(2, min(12, 512 // requests))
    pool, weights = make_pool(requests, 1, layers, DTYPE), make_weights(DTYPE)
    given, batch = make_inputs(requests * tokens, DTYPE), batch_of([tokens] * requests)
    assert len(batch.chunks.table)

    def every(extend: Callable[..., object]) -> None:
        for layer in range(layers):
            extend(given, weights, pool.state(layer), batch, SHAPE)

    def keep(given: DeltaInputs, _: object, *rest: Any) -> None:
        delta_prompt_triton.keep_inputs(given, *rest)

    ways: dict[str, Callable[..., object]] = {
        str(form): partial(delta_prompt_triton.extend, form=form) for form in FORMS
    }
    ways["chunks"] = delta_chunks_triton.extend
    ways["tokens ready, alone"] = delta_tokens_triton.prompt_tokens
    ways["inputs kept, alone"] = keep
    if before is not None:
        ways["before"] = before
    graphs = {name: captured(partial(every, way)) for name, way in ways.items()}
    written = requests * SHAPE.num_heads * SHAPE.key_dim * SHAPE.value_dim * 4
    return {"case": case, "bytes": written / speed * 1e6, **in_turns(graphs, layers)}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--other", type=Path, help="an older delta_prompt_triton.py")
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="REQUESTSxTOKENS")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    before: Extend | None = None if args.other is None else load(args.other).extend
    forms = [partial(delta_prompt_triton.extend, form=form) for form in FORMS]
    with precompile():
        for extend in forms:
            after(extend, [3])
    for form, extend in zip(FORMS, forms, strict=True):
        check(extend)
        print(f"right: {form}", flush=True)
    speed, timed = copy_speed(), list[dict[str, Any]]()
    for case in args.cases:
        timed.append(measure(case, before, speed))
        us = {name: one for name, one in timed[-1].items() if name != "case"}
        print(f"\n{case}, us a layer (chosen: {FORM})")
        for name, one in sorted(us.items(), key=lambda pair: pair[1]):
            print(f"  {one:9.2f}  {name}", flush=True)
    if args.json is not None:
        found = {"card": torch.cuda.get_device_name(), "us": timed}
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
