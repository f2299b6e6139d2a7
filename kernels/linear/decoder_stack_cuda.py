"""All decoder layers in CUDA C++ (cuda/decoder_stack.cu): one launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from specengine.kernels import precompile
from specengine.kernels.attention.types import PagedBatch
from specengine.kernels.cuda.program import Argument, compiled
from specengine.kernels.cuda.sm_placement import SMPlacement, seconds_of_launch
from specengine.kernels.dispatch import MOST_SHARED, multiprocessors
from specengine.kernels.linear.few_row_cuda import tile_for
from specengine.kernels.linear.types import (
    MOST_STACK_ROWS,
    StackKV,
    StackOutput,
    StackShape,
    StackWeights,
    most_tasks,
)

_SOURCE = Path(__file__).parents[1] / "cuda" / "decoder_stack.cu"
# As in the source: warps, head size, bytes of what a warp has of attention, of a layer's pointers.
_WARPS = 12
_HEAD = 64
_AREA_BYTES = 2 * 32 * 144
_LAYER_BYTES = 80
_SHARE_SIZE = _HEAD + 2
_SPARE = 12


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def _halves(rows: int) -> int:
    return _up(rows, 8) // 8


def spare_of(blocks: int) -> int:
    """Blocks that are left to attention."""
    return _SPARE if blocks > 8 * _SPARE else 0


@dataclass(frozen=True)
class Division:
    """How the products of a layer are divided: warps that share a depth, outputs a block."""

    warps_hidden: int
    warps_heads: int
    warps_intermediate: int
    outs_qkv: int
    outs_hidden: int
    outs_intermediate: int

    @classmethod
    def of(cls, shape: StackShape, blocks: int) -> Division:
        """Depths are shared as few_row shares them, so that sums are the same."""
        depths = shape.hidden, shape.heads * shape.head_dim, shape.intermediate
        hidden, heads, intermediate = (tile_for(depth, False).warps for depth in depths)
        blocks -= spare_of(blocks)
        return cls(
            hidden,
            heads,
            intermediate,
            8 * -(-shape.qkv // (8 * blocks)),
            8 * -(-shape.hidden // (8 * blocks)),
            2 * -(-shape.intermediate // (2 * blocks)),
        )

    @property
    def jobs(self) -> list[int]:
        """The jobs of qkv, out, gate and up, down."""
        tiles_hidden = self.outs_hidden // 8
        return [
            self.warps_hidden * (self.outs_qkv // 8),
            self.warps_heads * tiles_hidden,
            self.warps_hidden * -(-2 * self.outs_intermediate // 8),
            self.warps_intermediate * tiles_hidden,
        ]

    def shared_bytes(self, shape: StackShape) -> int:
        half = 4 * max(self.jobs) * MOST_STACK_ROWS * 8 + 4 * self.warps_hidden * MOST_STACK_ROWS
        attention = 4 * MOST_STACK_ROWS * _HEAD + _WARPS * _AREA_BYTES
        outs = self.outs_qkv, self.outs_hidden, 2 * self.outs_intermediate, self.outs_hidden
        depths = shape.hidden, shape.heads * shape.head_dim, shape.hidden, shape.intermediate
        rows = [_up(n, 8) * _pitch(depth) for n, depth in zip(outs, depths, strict=True)]
        layers = shape.num_layers * _LAYER_BYTES
        return 2 * half + attention + sum(rows) + 4 * shape.hidden + 80 + layers


def _pitch(depth: int) -> int:
    """Bytes between weight rows in shared memory."""
    return 2 * depth + (0 if depth % 64 else 64)


@cache
def has_room(shape: StackShape, blocks: int) -> bool:
    """Whether a model of this shape can be divided among so many blocks."""
    divided = Division.of(shape, blocks)
    sizes = shape.hidden, shape.intermediate
    return (
        shape.head_dim == _HEAD
        and shape.heads % shape.kv_heads == 0
        and all(size % 32 == 0 for size in sizes)
        and divided.warps_hidden <= _WARPS
        and divided.shared_bytes(shape) <= MOST_SHARED
    )


@dataclass(frozen=True)
class StackBuffers:
    """Where values pass between blocks. Launches that may overlap must not share them."""

    # Two, by turns: [2, layers, MAX_ROWS, what a row leaves], all ones where empty.
    sets: Tensor
    shares: Tensor  # float32, of attention
    flags: Tensor
    counters: Tensor

    @classmethod
    @cache
    def of(cls, shape: StackShape, blocks: int, device: torch.device) -> StackBuffers:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("run the layers once before capturing them: they need memory")
        row = shape.qkv + shape.heads * shape.head_dim + 2 * shape.hidden + shape.intermediate
        size = (2, shape.num_layers, MOST_STACK_ROWS, row)
        shares = (blocks, MOST_STACK_ROWS, _SHARE_SIZE)
        return cls(
            torch.full(size, -1, dtype=torch.int16, device=device),
            torch.zeros(shares, dtype=torch.float32, device=device),
            torch.zeros(blocks, dtype=torch.int32, device=device),
            torch.zeros(5, dtype=torch.int32, device=device),
        )


class _Tables:
    """Pointers of all layers on the device, one table for each set of tensors that they name."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], Tensor] = {}

    def of(self, weights: StackWeights, kv: StackKV, feature_layers: Sequence[int]) -> Tensor:
        places = {layer: place for place, layer in enumerate(sorted(feature_layers))}
        values: list[int] = []
        for number, layer in enumerate(weights.layers):
            values += (tensor.data_ptr() for tensor in vars(layer).values())
            values += (kv.k[number].data_ptr(), kv.v[number].data_ptr(), places.get(number, -1), 0)
        table = self._known.get(tuple(values))
        if table is None:
            device = weights.cos_sin.device
            table = self._known[tuple(values)] = torch.tensor(values).to(device)
        return table


_tables = _Tables()


def decoder_stack(
    x: Tensor,
    weights: StackWeights,
    kv: StackKV,
    batch: PagedBatch,
    feature_layers: Sequence[int],
) -> StackOutput:
    shape, device, rows = weights.shape, x.device, len(x)
    blocks = multiprocessors(device)
    if rows > MOST_STACK_ROWS:
        raise ValueError(f"{rows} rows are too many: the kernel takes {MOST_STACK_ROWS}")
    if most_tasks(rows, shape, batch) > blocks:
        raise ValueError(f"{blocks} blocks are too few for the heads of {rows} rows")
    shared = Division.of(shape, blocks).shared_bytes(shape)
    kernel = compiled(
        _SOURCE, "decoder_stack", _defines(x, shape, blocks, batch), shared, device.index or 0
    )
    out = x.new_empty((rows, shape.hidden))
    features = x.new_empty((len(feature_layers), rows, shape.hidden))
    # Places and tables are kept; nothing may be that was computed while precompiling.
    if precompile.current() is None:
        places = StackBuffers.of(shape, blocks, device)
        table = _tables.of(weights, kv, feature_layers)
        placement = SMPlacement.of(("decoder_stack", shape, _halves(rows)), blocks, device)
        first = (table, shape.num_layers, x, x.stride(0), out, features, *vars(places).values())
        numbering = placement.numbers, placement.taken, placement.seen
        arguments = (*first, *numbering, *_arguments(rows, weights, kv, batch))
        launch = partial(kernel.launch, (blocks, 1, 1), 32 * (_WARPS + 1), shared, arguments)
        if not placement.are_chosen and _may_choose(batch, rows):
            placement.choose(launch, seconds_of_launch)
        launch()
    return StackOutput(out, list(features))


def _may_choose(batch: PagedBatch, rows: int) -> bool:
    """Blocks exchange nothing for rows of no request, on which some forms are warmed up."""
    capturing = torch.cuda.is_current_stream_capturing()
    return not capturing and int(batch.qo_indptr[-1]) >= rows


def _arguments(
    rows: int, weights: StackWeights, kv: StackKV, batch: PagedBatch
) -> tuple[Argument, ...]:
    """What the kernel takes of a batch."""
    tree = batch.tree_mask
    return (
        batch.positions,
        kv.loc,
        batch.req_pool_indices,
        batch.seq_lens,
        batch.qo_indptr,
        batch.req_to_token,
        tree,
        batch.first_keys,
        weights.cos_sin,
        len(batch.seq_lens),
        rows,
        batch.req_to_token.stride(0),
        0 if tree is None else tree.shape[1],
        kv.k[0].stride(0),
        weights.cos_sin.stride(0),
        weights.eps,
        weights.scale * math.log2(math.e),
    )


def _defines(
    x: Tensor, shape: StackShape, blocks: int, batch: PagedBatch
) -> tuple[tuple[str, int], ...]:
    divided = Division.of(shape, blocks)
    return (
        ("TYPE", 0 if x.dtype == torch.bfloat16 else 1),
        ("HIDDEN", shape.hidden),
        ("HEADS", shape.heads),
        ("KV_HEADS", shape.kv_heads),
        ("INTERMEDIATE", shape.intermediate),
        ("WARPS_H", divided.warps_hidden),
        ("WARPS_A", divided.warps_heads),
        ("WARPS_I", divided.warps_intermediate),
        ("OUTS_QKV", divided.outs_qkv),
        ("OUTS_H", divided.outs_hidden),
        ("OUTS_I", divided.outs_intermediate),
        ("SPARE", spare_of(blocks)),
        ("HALVES", _halves(len(x))),
        ("HAS_TREE", int(batch.tree_mask is not None)),
        ("HAS_FIRST", int(batch.first_keys is not None)),
    )
