"""Stacks of random layers and requests of random KV for the tests of decoder_stack.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from specengine.kernels.attention.types import PagedBatch
from specengine.kernels.dispatch import Backend
from specengine.kernels.linear.decoder_stack import decoder_stack
from specengine.kernels.linear.types import (
    LayerWeights,
    StackKV,
    StackOutput,
    StackShape,
    StackWeights,
)
from tests.kernels.test_paged_attention import depths_of, tree_mask_of

EPS = 1e-5


@dataclass(frozen=True)
class Lengths:
    """A request's tokens whose KV stands, and its new ones."""

    prefix: int
    new: int


def draw_weights(
    shape: StackShape, context: int, device: str, dtype: torch.dtype = torch.bfloat16
) -> StackWeights:
    def matrix(outs: int, depth: int) -> Tensor:
        return (torch.randn(outs, depth, device=device) * depth**-0.5).to(dtype)

    def gain() -> Tensor:
        return (torch.rand(shape.hidden, device=device) + 0.5).to(dtype)

    heads = shape.heads * shape.head_dim
    layers = [
        LayerWeights(
            gain(),
            matrix(shape.qkv, shape.hidden),
            matrix(shape.hidden, heads),
            gain(),
            matrix(2 * shape.intermediate, shape.hidden),
            matrix(shape.hidden, shape.intermediate),
        )
        for _ in range(shape.num_layers)
    ]
    angles = torch.arange(context)[:, None] * torch.rand(shape.head_dim // 2)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).to(device)
    return StackWeights(shape, layers, cos_sin, EPS, shape.head_dim**-0.5)


def in_float(weights: StackWeights) -> StackWeights:
    def wide(layer: LayerWeights) -> LayerWeights:
        return LayerWeights(*(one.float() for one in vars(layer).values()))

    return replace(weights, layers=[wide(layer) for layer in weights.layers])


@dataclass(frozen=True)
class World:
    """A forward: its rows, its KV before it, and where everything lies."""

    x: Tensor
    kv: StackKV
    batch: PagedBatch

    @classmethod
    def draw(
        cls,
        weights: StackWeights,
        lengths: Sequence[Lengths],
        trees: list[list[int]] | None = None,
        first_keys: list[int] | None = None,
    ) -> World:
        """trees: the parents of each request's new tokens. No request owns slot 0: NaN."""
        shape, device = weights.shape, weights.cos_sin.device
        dtype = weights.layers[0].qkv.dtype
        ends = [one.prefix + one.new for one in lengths]
        slots = torch.randperm(sum(ends)).int() + 1
        table = torch.zeros(len(lengths) + 1, max(ends) + 3, dtype=torch.int32)
        for row, part in enumerate(torch.split(slots, ends)):
            table[row + 1, : len(part)] = part
        size = (shape.num_layers, 2, len(slots) + 1, shape.kv_heads, shape.head_dim)
        kv = torch.randn(size, device=device).to(dtype)
        kv[:, :, 0] = float("nan")
        depths = [range(one.new) for one in lengths] if trees is None else map(depths_of, trees)
        positions = [
            one.prefix + d for one, deep in zip(lengths, depths, strict=True) for d in deep
        ]
        loc = [
            int(slot)
            for row, one in enumerate(lengths)
            for slot in table[row + 1, one.prefix : one.prefix + one.new]
        ]
        rows = torch.arange(1, len(lengths) + 1, device=device)
        batch = PagedBatch(
            req_to_token=table.to(device),
            req_pool_indices=rows,
            seq_lens=torch.tensor(ends, device=device),
            qo_indptr=torch.tensor([0, *accumulate(one.new for one in lengths)], device=device),
            positions=torch.tensor(positions, device=device),
            max_queries=max(one.new for one in lengths),
            max_keys=table.shape[1],
            tree_mask=None if trees is None else tree_mask_of(trees).to(device),
            first_keys=None if first_keys is None else torch.tensor([0, *first_keys]).to(device),
            counters=torch.zeros(4096, dtype=torch.int32, device=device),
        )
        x = torch.randn(len(loc), 2 * shape.hidden, device=device).to(dtype)[:, shape.hidden :]
        return cls(x, StackKV([*kv[:, 0]], [*kv[:, 1]], torch.tensor(loc, device=device)), batch)

    def only(self, request: int) -> World:
        """The same forward of one request."""
        batch, each = self.batch, slice(request, request + 1)
        rows = slice(*map(int, batch.qo_indptr[request : request + 2]))
        assert batch.tree_mask is None
        alone = replace(
            batch,
            req_pool_indices=batch.req_pool_indices[each],
            seq_lens=batch.seq_lens[each],
            qo_indptr=batch.qo_indptr[request : request + 2] - batch.qo_indptr[request],
            positions=batch.positions[rows],
        )
        return World(self.x[rows], replace(self.kv, loc=self.kv.loc[rows]), alone)

    def in_float(self) -> World:
        kv = replace(
            self.kv, k=[one.float() for one in self.kv.k], v=[one.float() for one in self.kv.v]
        )
        return World(self.x.float(), kv, self.batch)

    def run(
        self, weights: StackWeights, backend: Backend, feature_layers: Sequence[int] = ()
    ) -> tuple[StackOutput, Tensor]:
        """What came out, and the KV behind it, [layers, 2, S, kv_heads, head_dim]."""
        kv = replace(
            self.kv, k=[one.clone() for one in self.kv.k], v=[one.clone() for one in self.kv.v]
        )
        out = decoder_stack(self.x, weights, kv, self.batch, feature_layers, backend=backend)
        return out, torch.stack([torch.stack([*kv.k]), torch.stack([*kv.v])], dim=1)
