"""Gated DeltaNet: linear attention in place of attention (Yang et al. 2024, arXiv:2412.06464), as
Qwen3-Next has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from specengine.core.forward_mode import ForwardMode
from specengine.core.parallel import Cut, JoinedCut, even_heads
from specengine.kernels.delta import delta_rule
from specengine.kernels.delta.types import (
    DeltaInputs,
    DeltaWeights,
    NodeBatch,
    PromptBatch,
)
from specengine.kernels.linear import few_row
from specengine.kernels.linear.gated_norm import gated_norm
from specengine.kernels.linear.quantised import Fp8Input
from specengine.kernels.opaque import is_traced
from specengine.layers import split_ops
from specengine.layers.layer_spec import LayerSpec
from specengine.layers.linear import MergedLinear, RowParallelLinear
from specengine.layers.module import Module

if TYPE_CHECKING:
    from specengine.core.batch import ForwardBatch
    from specengine.core.interfaces import StatePool


def delta_layers(model: object) -> tuple[GatedDelta, ...]:
    """Those of a model, in the order in which a forward comes to them: the layers that keep
    recurrent state."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    layers = [module for module in modules if isinstance(module, GatedDelta)]
    return tuple(sorted(layers, key=lambda layer: layer.layer_id))


class GatedNorm(Module):
    """x / rms(x) * weight * silu(gate), of each head by itself."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor, into: Fp8Input | None = None) -> Tensor:
        """float32 [T, heads, size], [T, heads, size] -> [T, heads * size] of gate's dtype. into:
        Linear.takes of the layer that reads it."""
        return gated_norm(x, gate, self.weight, self.eps, into=into)


class CausalConv(Module):
    """Weights of a convolution of each channel by itself, as checkpoints have them."""

    def __init__(self, channels: JoinedCut, width: int) -> None:
        """channels: this rank's."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels.size, 1, width), requires_grad=False)
        self.channels = channels

    def cuts(self, kind: str) -> Sequence[JoinedCut]:
        return [self.channels]


class GatedDelta(split_ops.Numbered):
    """Projections, the rule over what the state pool keeps, a gated norm, output projection. A rank
    has some of the key heads, and the value heads that read these, with their state."""

    module_name = "linear_attn"  # in its layer, as checkpoints name it
    leaves_rows_out = False  # it has no `attend_kept`

    def __init__(self, spec: LayerSpec, layer_id: int) -> None:
        super().__init__()
        self.waits = False  # as layers.linear.Linear has it: two products read the input
        assert spec.gated_delta is not None
        spec.check_ranks()
        self.layer_id = layer_id
        delta, size = spec.gated_delta, spec.hidden_size
        key_heads = even_heads(delta.num_key_heads)
        self.heads = heads = key_heads.times(delta.num_heads // delta.num_key_heads)
        keys, values = key_heads.times(delta.key_dim), heads.times(delta.value_dim)
        self.kept = shape = replace(delta, num_key_heads=key_heads.size, num_heads=heads.size)
        channels = JoinedCut.below(keys, keys, values)
        self.in_proj_qkvz = MergedLinear(
            size, [shape.channels, shape.value_size], parts=[channels, values]
        )
        self.in_proj_ba = MergedLinear(size, [heads.size] * 2, parts=[heads, heads])
        self.conv1d = CausalConv(channels, shape.conv_width)
        self.A_log, self.dt_bias = (_numbers(heads.size) for _ in range(2))
        self.norm = GatedNorm(shape.value_dim, spec.rms_norm_eps)
        self.out_proj = RowParallelLinear(values.whole, size, part=values)

    @property
    def takes(self) -> Fp8Input | None:
        """As layers.linear.Linear has it: of the layer's input."""
        return self.in_proj_qkvz.takes

    def cuts(self, kind: str) -> Sequence[Cut]:
        """Of A_log and of dt_bias."""
        return [self.heads]

    def forward(self, positions: Tensor, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """int64 [T], [T, hidden_size] -> [T, hidden_size]."""
        out: Tensor = self.out_proj(self._heads(hidden, batch))
        return out

    def parts(self, positions: Tensor, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """The same, perhaps in parts, for RMSNorm.add."""
        return self.out_proj.parts(self._heads(hidden, batch))

    def _heads(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, hidden_size] -> [T, value_size]."""
        shape, gates = self.kept, self.in_proj_ba
        beside = self.in_proj_qkvz.completes_input
        room = hidden.new_empty(len(hidden), gates.out_features) if beside else None
        joined: Tensor = self.in_proj_qkvz(hidden)
        mixed, gate = torch.split(joined, [shape.channels, shape.value_size], -1)
        write, decay = self._gates(hidden, room).chunk(2, -1)
        if is_traced():
            heads = shape.num_heads, shape.value_dim
            out = split_ops.GATED_DELTA(self, (mixed, write, decay), heads, torch.float32)
        elif not len(hidden):
            return gate
        else:
            out = self._run(DeltaInputs(mixed, write, decay), batch)
        normed: Tensor = self.norm(out, gate.view(out.shape), self.out_proj.takes)
        return normed

    def _gates(self, hidden: Tensor, room: Tensor | None) -> Tensor:
        """[T, hidden_size] -> [T, 2 * num_heads]. So few outputs give cuBLAS too little to do.
        room: for them, where they may be computed beside the product before."""
        product = self.in_proj_ba
        if product.is_plain and not is_traced():
            return few_row.linear(hidden, product.plain, product.bias, into=room)
        out: Tensor = product(hidden)
        return out

    def run_split(self, rows: Sequence[Tensor], batch: ForwardBatch) -> Tensor:
        """The rule, of a model that was traced."""
        return self._run(DeltaInputs(*rows), batch)

    def _run(self, given: DeltaInputs, batch: ForwardBatch) -> Tensor:
        """float32 [T, M, E]. Raises ValueError for a forward that says neither that its tokens
        are kept nor that they are verified."""
        pool, weights = states_of(batch), self._weights
        state, updates = pool.state(self.layer_id), pool.updates(self.layer_id)
        if batch.forward_mode.is_prefill():
            return delta_rule.extend(given, weights, state, prompts_of(batch), self.kept)
        nodes = nodes_of(batch)
        if batch.forward_mode.is_decode():
            return delta_rule.decode(given, weights, state, updates, nodes, self.kept)
        if batch.forward_mode is ForwardMode.TARGET_VERIFY:
            return delta_rule.verify(given, weights, state, updates, nodes, self.kept)
        raise ValueError(f"recurrent state does not follow a forward of mode {batch.forward_mode}")

    @property
    def _weights(self) -> DeltaWeights:
        return DeltaWeights(self.conv1d.weight[:, 0], self.A_log, self.dt_bias)


def states_of(batch: ForwardBatch) -> StatePool:
    assert batch.states is not None, "a runner whose model keeps state has a pool for it"
    return batch.states


def prompts_of(batch: ForwardBatch) -> PromptBatch:
    if batch.prompts is None:
        lens = batch.extend_lens_cpu, batch.prefix_lens_cpu
        batch.prompts = PromptBatch(batch.req_pool_indices, *lens, batch.state_saves)
    return batch.prompts


def nodes_of(batch: ForwardBatch) -> NodeBatch:
    mask_BNN = None if batch.tree is None else batch.tree.mask_BNN
    width = max(batch.extend_lens_cpu)
    return NodeBatch(batch.req_pool_indices, batch.qo_indptr, width, mask_BNN)


def _numbers(count: int) -> nn.Parameter:
    """In float32 whatever the model's dtype: exponents are taken of them."""
    return nn.Parameter(torch.empty(count, dtype=torch.float32), requires_grad=False)
