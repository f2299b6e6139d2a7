"""Chooses a token from each row of logits, as the request that the row belongs to asks for it."""

from __future__ import annotations

from torch import Tensor

from specengine.kernels.dispatch import Backend, use_triton
from specengine.kernels.sample import row_cluster, sample_rows_ref
from specengine.kernels.sample.types import (
    ChoiceTable,
    DrawPlaces,
)


def sample_rows(
    logits_RV: Tensor,
    table: ChoiceTable,
    places: DrawPlaces,
    stream: int,
    *,
    in_place: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """A token for each row, int64 [R]::

        if temperature == 0: token = argmax(logits)  # the first among equals
        e = exp(logits / temperature - max(logits / temperature))
        weight = floor(e * 2^43)
        e = 0 where e < the k-th largest e
        e = 0 where the weight of all larger e is at least top_p * (weight of the k largest)
        e = 0 where e < min_p
        token = first with weight[0] + ... + weight[token] > floor(u * sum(weight))

    with u = keyed_uniform(seed, position, stream). What is equal to the last e that top-k or top-p
    keeps is kept with it. Sums are those of integers, exact in any order, and exp is a fixed series
    of float32 operations: the same logits give the same token on every device.

    logits_RV: float32, rows contiguous, R = B * nodes, V at most 2^19; in_place: it may be written
    over. Any device; on CUDA Triton, and of few rows on Hopper a cluster of blocks each ("cuda").
    """
    if row_cluster.takes(backend, logits_RV):
        from specengine.kernels.sample import sample_rows_cuda

        return sample_rows_cuda.sample_rows(logits_RV, table, places, stream)
    if use_triton(backend, logits_RV):
        from specengine.kernels.sample import sample_rows_triton

        return sample_rows_triton.sample_rows(logits_RV, table, places, stream, in_place)
    return sample_rows_ref.sample_rows(logits_RV, table, places, stream)
