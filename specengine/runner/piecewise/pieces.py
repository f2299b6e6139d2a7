"""The parts of a cut graph that CUDA graphs hold, one for each size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from specengine.core.errors import GraphInputError
from specengine.core.platform import Graph

# A function of tensors and sizes -> its graph, and what it returned, which every replay writes.
Record = Callable[[Callable[[], Any]], tuple[Graph, Any]]


@dataclass
class PieceRun:
    """What the pieces of one model share: the run that goes on. record: while it captures, else
    None. checks: compare the addresses of inputs before each replay (--debug-cuda-graph)."""

    size: int = 0  # tokens, padding included
    record: Record | None = None
    checks: bool = False


@dataclass(frozen=True)
class CapturedPiece:
    """A piece at one size. outputs: that a replay writes; held weakly, but for the last piece's:
    their memory serves pieces that are captured later. addresses: of its tensors, by place."""

    graph: Graph
    outputs: Any
    addresses: list[int]


class Piece(nn.Module):
    """Runs, captures or replays one part: by what the shared PieceRun says.

    run: the compiled part. Sizes that have not been captured run as they are: on a CPU all do.
    """

    unguarded = ("captured",)

    def __init__(self, name: str, run: Callable[..., Any], shared: PieceRun, is_last: bool) -> None:
        super().__init__()
        self.name, self.run, self.shared, self.is_last = name, run, shared, is_last
        self.captured: dict[int, CapturedPiece] = {}

    def forward(self, *given: Any) -> Any:
        if self.shared.record is not None:
            return self._capture(self.shared.record, given)
        captured = self.captured.get(self.shared.size)
        if captured is None:
            return self.run(*given)
        if self.shared.checks:
            self._check(captured, given)
        captured.graph.replay()
        return captured.outputs

    def _capture(self, record: Record, given: Sequence[Any]) -> Any:
        """The outputs it gives are held by the caller of the graph, until the last part that reads
        them has been captured: no other piece gets their memory before. A capture computes nothing,
        and the next piece warms up on these outputs: routers of experts must not meet old
        memory."""
        graph, outputs = record(partial(self.run, *given))
        graph.replay()
        kept = outputs if self.is_last else weakly(outputs)
        self.captured[self.shared.size] = CapturedPiece(graph, kept, _addresses(given))
        return outputs

    def _check(self, captured: CapturedPiece, given: Sequence[Any]) -> None:
        found = _addresses(given)
        for place, (before, now) in enumerate(zip(captured.addresses, found, strict=True)):
            if before != now:
                raise GraphInputError(
                    f"{self.name} of {self.shared.size} tokens was captured with its tensor "
                    f"{place} at {before:#x}, and now it is at {now:#x}: write into the captured "
                    "tensor instead of replacing it"
                )


def _addresses(given: Sequence[Any]) -> list[int]:
    return [one.data_ptr() for one in given if isinstance(one, Tensor)]


def weakly(outputs: Any) -> Any:
    """Tensors at the same addresses that keep no memory alive. outputs: a tensor, or tensors."""
    if isinstance(outputs, Tensor):
        return _weak(outputs)
    return type(outputs)(weakly(one) for one in outputs)


def _weak(tensor: Tensor) -> Tensor:
    """On a CPU the tensor itself."""
    if not tensor.is_cuda:
        return tensor
    whole, of_torch = tensor.untyped_storage(), torch._C
    storage = of_torch._construct_storage_from_data_pointer(
        whole.data_ptr(), tensor.device, whole.nbytes()
    )
    metadata = {
        "nbytes": whole.nbytes(),
        "data_ptr": whole.data_ptr(),
        "size": tensor.shape,
        "stride": tensor.stride(),
        "dtype": tensor.dtype,
        "device": tensor.device,
        "storage_offset": tensor.storage_offset(),
    }
    found: Tensor = of_torch._construct_CUDA_Tensor_From_Storage_And_Metadata(metadata, storage)
    return found
