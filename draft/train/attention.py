"""Attention of training-time test (EAGLE-3, arXiv:2503.01840, section 3.1).

At unrolled step k, row i attends

    the rows j <= i of its document as step 0 made them: what drafting finds in the KV memory;
    its own rows of steps 1 .. k: what drafting has added since, one token a step.

So there are k scores a row, a diagonal of each later step, beside the causal scores of step 0. The
forms below give the same numbers. Queries and keys are rotated already, to position i + step.

Shapes: q [R, num_heads, head_dim]; k and v [R, num_kv_heads, head_dim].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from specengine.draft.train.documents import DraftRows

BLOCK = 128  # rows of a block of flex_attention


@dataclass(frozen=True)
class StepKV:
    """Keys and values of one step."""

    k: Tensor
    v: Tensor


class TttAttention(Protocol):
    """Planned for the documents of one batch."""

    def attend(self, q: Tensor, steps: Sequence[StepKV]) -> Tensor:
        """steps: 0 to the query's own -> [R, num_heads, head_dim]."""
        ...


class PaddedAttention:
    """Plain PyTorch: documents of like length side by side, whole score matrices."""

    def __init__(self, rows: DraftRows) -> None:
        self.groups = _groups(rows)  # int64 [B, L] each: rows, the last one repeated to the end
        device = rows.input_ids.device
        self.places = torch.empty(rows.num_rows, dtype=torch.int64, device=device)
        ends = accumulate((group.numel() for group in self.groups), initial=0)
        for group, begin in zip(self.groups, ends, strict=False):
            places = torch.arange(begin, begin + group.numel(), device=device).view_as(group)
            is_row = group - group[:, :1] == torch.arange(group.shape[1], device=device)
            self.places[group[is_row]] = places[is_row]

    def attend(self, q: Tensor, steps: Sequence[StepKV]) -> Tensor:
        scores = values = None
        if len(steps) > 1:
            later = _later(steps)
            scores, values = _own_scores(q, later.k), later.v
        parts = [
            _attend_group(
                q[group],
                steps[0],
                group,
                None if scores is None else scores[group],
                None if values is None else values[group],
            )
            for group in self.groups
        ]
        return torch.cat(parts)[self.places]


def _attend_group(
    q: Tensor, first: StepKV, group: Tensor, scores: Tensor | None, values: Tensor | None
) -> Tensor:
    """q [B, L, num_heads, D]; scores [B, L, num_kv_heads, group, S] and values [B, L, num_kv_heads,
    S, D] of the later steps -> [B * L, num_heads, D]."""
    batch, length, num_heads, size = q.shape
    k, v = first.k[group], first.v[group]
    q = q.view(batch, length, k.shape[2], -1, size)
    causal = torch.einsum("blkgd,bmkd->blkgm", q, k).float() * size**-0.5
    past = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    causal = causal.masked_fill(~past[:, None, None, :], float("-inf"))
    if scores is None or values is None:
        out = torch.einsum("blkgm,bmkd->blkgd", causal.softmax(-1).to(v.dtype), v)
        return out.reshape(-1, num_heads, size)
    shares = torch.cat([causal, scores], dim=-1).softmax(-1).to(v.dtype)
    out = torch.einsum("blkgm,bmkd->blkgd", shares[..., :length], v)
    out = out + torch.einsum("blkgs,blksd->blkgd", shares[..., length:], values)
    return out.reshape(-1, num_heads, size)


def _groups(rows: DraftRows) -> list[Tensor]:
    """Documents of at most twice the length of one another, side by side."""
    groups: dict[int, list[tuple[int, int]]] = {}
    for begin, length in zip(accumulate(rows.lens, initial=0), rows.lens, strict=False):
        groups.setdefault((length - 1).bit_length(), []).append((begin, length))
    device = rows.input_ids.device
    found = []
    for group in groups.values():
        begins, lens = torch.tensor(group, device=device).T[..., None]
        places = torch.arange(max(length for _, length in group), device=device)
        found.append(begins + torch.minimum(places, lens - 1))
    return found


def _later(steps: Sequence[StepKV]) -> StepKV:
    """Keys and values behind step 0, [R, num_kv_heads, S, D]."""
    return StepKV(
        torch.stack([step.k for step in steps[1:]], dim=2),
        torch.stack([step.v for step in steps[1:]], dim=2),
    )


def _own_scores(q: Tensor, keys: Tensor) -> Tensor:
    """float32 [R, num_kv_heads, group, S], of each row with its own later rows."""
    grouped = q.view(len(q), keys.shape[1], -1, 1, q.shape[-1])
    products = grouped.float() * keys[:, :, None].float()
    scale: float = q.shape[-1] ** -0.5
    return products.sum(-1) * scale


class FlexAttention:
    """The causal part in one block-sparse kernel, the diagonals merged into it through its
    log-sum-exp. The number of rows must be a multiple of BLOCK."""

    def __init__(self, rows: DraftRows) -> None:
        self.mask = document_blocks(rows.first_rows)

    def attend(self, q: Tensor, steps: Sequence[StepKV]) -> Tensor:
        first = steps[0]
        heads = [x.transpose(0, 1)[None] for x in (q, first.k, first.v)]
        out, lse = cast(tuple[Tensor, Tensor], _causal_flex(q.is_cuda)(*heads, self.mask))
        causal, causal_lse = out[0].transpose(0, 1), lse[0].T
        if len(steps) == 1:
            return causal
        later = _later(steps)
        compiles = q.is_cuda and torch.is_grad_enabled()
        merged = _compiled_merge() if compiles else merge
        return merged(q, causal, causal_lse, later.k, later.v)


def merge(q: Tensor, causal: Tensor, causal_lse: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """causal [R, num_heads, D], an average over keys whose scores have the log-sum-exp
    causal_lse [R, num_heads] -> the average over those keys and each row's own later ones, keys and
    values [R, num_kv_heads, S, D]."""
    scores = _own_scores(q, keys)
    first_lse = causal_lse.reshape(scores.shape[:-1])
    lse = torch.logaddexp(first_lse, scores.logsumexp(-1))[..., None]
    shares = (scores - lse).exp()[..., None]
    added = (shares * values[:, :, None].float()).sum(-2)
    kept = causal.float().reshape(added.shape) * (first_lse[..., None] - lse).exp()
    return (kept + added).reshape(q.shape).to(q.dtype)


@cache
def _compiled_merge() -> Callable[..., Tensor]:
    """For any number of steps."""
    return torch.compile(merge)


def document_blocks(first_rows: Tensor) -> Any:
    """The BlockMask of causal attention within documents, which follow one another. first_rows
    int64 [R], ascending: where each row's document begins."""
    from torch.nn.attention.flex_attention import BlockMask

    count = len(first_rows) // BLOCK
    blocks = torch.arange(count, device=first_rows.device)
    starts = first_rows.view(count, BLOCK)
    some = (blocks <= blocks[:, None]) & (blocks >= starts[:, :1] // BLOCK)
    whole = (blocks < blocks[:, None]) & (blocks * BLOCK >= starts[:, -1:])

    def sees(batch: Tensor, head: Tensor, row: Tensor, other: Tensor) -> Tensor:
        return (other <= row) & (other >= first_rows[row])

    return BlockMask.from_kv_blocks(
        *_ordered(some & ~whole),
        *_ordered(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(len(first_rows), len(first_rows)),
    )


def _ordered(blocks_QK: Tensor) -> tuple[Tensor, Tensor]:
    """bool [Q, K] -> int32 [1, 1, Q], how many blocks a row has, and [1, 1, Q, K], those first."""
    count = blocks_QK.sum(-1, dtype=torch.int32)
    order = blocks_QK.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return count[None, None], order.to(torch.int32)[None, None]


@cache
def _causal_flex(is_compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> tuple[Tensor, Tensor | None]:
        out, aux = flex_attention(
            q, k, v, block_mask=mask, enable_gqa=True, return_aux=AuxRequest(lse=True)
        )
        return out, aux.lse

    return torch.compile(run, dynamic=False) if is_compiled else run
