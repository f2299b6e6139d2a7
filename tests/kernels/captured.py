"""What kernels do in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch


def capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Of a second run: the first compiles."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph
