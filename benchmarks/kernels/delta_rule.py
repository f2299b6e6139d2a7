"""The gated delta rule of Qwen3-Next's shape on a GPU: checked against PyTorch, then timed.

    python -m benchmarks.kernels.delta_rule [--prompts]

Prints, for each number of requests and nodes, microseconds of a layer's verification and of the
commit of all layers, and what their bytes would take at the card's bandwidth; then microseconds of
a layer over prompts (--prompts: these alone).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from specengine.kernels.delta import (
    delta_chunks_ref,
    delta_chunks_triton,
    delta_prompt_triton,
    delta_rule,
)
from specengine.kernels.delta.types import (
    DeltaInputs,
    DeltaShape,
    DeltaWeights,
    NodeBatch,
    PromptBatch,
    Save,
    StatePaths,
)
from specengine.memory.state_pool import StatePool, StateShape, StateSizes

SHAPE = DeltaShape(num_key_heads=16, num_heads=32, key_dim=128, value_dim=128, conv_width=4)
LAYERS = 36
BANDWIDTH = 4.8e12  # bytes a second, of an H200; an H100 has 3.35e12
CUDA = torch.device("cuda")


def make_pool(requests: int, nodes: int, layers: int, dtype: torch.dtype) -> StatePool:
    shape = StateShape(tuple(range(layers)), SHAPE, dtype)
    pool = StatePool(shape, StateSizes(requests + 1, 0, requests * nodes), CUDA)
    generator = torch.Generator(CUDA).manual_seed(1)
    for layer in range(layers):
        state = pool.state(layer)
        state.memory.normal_(generator=generator)
        state.inputs.normal_(generator=generator)
    return pool


def make_weights(dtype: torch.dtype) -> DeltaWeights:
    generator = torch.Generator(CUDA).manual_seed(2)
    conv = torch.randn(SHAPE.channels, 4, device=CUDA, generator=generator).to(dtype)
    pair = torch.randn(2, SHAPE.num_heads, device=CUDA, generator=generator)
    return DeltaWeights(conv, pair[0], pair[1])


def make_inputs(tokens: int, dtype: torch.dtype) -> DeltaInputs:
    generator = torch.Generator(CUDA).manual_seed(3)
    sizes = [SHAPE.channels, SHAPE.num_heads, SHAPE.num_heads]
    made = torch.randn(tokens, sum(sizes), device=CUDA, generator=generator).to(dtype)
    return DeltaInputs(*made.split(sizes, -1))


def make_nodes(requests: int, width: int, is_tree: bool = False) -> NodeBatch:
    rows = torch.arange(1, requests + 1, device=CUDA)
    starts = torch.arange(0, requests * width + 1, width, device=CUDA)
    mask = None
    if is_tree:  # a root, and children of every earlier node in turn
        mask = torch.eye(width, dtype=torch.bool, device=CUDA)
        for node in range(1, width):
            mask[node] |= mask[(node - 1) // 2]
        mask = mask.expand(requests, -1, -1).contiguous()
    return NodeBatch(rows, starts, width, mask)


def compare(dtype: torch.dtype, width: int) -> None:
    """Triton against PyTorch: verification of chains and trees, commit, decode. Raises
    AssertionError."""
    near = {"atol": 1e-4, "rtol": 1e-3} if dtype == torch.float32 else {"atol": 0.03, "rtol": 0.03}
    given, weights = make_inputs(5 * width, dtype), make_weights(dtype)
    for is_tree in (False, True):
        nodes = make_nodes(5, width, is_tree)
        pools = [make_pool(5, width, 2, dtype) for _ in range(2)]
        for pool, backend in zip(pools, ("torch", "triton"), strict=True):
            for layer in range(2):
                state, updates = pool.state(layer), pool.updates(layer)
                run = delta_rule.verify if width > 1 else delta_rule.decode
                out = run(given, weights, state, updates, nodes, SHAPE, backend=backend)  # type: ignore[arg-type]
                pool.out = out  # type: ignore[attr-defined]
            accepted = torch.arange(5, device=CUDA) % width
            paths = StatePaths(nodes.rows_B, nodes.starts[:-1], accepted, None, width)
            if width > 1 and not is_tree:
                parts = (
                    [pool.state(one) for one in range(2)],
                    [pool.updates(one) for one in range(2)],
                )
                delta_rule.keep(*parts, paths, SHAPE, backend=backend)  # type: ignore[arg-type]
        first, second = pools
        torch.testing.assert_close(second.out, first.out, **near)  # type: ignore[attr-defined]
        for layer in range(2):
            one, other = first.state(layer), second.state(layer)
            torch.testing.assert_close(other.memory[1:], one.memory[1:], **near)
            assert torch.equal(other.inputs[1:], one.inputs[1:])


def compare_prompts(dtype: torch.dtype, in_chunks: bool = False) -> None:
    """Triton against PyTorch, a save in the middle. in_chunks: not token by token. Raises
    AssertionError."""
    near = {"atol": 1e-3, "rtol": 1e-3} if dtype == torch.float32 else {"atol": 0.03, "rtol": 0.03}
    given, weights = make_inputs(300, dtype), make_weights(dtype)
    rows = torch.tensor([1, 2], device=CUDA)
    batch = PromptBatch(rows, [200, 100], [0, 7], (Save(0, 150, 3), Save(1, 99, 4)))
    form = delta_chunks_triton if in_chunks else delta_prompt_triton
    outs, states = [], []
    for extend in (delta_chunks_ref.extend, form.extend):
        states.append(make_pool(4, 1, 1, dtype).state(0))
        outs.append(extend(given, weights, states[-1], batch, SHAPE))
    torch.testing.assert_close(outs[1], outs[0], **near)
    torch.testing.assert_close(states[1].memory[1:], states[0].memory[1:], **near)
    assert torch.equal(states[1].inputs[1:], states[0].inputs[1:])


def microseconds(run: Callable[[], object]) -> float:
    """Of a graph's replay, the median of 30."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(30):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return sorted(times)[15]


def time_rounds(requests: int, width: int) -> None:
    dtype = torch.bfloat16
    pool, weights = make_pool(requests, width, LAYERS, dtype), make_weights(dtype)
    given, nodes = make_inputs(requests * width, dtype), make_nodes(requests, width)
    run = delta_rule.verify if width > 1 else delta_rule.decode

    def layers() -> Tensor:
        for layer in range(LAYERS):
            out = run(given, weights, pool.state(layer), pool.updates(layer), nodes, SHAPE)
        return out

    accepted = torch.full((requests,), width - 1, device=CUDA)
    paths = StatePaths(nodes.rows_B, nodes.starts[:-1], accepted, None, width)
    verify = microseconds(layers) / LAYERS
    keep = microseconds(lambda: pool.keep_paths(paths)) if width > 1 else 0.0
    state = requests * SHAPE.num_heads * SHAPE.key_dim * SHAPE.value_dim * 4
    least = state * (1 if width > 1 else 2) / BANDWIDTH * 1e6
    kept = 2 * state * LAYERS / BANDWIDTH * 1e6 if width > 1 else 0.0
    print(
        f"{requests:4} requests x {width} nodes: verify {verify:7.1f} us a layer "
        f"(bytes {least:6.1f}), commit {keep:8.1f} us (bytes {kept:7.1f})",
        flush=True,
    )


def time_prompt(tokens: int) -> None:
    dtype = torch.bfloat16
    pool, weights, given = (
        make_pool(1, 1, 1, dtype),
        make_weights(dtype),
        make_inputs(tokens, dtype),
    )
    batch = PromptBatch(torch.tensor([1], device=CUDA), [tokens], [0])
    state = pool.state(0)
    for name, run in (
        ("chunks", delta_chunks_triton.extend),
        ("steps", delta_prompt_triton.extend),
    ):
        for _ in range(3):
            run(given, weights, state, batch, SHAPE)
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(10):
            run(given, weights, state, batch, SHAPE)
        end.record()
        torch.cuda.synchronize()
        took = begin.elapsed_time(end) * 100
        print(f"prompt of {tokens}: {took:8.1f} us a layer in {name}", flush=True)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", action="store_true")
    has_rounds = not parser.parse_args().prompts
    for dtype in (torch.float32, torch.bfloat16):
        for in_chunks in (False, True) if dtype == torch.bfloat16 else (False,):
            compare_prompts(dtype, in_chunks)
            print(f"equal: {dtype}, prompts, in chunks: {in_chunks}", flush=True)
        for width in (1, 4, 8) if has_rounds else ():
            compare(dtype, width)
            print(f"equal: {dtype}, {width} nodes", flush=True)
    for requests in (1, 8, 64) if has_rounds else ():
        for width in (1, 2, 4, 8):
            time_rounds(requests, width)
    for tokens in (64, 256, 512, 1024, 2048, 8192):
        time_prompt(tokens)


if __name__ == "__main__":
    main()
