"""The fast paths of a GPU on a CPU: the reference kernels stand where theirs would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from specengine.core.batch import AttentionBackend, ForwardBatch, ForwardMode
from specengine.core.tree import Tree
from specengine.kernels.attention.head_norms import norm_heads
from specengine.kernels.attention.paged_attention import paged_attention
from specengine.kernels.attention.rope import rope_store_kv
from specengine.kernels.attention.types import HeadNorms
from specengine.kernels.experts import experts, experts_ref
from specengine.kernels.head import (
    head_best_cuda,
    head_best_ref,
    head_stream,
    head_topk,
    head_topk_cuda,
    head_topk_ref,
)
from specengine.kernels.linear import (
    decoder_stack,
    decoder_stack_cuda,
    decoder_stack_ref,
    few_row,
    layer_tail,
    layer_tail_cuda,
    layer_tail_ref,
)
from specengine.layers import decoder
from specengine.layers.compute_paths import (
    COMPILED,
    FEW_ROWS,
    HEAD_BEST,
    HEAD_TOP,
    LAYER_TAIL,
    SPLIT_PREFILL,
    WHOLE_STACK,
    ComputePath,
)
from specengine.runner.attention.triton_backend import TritonAttentionBackend
from specengine.target.verify.tree import ancestor_mask, depths

FEATURE_LAYERS = (0, 2)  # those whose outputs are kept


@dataclass(frozen=True)
class Forward:
    """hidden: [T, H] after the final norm. features: [T, H] behind each of FEATURE_LAYERS.
    was_taken: whether the path ran, not only what it falls back to."""

    hidden: Tensor
    features: list[Tensor]
    was_taken: bool

    def assert_near(self, other: Forward, tolerance: float = 1e-5) -> None:
        pairs = zip([self.hidden, *self.features], [other.hidden, *other.features], strict=True)
        for found, expected in pairs:
            assert float((found - expected).abs().max() / expected.abs().max()) < tolerance


@dataclass(frozen=True)
class Step:
    """A forward. tokens: the new ones of each request. parents: of each request's nodes, where
    these are a tree; -1 of the root."""

    mode: ForwardMode
    tokens: Sequence[Sequence[int]]
    parents: Sequence[Sequence[int]] | None = None

    @property
    def tree(self) -> Tree | None:
        if self.parents is None:
            return None
        width = max(map(len, self.parents))
        parents_BN = torch.tensor([[*one, *[-1] * (width - len(one))] for one in self.parents])
        lens_B = torch.tensor([len(one) for one in self.parents])
        exists_BN = torch.arange(width) < lens_B[:, None]
        mask_BNN = ancestor_mask(parents_BN, exists_BN)
        return Tree(depths(mask_BNN)[exists_BN], mask_BNN)


def run_path(
    runner: Any,
    path: ComputePath | None,
    tokens: Sequence[Sequence[int]],
    patch: pytest.MonkeyPatch,
) -> Forward:
    """An EXTEND of new requests, as of run_steps."""
    return run_steps(runner, path, [Step(ForwardMode.EXTEND, tokens)], patch)[0]


def run_steps(
    runner: Any, path: ComputePath | None, steps: Sequence[Step], patch: pytest.MonkeyPatch
) -> list[Forward]:
    """One after the other, along a path wherever the code lets it; None: without any. runner: a
    MiniRunner of a model of three layers or more. SPLIT_PREFILL splits an EXTEND alone."""
    calls: list[object] = []
    with patch.context() as patched, torch.no_grad():
        if path is not None:
            let_take(path, calls, patched)
        if path is WHOLE_STACK:
            runner.backend = TritonAttentionBackend(torch.device("cpu"))
            patched.setattr(runner.backend, "forward_fused", lambda *_: None)
            patched.setattr(runner.backend, "forward_extend", _attend)
        return [_run(runner, path, step, calls) for step in steps]


def _run(runner: Any, path: ComputePath | None, step: Step, calls: list[object]) -> Forward:
    calls.clear()
    is_split = path is SPLIT_PREFILL and step.mode is ForwardMode.EXTEND
    mode = ForwardMode.SPLIT_PREFILL if is_split else step.mode
    batch = runner.batch(mode, step.tokens, step.tree)
    batch.feature_layers, batch.compiles = FEATURE_LAYERS, path is COMPILED
    model, given = runner.model, (batch.input_ids, batch.positions, batch)
    if is_split:
        assert model.forward_split_prefill(*given, 1) is None
        calls += [] if batch.hidden_states is None else [batch.hidden_states]
        hidden = model.forward_split_prefill(*given, model.num_layers)
    else:
        hidden = model(*given)
    return Forward(hidden, batch.layer_features, bool(calls))


def let_take(path: ComputePath, calls: list[object], patch: pytest.MonkeyPatch) -> None:
    """As on a GPU with everything installed; calls: grows with each call of the path's kernel."""
    if path is COMPILED:
        patch.setattr(decoder, "compiled", _tracer(calls))
    elif path is FEW_ROWS:
        patch.setattr(few_row, "fits", lambda *_: True)
        patch.setattr(few_row, "linear_add", counted(few_row.linear_add, calls))
        patch.setattr(experts, "experts", _experts_in_parts)
        patch.setattr(experts, "room_for_parts", _room_for_parts)
    elif path is LAYER_TAIL:
        patch.setattr(layer_tail, "fits", lambda *_: True)
        patch.setattr(layer_tail_cuda, "layer_tail", counted(layer_tail_ref.layer_tail, calls))
    elif path is WHOLE_STACK:
        kernel = counted(decoder_stack_ref.decoder_stack, calls)
        patch.setattr(decoder_stack, "fits", lambda *_: True)
        patch.setattr(decoder_stack_cuda, "decoder_stack", kernel)
    elif path is HEAD_BEST:

        def best(x: Tensor, weight: Tensor, _: Tensor, *rest: Any) -> Tensor:
            return head_best_ref.head_best(x, weight, *rest)

        patch.setattr(head_stream, "fits", lambda *_: True)
        patch.setattr(head_topk, "fits", lambda *_: False)  # which asks the same
        patch.setattr(head_best_cuda, "head_best", counted(best, calls))
    elif path is HEAD_TOP:
        patch.setattr(head_topk, "fits", lambda *_: True)
        patch.setattr(head_topk_cuda, "head_topk", counted(head_topk_ref.head_topk, calls))


def _experts_in_parts(x: Tensor, chosen: Any, weights: Any, into: Tensor | None = None) -> Tensor:
    """As the kernel of few rows leaves them."""
    out = experts_ref.experts(x, chosen, weights).float()
    parts = torch.stack([0.25 * out, 0.75 * out])
    return parts if into is None else into[:2].copy_(parts)


def _room_for_parts(x: Tensor, num_chosen: int, weights: Any, more: int) -> Tensor:
    return torch.full((2 + more, *x.shape), torch.nan, dtype=torch.float32)


def let_fuse_norms(backend: AttentionBackend, patch: pytest.MonkeyPatch) -> list[HeadNorms]:
    """A backend computes attention of layers with norms of heads at once; what it was given."""
    given = list[HeadNorms]()

    def fused(
        q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: ForwardBatch, norms: HeadNorms | None
    ) -> Tensor | None:
        if norms is None or layer.rotary is None:
            return None
        given.append(norms)
        q, k = norm_heads(q, k, norms, backend="torch")
        caches = batch.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        where = batch.positions, layer.rotary.cos_sin_cache, *caches, batch.out_cache_loc
        return backend.forward_extend(rope_store_kv(q, k, v, *where), layer, batch)

    patch.setattr(backend, "forward_fused", fused)
    return given


def counted(function: Callable[..., Any], calls: list[object]) -> Callable[..., Any]:
    def call(*given: Any, **named: Any) -> Any:
        calls.append(given)
        return function(*given, **named)

    return call


def _tracer(calls: list[object]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """torch.compile as the engine asks for it, without a code generator: what Dynamo traces runs as
    it is. Raises where a function is not one graph, and where there are more graphs than Dynamo
    keeps of one. Those of other models are gone. calls: grows with each run of a graph."""
    torch._dynamo.reset()  # type: ignore[no-untyped-call]

    def backend(graph: Any, _: object) -> Callable[..., Any]:
        return counted(graph.forward, calls)

    return cache(lambda function: torch.compile(function, backend=backend, fullgraph=True))


def _attend(q: Tensor, layer: Any, batch: ForwardBatch) -> Tensor:
    assert batch.attn_plan is not None
    k_cache, v_cache = batch.token_to_kv_pool.get_kv_buffer(layer.layer_id)
    return paged_attention(
        q, k_cache, v_cache, batch.attn_plan.metadata, layer.scale,
        window=layer.sliding_window, chunk=layer.attention_chunk, softcap=layer.softcap,
        sinks=layer.sinks,
    )  # fmt: skip
