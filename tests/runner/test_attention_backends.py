"""Each attention backend against attention computed densely, row by row, in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specengine.core.batch import ForwardBatch, ForwardMode, Tree
from specengine.core.errors import ConfigError
from specengine.runner.attention import make_attention_backend
from specengine.runner.attention.torch_backend import TorchAttentionBackend
from specengine.runner.attention.torch_padded import PaddedAttention, plan_padded
from specengine.runner.attention.torch_spans import SpanAttention, plan_spans

MAX_CONTEXT = 64
SLOTS = 256


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

    def move(self, src: Tensor, dst: Tensor) -> None:
        raise NotImplementedError


@dataclass
class Layer:
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 16
    scale: float = 0.3
    sliding_window: int | None = None
    layer_id: int = 0


@dataclass
class Case:
    """Requests given by (prefix length, new tokens), and perhaps each one's tree of parents."""

    lens: list[tuple[int, int]]
    mode: ForwardMode = ForwardMode.EXTEND
    trees: list[list[int]] | None = None  # parents of each request's nodes, the root's is -1
    scattered: bool = True
    layer: Layer = field(default_factory=Layer)
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seed: int = 0

    def batch(self, backend: Any) -> ForwardBatch:
        gen = torch.Generator().manual_seed(self.seed)
        prefix = [p for p, _ in self.lens]
        extend = [e for _, e in self.lens]
        table = torch.full((len(self.lens) + 1, MAX_CONTEXT), -7, dtype=torch.int32)
        slots = torch.randperm(SLOTS - 1, generator=gen) if self.scattered else torch.arange(SLOTS)
        free = iter((slots + 1).tolist())
        for row, (p, e) in enumerate(self.lens):
            table[row + 1, : p + e] = torch.tensor([next(free) for _ in range(p + e)])
        table[table == -7] = 0
        rows = [
            (r + 1, j, p + j, p + d)
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
        )

    def pool(self, gen: torch.Generator) -> Pool:
        shape = (SLOTS, self.layer.num_kv_heads, self.layer.head_dim)
        k = torch.randn(shape, generator=gen)
        v = torch.randn(shape, generator=gen)
        k[0] = v[0] = float("nan")
        return Pool(k.to(self.device, self.dtype), v.to(self.device, self.dtype))

    def q(self) -> Tensor:
        gen = torch.Generator().manual_seed(self.seed + 1)
        shape = (sum(e for _, e in self.lens), self.layer.num_heads, self.layer.head_dim)
        return torch.randn(shape, generator=gen).to(self.device, self.dtype)

    def depths(self, request: int, extend: int) -> list[int]:
        if self.trees is None:
            return list(range(extend))
        return depths_of(self.trees[request])

    def tree(self) -> Tree | None:
        if self.trees is None:
            return None
        most = max(len(parents) for parents in self.trees)
        mask = torch.zeros(len(self.trees), most, most, dtype=torch.bool)
        for request, parents in enumerate(self.trees):
            for node in range(len(parents)):
                mask[request, node, ancestors_of(parents, node)] = True
        depths = [d for parents in self.trees for d in depths_of(parents)]
        return Tree(torch.tensor(depths), mask.to(self.device))


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
    out = torch.empty(q.shape, dtype=torch.float64)
    row = 0
    for request, (prefix, extend) in enumerate(case.lens):
        slots = batch.req_to_token_pool.req_to_token[request + 1].tolist()
        depths = case.depths(request, extend)
        for node in range(extend):
            if case.trees is None:
                news = list(range(node + 1))
            else:
                news = ancestors_of(case.trees[request], node)
            seen = [(place, place) for place in range(prefix)]
            seen += [(prefix + new, prefix + depths[new]) for new in news]
            here = prefix + depths[node]
            window = layer.sliding_window or MAX_CONTEXT
            chosen = [slots[place] for place, position in seen if position > here - window]
            for head in range(layer.num_heads):
                k = k_cache[chosen, head // group].double().cpu()
                v = v_cache[chosen, head // group].double().cpu()
                scores = (k @ q[row, head].double().cpu()) * layer.scale
                out[row, head] = scores.softmax(0) @ v
            row += 1
    return out


# 0 ─┬─ 1 ─── 3
#    └─ 2 ─┬─ 4 ─── 6
#          └─ 5
BUSHY = [-1, 0, 0, 1, 2, 2, 4]
# 0 ─── 1 ─┬─ 2
#          └─ 3
FORK = [-1, 0, 1, 1]
ROOT_ALONE = [-1]


def check(case: Case, tolerance: float = 2e-6) -> None:
    """Both ways of running a batch, and the one that the backend picks, give dense attention."""
    backend = TorchAttentionBackend()
    batch, q = case.batch(backend), case.q()
    expected = dense_attention(case, batch, q)
    k_cache, v_cache = batch.token_to_kv_pool.get_kv_buffer(0)
    ways: list[SpanAttention | PaddedAttention] = [plan_spans(batch)]
    if all(extend for _, extend in case.lens):
        ways.append(plan_padded(batch))
    for way in ways:
        out = way.forward(q, case.layer, k_cache, v_cache)
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    backend.init_forward_metadata(batch)
    forward = backend.forward_decode if case.mode.is_decode() else backend.forward_extend
    out = forward(q, case.layer, batch)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("scattered", [True, False])
@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize("prefixes", [[0], [17], [3, 0, 30, 12]])
def test_decode(prefixes: list[int], window: int | None, scattered: bool) -> None:
    lens = [(prefix, 1) for prefix in prefixes]
    check(Case(lens, ForwardMode.DECODE, scattered=scattered, layer=Layer(sliding_window=window)))


@pytest.mark.parametrize("scattered", [True, False])
@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("lens", [[(0, 9)], [(13, 8)], [(0, 5), (20, 3), (7, 11), (30, 1)]])
def test_extend(lens: list[tuple[int, int]], window: int | None, scattered: bool) -> None:
    check(Case(lens, scattered=scattered, layer=Layer(sliding_window=window)))


def test_a_request_without_new_tokens_has_no_rows() -> None:
    check(Case([(4, 2), (9, 0), (3, 3)]))


@pytest.mark.parametrize("window", [None, 2, 4])
def test_trees(window: int | None) -> None:
    lens = [(11, 7), (0, 4), (25, 1)]
    trees = [BUSHY, FORK, ROOT_ALONE]
    layer = Layer(sliding_window=window)
    check(Case(lens, ForwardMode.TARGET_VERIFY, trees=trees, layer=layer))
    check(Case(lens[:1], ForwardMode.TARGET_VERIFY, trees=trees[:1], layer=layer))


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_any_tree(data: st.DataObject) -> None:
    trees = []
    for _ in range(data.draw(st.integers(1, 3))):
        size = data.draw(st.integers(1, 8))
        trees.append([-1] + [data.draw(st.integers(0, node - 1)) for node in range(1, size)])
    lens = [(data.draw(st.integers(0, 20)), len(parents)) for parents in trees]
    window = data.draw(st.none() | st.integers(1, 12))
    layer = Layer(num_heads=2, num_kv_heads=1, head_dim=8, sliding_window=window)
    check(Case(lens, ForwardMode.TARGET_VERIFY, trees=trees, layer=layer))


def test_a_chain_is_a_tree_without_branches() -> None:
    lens, parents = [(9, 5)], [-1, 0, 1, 2, 3]
    plain = Case(lens, ForwardMode.TARGET_VERIFY)
    as_tree = Case(lens, ForwardMode.TARGET_VERIFY, trees=[parents])
    torch.testing.assert_close(run(plain), run(as_tree), rtol=1e-6, atol=1e-6)


def run(case: Case) -> torch.Tensor:
    backend = TorchAttentionBackend()
    batch = case.batch(backend)
    backend.init_forward_metadata(batch)
    return backend.forward_extend(case.q(), case.layer, batch)


@pytest.mark.parametrize("layer", [Layer(4, 4), Layer(8, 1), Layer(3, 3, 24)])
def test_head_shapes(layer: Layer) -> None:
    check(Case([(5, 4), (2, 1)], layer=layer))
    check(Case([(5, 1), (2, 1)], ForwardMode.DECODE, layer=layer))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_softmax_is_float32(dtype: torch.dtype) -> None:
    tolerance = 2e-3 if dtype is torch.float16 else 1.6e-2
    check(Case([(30, 6), (12, 1)], dtype=dtype), tolerance)


def test_very_uneven_batches_run_request_by_request() -> None:
    backend = TorchAttentionBackend()
    even = Case([(20, 1), (30, 1)], ForwardMode.DECODE).batch(backend)
    assert isinstance(backend.init_forward_metadata(even).metadata, PaddedAttention)
    uneven = Case([(20, 1), (30, 1)], ForwardMode.DECODE).batch(backend)
    uneven.prefix_lens_cpu = [20, 600]
    uneven.req_to_token_pool.req_to_token = torch.ones(3, 700, dtype=torch.int32)
    assert isinstance(backend.init_forward_metadata(uneven).metadata, SpanAttention)


def test_graphs_are_refused_with_the_flag_that_helps() -> None:
    with pytest.raises(ConfigError, match="--disable-cuda-graph"):
        TorchAttentionBackend().init_cuda_graph_state(4, 4)


def test_backend_by_name(caplog: pytest.LogCaptureFixture) -> None:
    cpu = torch.device("cpu")
    with caplog.at_level("INFO"):
        assert make_attention_backend("auto", cpu).name == "torch"
    assert "no CUDA device" in caplog.text
    with pytest.raises(ConfigError, match="'flash' is unknown"):
        make_attention_backend("flash", cpu)
