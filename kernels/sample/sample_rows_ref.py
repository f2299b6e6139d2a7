"""Tokens from logits in plain PyTorch. On a CPU with a C compiler, exp and draws are compiled
(native/sample.py), and give the same bits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from specengine.kernels.native import sample as native
from specengine.kernels.sample.keyed_uniform_ref import keyed_uniform
from specengine.kernels.sample.types import (
    MIN_P,
    SEED,
    SHIFT,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    ChoiceTable,
    DrawPlaces,
)

WEIGHT_BITS = 43  # of the best token's weight; sums over 2^19 tokens fit 63 bits
LEAST_WEIGHT = 2.0**-WEIGHT_BITS
LOWEST = -40.0  # its exp has no weight
LOG2_E = 1.4426950408889634
LN2_HIGH, LN2_LOW = (
    0.693359375,
    -0.00021219444,
)  # ln 2; 9 bits in the first, so that n of it is exact
SERIES = tuple(1.0 / math.factorial(n) for n in range(6, -1, -1))  # of exp, highest power first

_CONSTANTS = (LOWEST, LOG2_E, LN2_HIGH, LN2_LOW, *SERIES)

_CACHED = 2**16  # elements that stay in a CPU's cache while a series is summed over them
_FIRST_CANDIDATES = 256  # most nuclei without a top-k fit; more are looked at where one does not


@dataclass(frozen=True)
class RowFilters:
    """What [R] rows of logits go through, and what of it any request asks for."""

    temperature: Tensor  # float32, above 0
    top_k: Tensor  # int64, V where off
    top_p: Tensor  # float64, 1 where off
    min_p: Tensor  # float32, 0 where off
    max_top_k: int  # largest top-k that cuts anything; 0 for none
    any_top_p: bool
    any_open_top_p: bool  # some top_p row has no top-k that bounds its candidates
    any_min_p: bool


def exp_below_(x_RV: Tensor) -> Tensor:
    """exp of float32 numbers that are 0 or less, in place; what lies below LOWEST, or is NaN, is
    taken for LOWEST. Made of single operations, each rounded as IEEE 754 says, so that any device
    gives the same bits."""
    if native.fits_exp(x_RV):
        return native.exp_below_(x_RV, _CONSTANTS)
    on_cpu = x_RV.device.type == "cpu"
    rows = max(1, _CACHED // x_RV.shape[-1]) if on_cpu else max(1, len(x_RV))
    for part in torch.split(x_RV, rows):
        part.copy_(part.where(part > LOWEST, LOWEST))
        powers = (part * LOG2_E).add_(0.5).floor_()
        part.sub_(powers * LN2_HIGH).sub_(powers * LN2_LOW)
        series = torch.full_like(part, SERIES[0])
        for factor in SERIES[1:]:
            series.mul_(part).add_(factor)
        scale = powers.to(torch.int32).add_(127).bitwise_left_shift_(23).view(torch.float32)
        torch.mul(series, scale, out=part)
    return x_RV


def kept_weights(logits_RV: Tensor, filters: RowFilters) -> Tensor:
    """float32 [R, V]: weights in units of the best token's, 0 where top-k, top-p or min-p cut."""
    e = logits_RV / filters.temperature[:, None]
    e = exp_below_(e.sub_(e.amax(-1, keepdim=True)))
    floor = None
    if filters.max_top_k or filters.any_top_p:
        floor = _top_floor(e, filters)
    if filters.any_min_p:
        min_p = filters.min_p[:, None]
        floor = min_p if floor is None else torch.maximum(floor, min_p)
    return e if floor is None else e.masked_fill_(e < floor, 0.0)


def _top_floor(e: Tensor, filters: RowFilters) -> Tensor:
    """float32 [R, 1], the least e that top-k and then top-p keep."""
    top_k, top_p = filters.top_k[:, None], filters.top_p[:, None]
    unbounded = top_k == e.shape[-1]
    best, mass, limit = _candidates(e, filters, unbounded)
    in_nucleus = (mass - fixed(best) < limit).sum(-1, keepdim=True)
    last = torch.minimum(in_nucleus, top_k).clamp(min=1) - 1
    return best.gather(1, last).masked_fill(unbounded & (top_p >= 1.0), 0.0)


def _candidates(e: Tensor, filters: RowFilters, unbounded: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The best of each row, [R, C], descending, the running sums of their weights, and the weight
    at which the nucleus ends, float64 [R, 1]. C is large enough to hold every row's top-k or
    nucleus. A full sort would cost ten times as much."""
    vocab = e.shape[-1]
    top_k, top_p = filters.top_k[:, None], filters.top_p[:, None]
    least = _FIRST_CANDIDATES if filters.any_open_top_p else 1
    size = min(vocab, max(least, filters.max_top_k))
    while True:
        best = e.topk(size).values
        mass = fixed(best).cumsum(-1)
        kept = mass.gather(1, top_k.clamp(max=size) - 1)
        if filters.any_open_top_p:
            kept = torch.where(unbounded, fixed(e).sum(-1, keepdim=True), kept)
        limit = top_p * kept
        if size == vocab or not filters.any_open_top_p:
            return best, mass, limit
        overflows = unbounded & (top_p < 1.0) & (mass[:, -1:] < limit)
        if not overflows.any():
            return best, mass, limit
        size = min(vocab, 16 * size)


def fixed(weights: Tensor) -> Tensor:
    """int64, in units of 2^-WEIGHT_BITS."""
    return (weights * 2.0**WEIGHT_BITS).long()


def invert_cdf(weights_RV: Tensor, uniforms_R: Tensor) -> Tensor:
    """The first token whose cumulative weight exceeds ``uniform * total``, int64 [R].

    weights_RV: float32 or float64, 0 to about 1 each. Sums are taken in integers, which are exact
    in any order: the result is the same on every device, and is never a token of weight 0.
    """
    if native.fits_weights(weights_RV, uniforms_R):
        return native.invert_cdf(weights_RV, uniforms_R)
    cumulative = fixed(weights_RV).cumsum(-1)
    total = cumulative[:, -1:]
    threshold = (uniforms_R[:, None] * total).long().minimum(total - 1)
    index = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
    return index.clamp(max=weights_RV.shape[-1] - 1)


@dataclass(frozen=True)
class RowParams:
    """How [R] rows want their tokens chosen."""

    greedy: Tensor  # bool
    filters: RowFilters  # meaningless for greedy rows
    uniforms: Tensor  # float64


def row_params(table: ChoiceTable, places: DrawPlaces, stream: int, vocab: int) -> RowParams:
    slots_R = places.slots_B.repeat_interleave(places.nodes)
    depths_R = places.depths_R
    if depths_R is None:
        depths_R = torch.arange(len(slots_R), device=slots_R.device) % places.nodes
    rows = {index: table.column(index)[slots_R] for index in range(table.words.shape[1])}
    greedy = rows[TEMPERATURE] == 0.0
    filters = _filters(
        temperature=rows[TEMPERATURE].float().masked_fill(greedy, 1.0),
        top_k=rows[TOP_K].masked_fill(greedy, vocab),
        top_p=rows[TOP_P].masked_fill(greedy, 1.0),
        min_p=rows[MIN_P].float().masked_fill(greedy, 0.0),
        vocab=vocab,
    )
    position_R = places.starts_B.repeat_interleave(places.nodes) + depths_R + rows[SHIFT]
    return RowParams(greedy, filters, keyed_uniform(rows[SEED], position_R, stream))


def sample_rows(logits_RV: Tensor, table: ChoiceTable, places: DrawPlaces, stream: int) -> Tensor:
    params = row_params(table, places, stream, logits_RV.shape[1])
    tokens_R = invert_cdf(kept_weights(logits_RV, params.filters), params.uniforms)
    return torch.where(params.greedy, logits_RV.argmax(-1), tokens_R)


def _filters(
    temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, vocab: int
) -> RowFilters:
    bounded = top_k < vocab
    return RowFilters(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        max_top_k=int(top_k.where(bounded, 0).max()),
        any_top_p=bool((top_p < 1.0).any()),
        any_open_top_p=bool(((top_p < 1.0) & ~bounded).any()),
        any_min_p=bool((min_p > 0.0).any()),
    )
