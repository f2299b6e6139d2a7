"""Chooses a token from each row of logits, as the request that the row belongs to asks for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specengine.kernels import row_cluster, sample_rows_ref
from specengine.kernels.dispatch import Backend, use_triton

NUM_COLUMNS = 6
TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED, SHIFT = range(NUM_COLUMNS)


@dataclass(frozen=True)
class ChoiceTable:
    """How requests want their tokens chosen, a row a request, one word a parameter.

    words: int64 [S, NUM_COLUMNS]. TEMPERATURE (0 is greedy, and nothing else is read then), TOP_P
    (1 where off) and MIN_P (0 where off) are the bits of a float64. TOP_K: the vocabulary's size
    where off. SHIFT: added to a row's position, so that positions may be counted as is convenient.
    """

    words: Tensor

    @classmethod
    def of(cls, num_slots: int, device: torch.device) -> ChoiceTable:
        return cls(torch.zeros(num_slots, NUM_COLUMNS, dtype=torch.int64, device=device))

    def column(self, index: int) -> Tensor:
        """[S], int64 or float64."""
        words = self.words[:, index]
        return words.view(torch.float64) if index in (TEMPERATURE, TOP_P, MIN_P) else words


@dataclass(frozen=True)
class Places:
    """Whose rows they are, and what they decide: as many rows, in a row, for each of B places. Row
    r belongs to slot slots_B[r // nodes], and decides the token at position
    starts_B[r // nodes] + depth + SHIFT of that slot, where depth is depths_R[r], or r % nodes."""

    slots_B: Tensor  # int64
    starts_B: Tensor  # int64
    nodes: int = 1
    depths_R: Tensor | None = None  # int64, contiguous


def sample_rows(
    logits_RV: Tensor,
    table: ChoiceTable,
    places: Places,
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
        from specengine.kernels import sample_rows_cuda

        return sample_rows_cuda.sample_rows(logits_RV, table, places, stream)
    if use_triton(backend, logits_RV):
        from specengine.kernels import sample_rows_triton

        return sample_rows_triton.sample_rows(logits_RV, table, places, stream, in_place)
    return sample_rows_ref.sample_rows(logits_RV, table, places, stream)
