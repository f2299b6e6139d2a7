"""Logits of forbidden tokens become -inf, by bitmasks that only some rows have."""

from __future__ import annotations

from torch import Tensor

from specengine.kernels.dispatch import Backend, use_triton
from specengine.kernels.sample import apply_token_bitmask_ref


def apply_token_bitmask(
    logits: Tensor, words: Tensor, slots: Tensor, *, backend: Backend = "auto"
) -> Tensor:
    """``out[r, v] = logits[r, v] if slots[r] < 0 or bit(words[slots[r]], v) else -inf``, where
    bit v is bit v % 32 of word v // 32, the lowest first.

    logits: float32 [R, V], left as it is; words: int32 [M, W], M >= 1, 32 W >= V; slots: int32 [R],
    below M; all contiguous and on one device -> float32 [R, V].
    """
    assert words.shape[1] * 32 >= logits.shape[1], "a bit for every token"
    if use_triton(backend, logits):
        from specengine.kernels.sample import apply_token_bitmask_triton

        return apply_token_bitmask_triton.apply_token_bitmask(logits, words, slots)
    return apply_token_bitmask_ref.apply_token_bitmask(logits, words, slots)
