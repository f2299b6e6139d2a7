"""From the model's logits to the distribution that a request asked for.

One pipeline serves plain decoding and every verified position, in this order: logit_bias,
penalties (repetition first), min_tokens, grammar mask, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from specengine.core.sampling_batch import LogitEdits, Penalties, RandomParams, SamplingBatch
from specengine.kernels.sample.apply_token_bitmask import apply_token_bitmask
from specengine.kernels.sample.sample_rows_ref import LEAST_WEIGHT, RowFilters, kept_weights

_MAX_ELEMENTS = 2**24  # of [R, V] handled at once, so that temporaries stay near 0.5 GB


@dataclass(frozen=True)
class PathTokens:
    """Tokens of this round before each row, on its path: drafted, and accepted if the row
    counts."""

    tokens_RN: Tensor  # int64, a valid token id in every place
    mask_RN: Tensor  # bool, which of them are on the row's path

    def part(self, rows: slice) -> PathTokens:
        return PathTokens(self.tokens_RN[rows], self.mask_RN[rows])

    def to(self, device: torch.device) -> PathTokens:
        return PathTokens(self.tokens_RN.to(device), self.mask_RN.to(device))


@dataclass(frozen=True)
class RowMap:
    """What each row of logits decides. By default row i decides the next token of request i."""

    request_R: Tensor | None = None  # int64, index into the batch
    depth_R: Tensor | None = None  # int64, tokens of this round above the decided one
    path: PathTokens | None = None  # read by penalties only
    start: int = 0  # place of the first row among those that sampling.mask has slots for

    def per_row(self, x_B: Tensor) -> Tensor:
        return x_B if self.request_R is None else x_B[self.request_R]

    def output_pos(self, sampling: SamplingBatch) -> Tensor:
        """int64 [R], index of the output token that each row decides."""
        assert sampling.output_pos is not None
        pos = self.per_row(sampling.output_pos)
        return pos if self.depth_R is None else pos + self.depth_R

    def part(self, rows: slice, num_rows: int, device: torch.device) -> RowMap:
        request = self.request_R
        if request is None:
            request = torch.arange(num_rows, device=device)
        path = self.path and self.path.part(rows)
        depth = self.depth_R[rows] if self.depth_R is not None else None
        return RowMap(request[rows], depth, path, self.start + rows.start)


def row_chunks(num_rows: int, vocab_size: int) -> Iterator[slice]:
    """Slices of rows whose [R, V] temporaries fit a fixed budget."""
    step = max(1, _MAX_ELEMENTS // vocab_size)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def edit_logits(logits_RV: Tensor, sampling: SamplingBatch, rows: RowMap) -> Tensor:
    """logit_bias, penalties, min_tokens and grammar. Never in place: raw logits are read again."""
    if sampling.edits is not None:
        logits_RV = _apply_edits(logits_RV, sampling.edits, sampling, rows)
    if sampling.mask is not None:
        slots_R = sampling.mask.slots_R[rows.start : rows.start + len(logits_RV)]
        logits_RV = apply_token_bitmask(logits_RV, sampling.mask.words_MW, slots_R)
    return logits_RV


def _apply_edits(
    logits_RV: Tensor, edits: LogitEdits, sampling: SamplingBatch, rows: RowMap
) -> Tensor:
    slots = rows.per_row(edits.slots)
    if edits.bias is not None:
        logits_RV = logits_RV + edits.bias[slots]
    if edits.penalties is not None:
        logits_RV = _penalise(logits_RV, edits.penalties, slots, rows)
    if edits.min_tokens is not None:
        short = rows.output_pos(sampling) < rows.per_row(edits.min_tokens.min_tokens)
        forbidden = edits.min_tokens.forbidden[slots] & short[:, None]
        logits_RV = logits_RV.masked_fill(forbidden, float("-inf"))
    return logits_RV


def _penalise(logits: Tensor, penalties: Penalties, slots: Tensor, rows: RowMap) -> Tensor:
    counts = penalties.counts[slots]
    if rows.path is not None:
        counts.scatter_add_(1, rows.path.tokens_RN, rows.path.mask_RN.to(counts.dtype))
    generated = counts > 0
    seen = generated | penalties.prompt_seen[slots]
    repetition = rows.per_row(penalties.repetition)[:, None]
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen, scaled, logits)
    frequency = rows.per_row(penalties.frequency)[:, None]
    presence = rows.per_row(penalties.presence)[:, None]
    return logits - frequency * counts - presence * generated


def target_weights(logits_RV: Tensor, random: RandomParams, rows: RowMap) -> Tensor:
    """Edited logits -> float32 [R, V], the probabilities at the request's temperature in units of
    the best token's, with 0 where top-k, top-p or min-p cut, and where the sampler sees no weight:
    what was masked has none. Rows of greedy requests are meaningless."""
    filters = RowFilters(
        temperature=rows.per_row(random.temperature),
        top_k=rows.per_row(random.top_k),
        top_p=rows.per_row(random.top_p),
        min_p=rows.per_row(random.min_p),
        max_top_k=random.max_top_k,
        any_top_p=random.any_top_p,
        any_open_top_p=random.any_open_top_p,
        any_min_p=random.any_min_p,
    )
    weights_RV = kept_weights(logits_RV, filters)
    return weights_RV.masked_fill_(weights_RV < LEAST_WEIGHT, 0.0)
