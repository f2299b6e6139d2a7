"""Batches over scattered KV slots, and attention computed densely, row by row, in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from specengine.core.batch import AttentionBackend, ForwardBatch, ForwardMode
from specengine.core.interfaces import Rotary
from specengine.core.tree import Tree
from specengine.kernels.attention.types import ExpandedHeads
from specengine.kernels.kv.types import KVPaths

MAX_CONTEXT = 64
SLOTS = 256


# 0 ─┬─ 1 ─── 3
#    └─ 2 ─┬─ 4 ─── 6
#          └─ 5
BUSHY = [-1, 0, 0, 1, 2, 2, 4]
# 0 ─── 1 ─┬─ 2
#          └─ 3
FORK = [-1, 0, 1, 1]
ROOT_ALONE = [-1]


@dataclass
class PageTable:
    req_to_token: Tensor


@dataclass
class Pool:
    """One layer's KV. Slot 0 is poisoned: nothing real may read it."""

    k: Tensor
    v: Tensor

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        assert layer_id == 0
        return self.k, self.v

    def keep_paths(self, paths: KVPaths) -> None:
        raise NotImplementedError


@dataclass
class Layer:
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 16
    scale: float = 0.3
    sliding_window: int | None = None
    attention_chunk: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    value_dim: int | None = None
    expanded: ExpandedHeads | None = None
    layer_id: int = 0
    rotary: Rotary | None = None


@dataclass
class Case:
    """Requests given by (prefix length, new tokens), and perhaps each one's tree of parents. The
    first num_past nodes of every tree are not new: they end the prefix."""

    lens: list[tuple[int, int]]
    mode: ForwardMode = ForwardMode.EXTEND
    trees: list[list[int]] | None = None  # parents of each request's nodes, the root's is -1
    num_past: int = 0
    scattered: bool = True
    page_size: int = 1  # slots that lie side by side
    layer: Layer = field(default_factory=Layer)
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seed: int = 0

    def batch(self, backend: AttentionBackend) -> ForwardBatch:
        gen = torch.Generator().manual_seed(self.seed)
        prefix = [p for p, _ in self.lens]
        extend = [e for _, e in self.lens]
        table = torch.full((len(self.lens) + 1, MAX_CONTEXT), -7, dtype=torch.int32)
        pages = SLOTS // self.page_size - 1
        order = torch.randperm(pages, generator=gen) if self.scattered else torch.arange(pages)
        free = iter((order + 1).tolist())
        for row, (p, e) in enumerate(self.lens):
            needed = -(-(p + e) // self.page_size)
            first = torch.tensor([next(free) * self.page_size for _ in range(needed)])
            slots = (first[:, None] + torch.arange(self.page_size)).view(-1)
            table[row + 1, : p + e] = slots[: p + e]
        table[table == -7] = 0
        rows = [
            (r + 1, j, p + j, p - self.num_past + d)
            for r, (p, e) in enumerate(self.lens)
            for j, d in enumerate(self.depths(r, e))
        ]
        out_cache_loc = torch.tensor([int(table[r, place]) for r, _, place, _ in rows])
        to = self.device
        return ForwardBatch(
            forward_mode=self.mode,
            batch_size=len(self.lens),
            num_tokens=sum(extend),
            input_ids=torch.zeros(sum(extend), dtype=torch.int64, device=to),
            positions=torch.tensor([position for *_, position in rows], device=to),
            out_cache_loc=out_cache_loc.to(to),
            req_pool_indices=torch.arange(1, len(self.lens) + 1, device=to),
            prefix_lens=torch.tensor(prefix, device=to),
            extend_lens=torch.tensor(extend, device=to),
            seq_lens=torch.tensor([p + e for p, e in self.lens], device=to),
            qo_indptr=torch.tensor([0, *accumulate(extend)], device=to),
            prefix_lens_cpu=prefix,
            extend_lens_cpu=extend,
            logits_rows=None,
            req_to_token_pool=PageTable(table.to(to)),
            token_to_kv_pool=self.pool(gen),
            attn_backend=backend,
            tree=self.tree(),
            attn_layers=(self.layer,),
        )

    def pool(self, gen: torch.Generator) -> Pool:
        shape = (SLOTS, self.layer.num_kv_heads, self.layer.head_dim)
        k = torch.randn(shape, generator=gen)
        v = torch.randn(shape, generator=gen)
        k[0] = v[0] = float("nan")
        k = k.to(self.device, self.dtype)
        width = self.layer.value_dim
        return Pool(k, v.to(k) if width is None else k[..., :width])

    def q(self) -> Tensor:
        gen = torch.Generator().manual_seed(self.seed + 1)
        shape = (sum(e for _, e in self.lens), self.layer.num_heads, self.layer.head_dim)
        return torch.randn(shape, generator=gen).to(self.device, self.dtype)

    def depths(self, request: int, extend: int) -> list[int]:
        if self.trees is None:
            return list(range(extend))
        return depths_of(self.trees[request])[self.num_past :]

    def tree(self) -> Tree | None:
        if self.trees is None:
            return None
        most = max(len(parents) for parents in self.trees)
        mask = torch.zeros(len(self.trees), most, most, dtype=torch.bool)
        for request, parents in enumerate(self.trees):
            for node in range(len(parents)):
                mask[request, node, ancestors_of(parents, node)] = True
        depths = [d for parents in self.trees for d in depths_of(parents)[self.num_past :]]
        return Tree(torch.tensor(depths), mask[:, self.num_past :].to(self.device), self.num_past)


def every_mode() -> list[Case]:
    """One or two cases of each mode that a backend must serve: prompts with and without a prefix,
    decode steps, ragged chains, trees, and trees that grow by a level."""
    mode, trees = ForwardMode, [BUSHY, FORK, ROOT_ALONE]
    return [
        Case([(0, 9), (13, 8)]),
        Case([(0, 5), (20, 3), (7, 11), (30, 1), (2, 0)], mode.MIXED),
        Case([(17, 1)], mode.DECODE),
        Case([(3, 1), (0, 1), (50, 1)], mode.DECODE),
        Case([(40, 4), (3, 1), (20, 5), (11, 2)], mode.TARGET_VERIFY),
        Case([(11, 7)], mode.TARGET_VERIFY, trees=[BUSHY]),
        Case([(11, 7), (0, 4), (25, 1)], mode.TARGET_VERIFY, trees=trees),
        Case([(16, 2), (9, 2)], mode.DRAFT_EXTEND, trees=[BUSHY, BUSHY], num_past=5),
        Case([(16, 3), (9, 1)], mode.DRAFT_EXTEND),
    ]


def run(case: Case, backend: AttentionBackend) -> tuple[Tensor, Tensor]:
    """What the backend gives, and what it should, in float64 on the CPU."""
    batch, q = case.batch(backend), case.q()
    backend.init_forward_metadata(batch)
    forward = backend.forward_decode if case.mode.is_decode() else backend.forward_extend
    out = forward(q, case.layer, batch)
    return out.double().cpu(), dense_attention(case, batch, q)


def ancestors_of(parents: list[int], node: int) -> list[int]:
    """The node itself first, the root last."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path


def depths_of(parents: list[int]) -> list[int]:
    return [len(ancestors_of(parents, node)) - 1 for node in range(len(parents))]


def dense_attention(case: Case, batch: ForwardBatch, q: Tensor) -> Tensor:
    """Each row of q against the keys it may see, found one by one."""
    layer = case.layer
    k_cache, v_cache = batch.token_to_kv_pool.get_kv_buffer(0)
    group = layer.num_heads // layer.num_kv_heads
    out = torch.empty(*q.shape[:2], v_cache.shape[2], dtype=torch.float64)
    row = 0
    for request, (prefix, extend) in enumerate(case.lens):
        slots = batch.req_to_token_pool.req_to_token[request + 1].tolist()
        past = case.num_past
        first = prefix - past
        depths = list(range(extend)) if case.trees is None else depths_of(case.trees[request])
        for node in range(past, past + extend):
            if case.trees is None:
                news = list(range(node + 1))
            else:
                news = ancestors_of(case.trees[request], node)
            seen = [(place, place) for place in range(first)]
            seen += [(first + new, first + depths[new]) for new in news if new >= past]
            here = first + depths[node]
            oldest = here - (layer.sliding_window or MAX_CONTEXT) + 1
            if layer.attention_chunk is not None:
                oldest = here // layer.attention_chunk * layer.attention_chunk
            chosen = [slots[place] for place, position in seen if position >= oldest]
            chosen += [slots[first + new] for new in news if new < past]
            for head in range(layer.num_heads):
                k = k_cache[chosen, head // group].double().cpu()
                v = v_cache[chosen, head // group].double().cpu()
                scores = (k @ q[row, head].double().cpu()) * layer.scale
                if layer.softcap is not None:
                    scores = layer.softcap * torch.tanh(scores / layer.softcap)
                if layer.sinks is not None:
                    sink = layer.sinks[head : head + 1].double().cpu()
                    out[row, head] = torch.cat((scores, sink)).softmax(0)[:-1] @ v
                else:
                    out[row, head] = scores.softmax(0) @ v
            row += 1
    return out


def overwrite(batch: ForwardBatch, later: ForwardBatch) -> None:
    """Put what another batch of the same form holds into the buffers of a captured one."""
    for name in ("seq_lens", "prefix_lens", "positions", "req_pool_indices"):
        getattr(batch, name).copy_(getattr(later, name))
    batch.req_to_token_pool.req_to_token.copy_(later.req_to_token_pool.req_to_token)
    kv, kv_later = (b.token_to_kv_pool.get_kv_buffer(0) for b in (batch, later))
    for ours, theirs in zip(kv, kv_later, strict=True):
        ours.copy_(theirs)
    if batch.tree is not None and later.tree is not None:
        batch.tree.mask_BNN.copy_(later.tree.mask_BNN)
