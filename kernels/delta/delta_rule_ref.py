"""The gated delta rule in plain PyTorch (Yang et al. 2024, arXiv:2412.06464, equation 10).

For each head, with S [K, E] the memory of the text so far, all in float32::

    S = decay * S
    delta = write * (v - S^T k)
    S = S + k outer delta
    out = S^T q

where q, k and v are what a causal convolution over the last inputs gives, behind a SiLU; q and k
have length 1, and q is then scaled by K ** -0.5; write = sigmoid(b), and
decay = exp(-exp(decay_log) * softplus(a + time_bias)).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from specengine.kernels.delta.types import (
    DeltaInputs,
    DeltaShape,
    DeltaState,
    DeltaWeights,
    NodeBatch,
    NodeUpdates,
    StatePaths,
)

NORM_EPS = 1e-6


@dataclass(frozen=True)
class Tokens:
    """What the rule reads of tokens, float32, one dimension or several in front (...)."""

    q: Tensor  # [..., M, K], scaled
    k: Tensor  # [..., M, K]
    v: Tensor  # [..., M, E]
    write: Tensor  # [..., M]
    decay_log: Tensor  # [..., M], at most 0


def convolve(windows: Tensor, weight_CW: Tensor) -> Tensor:
    """[..., W, C], the oldest input first -> [..., C], behind the SiLU, in the inputs' dtype."""
    out = (windows.float() * weight_CW.float().t()).sum(-2)
    return F.silu(out).to(windows.dtype)


def tokens_of(
    mixed: Tensor, write: Tensor, decay: Tensor, weights: DeltaWeights, shape: DeltaShape
) -> Tokens:
    """mixed: [..., C], behind the convolution. write, decay: [..., M]."""
    sizes = [shape.key_size, shape.key_size, shape.value_size]
    q, k, v = torch.split(mixed.float(), sizes, dim=-1)
    heads = (shape.num_key_heads, shape.key_dim)
    q, k = (_of_length_1(one.reshape(*one.shape[:-1], *heads)) for one in (q, k))
    rate_M, bias_M = weights.decay_log_M.float().exp(), weights.time_bias_M.float()
    return Tokens(
        q=(q * shape.key_dim**-0.5).repeat_interleave(shape.group, -2),
        k=k.repeat_interleave(shape.group, -2),
        v=v.reshape(*v.shape[:-1], shape.num_heads, shape.value_dim),
        write=write.sigmoid().float(),
        decay_log=-rate_M * F.softplus(decay.float() + bias_M),
    )


def _of_length_1(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)


def parents_of(nodes: NodeBatch) -> Tensor:
    """int64 [B, N], the number of each node's parent; -1 of roots. Of a tree, the last node before
    it that it sees."""
    order_N = torch.arange(nodes.width, device=nodes.rows_B.device)
    if nodes.mask_BNN is None:
        return (order_N - 1).expand(len(nodes.rows_B), -1)
    mask_BNN = nodes.mask_BNN[:, : nodes.width, : nodes.width]
    seen = mask_BNN & (order_N < order_N[:, None])
    return torch.where(seen, order_N, -1).amax(-1)


def verify(
    given: DeltaInputs,
    weights: DeltaWeights,
    state: DeltaState,
    updates: NodeUpdates,
    nodes: NodeBatch,
    shape: DeltaShape,
) -> Tensor:
    """Step by step: the state of each node follows from its parent's -> float32 [T, M, E]."""
    B, N = len(nodes.rows_B), nodes.width
    order_N = torch.arange(N, device=given.mixed_TC.device)
    exists_BN = order_N < nodes.starts.diff()[:, None]
    flat_BN = (nodes.starts[:-1, None] + order_N).where(exists_BN, 0)
    parents_BN = parents_of(nodes)
    windows = _tree_windows(given.mixed_TC[flat_BN], history_of(state, nodes), parents_BN)
    mixed_BNC = convolve(windows, weights.conv_CW)
    write, decay = given.write_TM[flat_BN], given.decay_TM[flat_BN]
    tokens = tokens_of(mixed_BNC, write, decay, weights, shape)
    memories = [memory_of(state, nodes)]  # of roots' parents, then of the nodes
    requests_B = torch.arange(B, device=flat_BN.device)
    outs, deltas = [], []
    for node in range(N):
        before = torch.stack(memories, 1)[requests_B, parents_BN[:, node] + 1]
        decayed = before * tokens.decay_log[:, node].exp()[..., None, None]
        k, v = tokens.k[:, node], tokens.v[:, node]
        delta = tokens.write[:, node, :, None] * (v - _read(decayed, k))
        memories.append(decayed + k[..., None] * delta[..., None, :])
        outs.append(_read(memories[-1], tokens.q[:, node]))
        deltas.append(delta)
    rows = flat_BN[exists_BN]
    updates.inputs[rows] = given.mixed_TC[rows]
    updates.keys[rows] = tokens.k[exists_BN][:, :: shape.group]
    updates.deltas[rows] = torch.stack(deltas, 1)[exists_BN]
    updates.decays[rows] = tokens.decay_log.exp()[exists_BN]
    out = given.mixed_TC.new_zeros(
        len(given.mixed_TC), shape.num_heads, shape.value_dim, dtype=torch.float32
    )
    out[rows] = torch.stack(outs, 1)[exists_BN]
    return out


def keep(
    states: list[DeltaState], updates: list[NodeUpdates], paths: StatePaths, shape: DeltaShape
) -> None:
    """Move the states on by the updates of the accepted nodes. Lists: one a layer."""
    rows_B, order_W = paths.rows_B, torch.arange(paths.width, device=paths.rows_B.device)
    nodes_BW = order_W.expand(len(rows_B), -1) if paths.nodes_BW is None else paths.nodes_BW
    stands_BW = order_W <= paths.accepted_B[:, None]
    flat_BW = (paths.starts_B[:, None] + nodes_BW).where(stands_BW, 0)
    for state, update in zip(states, updates, strict=True):
        inputs, memory = state.inputs[rows_B], state.memory[rows_B]
        for place in range(paths.width):
            stands_B, flat_B = stands_BW[:, place], flat_BW[:, place]
            shifted = torch.cat([inputs[:, 1:], update.inputs[flat_B][:, None]], 1)
            key = update.keys[flat_B].repeat_interleave(shape.group, 1)
            added = key[..., None] * update.deltas[flat_B][:, :, None]
            moved = memory * update.decays[flat_B][..., None, None] + added
            inputs = shifted.where(stands_B[:, None, None], inputs)
            memory = moved.where(stands_B[:, None, None, None], memory)
        state.inputs[rows_B], state.memory[rows_B] = inputs, memory


def history_of(state: DeltaState, nodes: NodeBatch) -> Tensor:
    """[B, W - 1, C], the inputs before each root. Padding has none: what its slot holds may have
    grown without bounds."""
    return state.inputs[nodes.rows_B] * _is_real(nodes)[:, None, None]


def memory_of(state: DeltaState, nodes: NodeBatch) -> Tensor:
    """float32 [B, M, K, E], before each root."""
    return state.memory[nodes.rows_B] * _is_real(nodes)[:, None, None, None]


def _is_real(nodes: NodeBatch) -> Tensor:
    return nodes.rows_B != 0


def _tree_windows(mixed_BNC: Tensor, history_BHC: Tensor, parents_BN: Tensor) -> Tensor:
    """[B, N, W, C]: each node's own input behind those of its ancestors, and of the text."""
    B, N, _ = mixed_BNC.shape
    before = history_BHC.shape[1]
    line = torch.cat([history_BHC, mixed_BNC], 1)  # place i + before: node i
    earlier = torch.arange(-1, before - 1, device=parents_BN.device).clamp(min=0)
    previous = torch.cat([earlier.expand(B, -1), parents_BN + before], 1)
    place = torch.arange(before, before + N, device=parents_BN.device).expand(B, -1)
    places = [place]
    for _ in range(before):
        places.insert(0, previous.gather(1, places[0]))
    index = torch.stack(places, -1).flatten(1)
    return line[torch.arange(B, device=index.device)[:, None], index].view(B, N, before + 1, -1)


def _read(memory: Tensor, x: Tensor) -> Tensor:
    """[B, M, K, E], [B, M, K] -> [B, M, E]."""
    return (memory * x[..., None]).sum(-2)
