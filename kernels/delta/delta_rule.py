"""The gated delta rule: over prompts and verified nodes, and keeping the accepted nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specengine.kernels.delta import delta_chunks_ref, delta_rule_ref
from specengine.kernels.delta.types import (
    CHUNK,
    DeltaInputs,
    DeltaShape,
    DeltaState,
    DeltaWeights,
    NodeBatch,
    NodeUpdates,
    PromptBatch,
    StatePaths,
)
from specengine.kernels.dispatch import Backend, use_triton
from specengine.kernels.sizes import cdiv

# Microseconds a layer on an H200, of Qwen3-Next's heads: the next token of one request, each token
# of many requests, a chunk by Triton, and what its kernels take to start. Chunks by PyTorch take
# 6.3 ms for 2,048 tokens.
NEXT_STEP, STEP, CHUNK_BY_TRITON, CHUNKS_BEGIN = 0.58, 0.155, 8.8, 10.0
LONGEST_STEPS_BEFORE_TORCH = 4096  # tokens of a prompt in float32 that are taken one by one


def extend(
    given: DeltaInputs,
    weights: DeltaWeights,
    state: DeltaState,
    batch: PromptBatch,
    shape: DeltaShape,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """Prompts: the rule over the tokens of each request, from the state in its slot, which holds
    the state behind the last one afterwards -> float32 [T, M, E]. On CUDA by Triton kernels, all
    requests at once: token by token, or in chunks where these are faster. float32 is taken token by
    token up to LONGEST_STEPS_BEFORE_TORCH. What is left, and all without Triton, goes in chunks by
    PyTorch, on any device."""
    if use_triton(backend, given.mixed_TC):
        run = _in_triton(given.mixed_TC, batch.lens)
        if run is not None:
            return run(given, weights, state, batch, shape)
    return delta_chunks_ref.extend(given, weights, state, batch, shape)


def _in_triton(mixed: Tensor, lens: Sequence[int]) -> Callable[..., Tensor] | None:
    """The kernels for prompts of so many tokens, if any."""
    from specengine.kernels.delta import delta_chunks_triton, delta_prompt_triton

    # Chunks of float32 would spill 13 KB a thread, for which CUDA sets gigabytes aside.
    if mixed.is_cuda and mixed.dtype == torch.float32:
        return delta_prompt_triton.extend if max(lens) <= LONGEST_STEPS_BEFORE_TORCH else None
    in_chunks = chunks_are_faster(lens)
    return delta_chunks_triton.extend if in_chunks else delta_prompt_triton.extend


def chunks_are_faster(lens: Sequence[int]) -> bool:
    """Whether chunks of CHUNK tokens take prompts of so many tokens sooner than one token after
    another."""
    num_chunks = sum(cdiv(one, CHUNK) for one in lens)
    steps = max(NEXT_STEP * max(lens), STEP * sum(lens))
    return CHUNKS_BEGIN + CHUNK_BY_TRITON * num_chunks < steps


def verify(
    given: DeltaInputs,
    weights: DeltaWeights,
    state: DeltaState,
    updates: NodeUpdates,
    nodes: NodeBatch,
    shape: DeltaShape,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """Verification: the rule at each node, from the state in the slot, which stays as it is. Row t
    of `updates` then says how node t changes its parent's state -> float32 [T, M, E].

    Any device; two Triton kernels on CUDA, whose launches depend on neither lengths nor trees.
    """
    if use_triton(backend, given.mixed_TC):
        from specengine.kernels.delta import delta_rule_triton

        out: Tensor = delta_rule_triton.verify(given, weights, state, updates, nodes, shape)
        return out
    return delta_rule_ref.verify(given, weights, state, updates, nodes, shape)


def decode(
    given: DeltaInputs,
    weights: DeltaWeights,
    state: DeltaState,
    updates: NodeUpdates,
    nodes: NodeBatch,
    shape: DeltaShape,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """One token a request, all of which are kept: `verify`, then `keep` of what it wrote. updates:
    scratch. Any device; two Triton kernels on CUDA."""
    if use_triton(backend, given.mixed_TC):
        from specengine.kernels.delta import delta_decode_triton

        out: Tensor = delta_decode_triton.decode(given, weights, state, nodes, shape)
        return out
    out = delta_rule_ref.verify(given, weights, state, updates, nodes, shape)
    none_B = nodes.rows_B.new_zeros(len(nodes.rows_B))
    paths = StatePaths(nodes.rows_B, nodes.starts[:-1], none_B, None, 1)
    delta_rule_ref.keep([state], [updates], paths, shape)
    return out


def keep(
    states: Sequence[DeltaState],
    updates: Sequence[NodeUpdates],
    paths: StatePaths,
    shape: DeltaShape,
    *,
    backend: Backend = "auto",
) -> None:
    """Commit: move the state of each request on to the last node of its accepted path, in every
    layer::

        for b in range(B):
            for k in range(accepted[b] + 1):
                node = starts[b] + nodes[b, k]
                memory[rows[b]] = decays[node] * memory[rows[b]] + keys[node] outer deltas[node]

    and its last inputs with it. One a layer each, views of tensors [L, ...]. Any device; two
    Triton kernels on CUDA, each for all layers together.
    """
    if use_triton(backend, paths.rows_B):
        from specengine.kernels.delta import delta_rule_triton

        delta_rule_triton.keep(states, updates, paths, shape)
        return
    delta_rule_ref.keep(list(states), list(updates), paths, shape)
