"""Forms of the gated delta rule of one token a request, of Qwen3-Next's shape, on a GPU.

    git show c172da3a:kernels/delta/delta_rule_triton.py > BEFORE.py
    python -m benchmarks.kernels.delta_forms [--other BEFORE.py] [--json FILE]

A form is how many columns of a head's memory a program takes, by how many warps. Each is compared
with the reference in PyTorch, a request alone with the same one beside 63 others, bit for bit, and
with the kernels of --other, an older delta_rule_triton.py. Then microseconds of a layer by
requests, of graphs over several layers in turns; "bytes": reading and writing the memory once at
the speed of a copy. With --other also verification of 4 nodes and the commit, now and before.
Takes about 30 s on an H200.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.delta_rule import SHAPE, make_inputs, make_nodes, make_pool, make_weights
from benchmarks.kernels.experts import copy_speed
from benchmarks.kernels.fp8_products import in_turns
from specengine.kernels.delta import delta_decode_triton, delta_rule, delta_rule_triton
from specengine.kernels.delta.delta_decode_triton import FORM, Form
from specengine.kernels.delta.types import DeltaInputs, StatePaths
from specengine.kernels.precompile import precompile
from specengine.memory.state_pool import StatePool

PROGRAMS = ((32, 1), (32, 2), (32, 4), (64, 2), (64, 4), (64, 8), (128, 4), (128, 8), (128, 16))
FORMS = [Form(*one) for one in PROGRAMS]
REQUESTS = (1, 8, 64, 256)
WIDTH = 4  # of verifications
DTYPE = torch.bfloat16

# (inputs, the pool, layer) -> float32 [T, M, E]
Decode = Callable[[DeltaInputs, StatePool, int], Tensor]


def decode_by(form: Form) -> Decode:
    def run(given: DeltaInputs, pool: StatePool, layer: int) -> Tensor:
        nodes, weights = make_nodes(len(given.mixed_TC), 1), make_weights(DTYPE)
        return delta_decode_triton.decode(given, weights, pool.state(layer), nodes, SHAPE, form)

    return run


def decode_before(other: ModuleType) -> Decode:
    def run(given: DeltaInputs, pool: StatePool, layer: int) -> Tensor:
        nodes, weights = make_nodes(len(given.mixed_TC), 1), make_weights(DTYPE)
        kept = pool.state(layer), pool.updates(layer)
        out: Tensor = other.decode(given, weights, *kept, nodes, SHAPE)
        return out

    return run


def decode_in_torch(given: DeltaInputs, pool: StatePool, layer: int) -> Tensor:
    nodes, weights = make_nodes(len(given.mixed_TC), 1), make_weights(DTYPE)
    kept = pool.state(layer), pool.updates(layer)
    return delta_rule.decode(given, weights, *kept, nodes, SHAPE, backend="torch")


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("other_delta_rule_triton", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def after(decode: Decode, requests: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of three tokens of each of so many requests: the last one's outputs, memory and inputs."""
    pool, given = make_pool(64, 1, 1, DTYPE), make_inputs(192, DTYPE)
    parts = given.mixed_TC, given.write_TM, given.decay_TM
    for token in range(3):
        rows = slice(64 * token, 64 * token + requests)
        out = decode(DeltaInputs(*(one[rows] for one in parts)), pool, 0)
    state = pool.state(0)
    return out, state.memory[1 : 1 + requests], state.inputs[1 : 1 + requests]


def check(decode: Decode, before: Decode | None) -> dict[str, Any]:
    """Raises AssertionError for a form that is wrong."""
    many, alone, truth = after(decode, 64), after(decode, 1), after(decode_in_torch, 64)
    for one, other in zip(many[:2], truth[:2], strict=True):
        torch.testing.assert_close(one, other, atol=0.03, rtol=0.03)
    assert torch.equal(many[2], truth[2])
    for one, own in zip(many, alone, strict=True):
        assert torch.equal(one[:1], own), "a request depends on those beside it"
    if before is None:
        return {}
    old = after(before, 64)
    apart = [float((a.float() - b.float()).abs().max()) for a, b in zip(many, old, strict=True)]
    return {"bits of before": max(apart) == 0, "out apart": apart[0], "memory apart": apart[1]}


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def time_forms(requests: int, before: ModuleType | None, speed: float) -> dict[str, Any]:
    layers = max(2, min(36, 512 // requests))
    pool, weights = make_pool(requests, 1, layers, DTYPE), make_weights(DTYPE)
    given, nodes = make_inputs(requests, DTYPE), make_nodes(requests, 1)
    calls = max(layers, 8)

    def every(decode: Callable[..., Tensor], has_updates: bool, *more: Any) -> None:
        for call in range(calls):
            layer = call % layers
            kept = (pool.state(layer), *([pool.updates(layer)] if has_updates else []))
            decode(given, weights, *kept, nodes, SHAPE, *more)

    graphs = {
        str(form): captured(partial(every, delta_decode_triton.decode, False, form))
        for form in FORMS
    }
    if before is not None:
        graphs["before"] = captured(partial(every, before.decode, True))
    read = requests * SHAPE.num_heads * SHAPE.key_dim * SHAPE.value_dim * 4
    return {"requests": requests, "bytes": 2 * read / speed * 1e6, **in_turns(graphs, calls)}


def time_nodes(requests: int, before: ModuleType) -> dict[str, Any]:
    """Of verification, and of the commit of all nodes, a layer."""
    layers = max(2, min(16, 512 // requests))
    pool, weights = make_pool(requests, WIDTH, layers, DTYPE), make_weights(DTYPE)
    given, nodes = make_inputs(requests * WIDTH, DTYPE), make_nodes(requests, WIDTH)
    accepted = torch.full((requests,), WIDTH - 1, device="cuda")
    paths = StatePaths(nodes.rows_B, nodes.starts[:-1], accepted, None, WIDTH)
    states = [pool.state(layer) for layer in range(layers)]
    updates = [pool.updates(layer) for layer in range(layers)]

    def verify(kernels: Any) -> Tensor:
        for state, update in zip(states, updates, strict=True):
            out = kernels.verify(given, weights, state, update, nodes, SHAPE)
        return out

    graphs = dict[str, torch.cuda.CUDAGraph]()
    ways = {"now": delta_rule_triton, "before": before}
    for name, kernels in ways.items():
        graphs[f"verify {name}"] = captured(partial(verify, kernels))
        graphs[f"commit {name}"] = captured(partial(kernels.keep, states, updates, paths, SHAPE))
    same = torch.equal(*(verify(kernels) for kernels in ways.values()))
    found = {"requests": requests, "nodes": WIDTH, "verify has bits of before": same}
    return found | in_turns(graphs, layers)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--other", type=Path, help="an older delta_rule_triton.py")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    before = None if args.other is None else load(args.other)
    with precompile():
        for form in FORMS:
            after(decode_by(form), 1)
    checks = []
    for form in FORMS:
        told = check(decode_by(form), None if before is None else decode_before(before))
        checks.append({"form": str(form), **told})
        print(checks[-1], flush=True)
    speed, timed = copy_speed(), list[dict[str, Any]]()
    for requests in REQUESTS:
        timed.append(time_forms(requests, before, speed))
        us = {name: one for name, one in timed[-1].items() if name != "requests"}
        print(f"\n{requests} requests, us a layer (chosen: {FORM})")
        for name, one in sorted(us.items(), key=lambda pair: pair[1]):
            print(f"  {one:8.2f}  {name}", flush=True)
    for requests in (8, 64) if before is not None else ():
        timed.append(time_nodes(requests, before))
        print(timed[-1], flush=True)
    if args.json is not None:
        found = {"card": torch.cuda.get_device_name(), "checks": checks, "us": timed}
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
