"""What kernels do in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specengine.kernels.linear import few_row


def capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of a second run: the first compiles."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def assert_waits(source: Tensor, run: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    """In a graph, of rows that come from a kernel which lets the next one start at once; calls
    stand behind each other. source: [R, H], whose rows are drawn anew each time."""
    identity = torch.eye(source.shape[1], device=source.device).to(source.dtype)
    scales = [factor * identity for factor in range(1, 5)]
    found: list[tuple[Tensor, tuple[Tensor, ...]]] = []

    def every() -> None:
        found.clear()
        for scale in scales:
            rows = few_row.linear(source, scale, backend="cuda")
            found.append((rows, run(rows)))

    graph = capture(every)
    for _ in range(100):
        source.copy_(torch.randn_like(source))
        graph.replay()
        torch.cuda.synchronize()
        for rows, outs in found:
            alone = run(rows)
            torch.cuda.synchronize()
            for out, expected in zip(outs, alone, strict=True):
                assert torch.equal(out, expected)
