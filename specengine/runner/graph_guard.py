"""A watch over the inputs of CUDA graphs: a graph reads and writes the addresses that it was
captured with, whatever lies there by then (--debug-cuda-graph)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from specengine.core.batch import ForwardBatch
from specengine.core.errors import GraphInputError
from specengine.core.interfaces import DecoderModel, KVPool, ReqToTokenTable
from specengine.layers.attention import Attention

if TYPE_CHECKING:
    from specengine.runner.model_runner import ModelRunner

Named = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True)
class Place:
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Place:
        return cls(tensor.data_ptr(), tuple(tensor.shape), tensor.stride())


class GraphGuard:
    """Remembers where the inputs of one graph lie. find: gives them, by name, as they are now."""

    def __init__(self, find: Callable[[], Named]) -> None:
        self.find = find
        self.known = {name: Place.of(tensor) for name, tensor in find()}

    def check(self) -> None:
        """Raise GraphInputError, naming the first input that is not where it was."""
        found = {name: Place.of(tensor) for name, tensor in self.find()}
        for name in sorted(self.known.keys() | found.keys()):
            before, now = self.known.get(name), found.get(name)
            if before != now:
                raise GraphInputError(
                    f"a CUDA graph was captured with {name} at {before}, and now it is at {now}: "
                    "write into the captured tensor instead of replacing it, or capture again"
                )


def inputs_of(batch: ForwardBatch, model: DecoderModel) -> Named:
    """The fixed buffers of a captured batch, and what every forward of the model reads."""
    for name, value in vars(batch).items():
        if isinstance(value, Tensor):
            yield f"batch.{name}", value
    if batch.tree is not None:
        yield "batch.tree.mask_BNN", batch.tree.mask_BNN
    yield from standing_inputs(batch.req_to_token_pool, batch.token_to_kv_pool, model)


def standing_inputs(table: ReqToTokenTable, kv: KVPool, model: DecoderModel) -> Named:
    """The page table, the KV that it points into, and the weights."""
    yield "req_to_token", table.req_to_token
    if not isinstance(model, nn.Module):
        return
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            keys, values = kv.get_kv_buffer(module.layer_id)
            yield f"keys of {name}", keys
            yield f"values of {name}", values
    yield from model.named_parameters()
    yield from model.named_buffers()


def round_inputs(rows: Tensor, state: object, runners: Mapping[str, ModelRunner]) -> Named:
    """What graphs of whole rounds read and write: rows of the page table, the requests' state by
    row (a dataclass of tensors), and what stands of each runner."""
    yield "rows", rows
    for name, tensor in vars(state).items():
        yield f"state.{name}", tensor
    for whose, runner in runners.items():
        table, kv = runner.pools.req_to_token_pool, runner.pools.token_to_kv_pool
        for name, tensor in standing_inputs(table, kv, runner.model):
            yield f"{whose} {name}", tensor
