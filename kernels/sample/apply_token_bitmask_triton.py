"""Token bitmasks in Triton: one pass that copies and masks, a program a stretch of a row."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _apply_kernel(logits_ptr, words_ptr, slots_ptr, out_ptr, vocab, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    logits = tl.load(logits_ptr + row * vocab + token, mask=inside)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    words = words_ptr + tl.maximum(slot, 0) * width
    word = tl.load(words + token // 32, mask=inside, other=0)
    allowed = ((word >> (token % 32)) & 1 != 0) | (slot < 0)
    tl.store(out_ptr + row * vocab + token, tl.where(allowed, logits, float("-inf")), mask=inside)


def apply_token_bitmask(logits: Tensor, words: Tensor, slots: Tensor) -> Tensor:
    out = torch.empty_like(logits)
    rows, vocab = logits.shape
    if rows:
        _apply_kernel[(rows, triton.cdiv(vocab, _BLOCK))](
            logits, words, slots, out, vocab, words.shape[1], BLOCK=_BLOCK
        )
    return out
