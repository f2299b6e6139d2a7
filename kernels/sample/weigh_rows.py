"""Chooses a token from each row of logits, and leaves the weights that it was chosen by."""

from __future__ import annotations

from torch import Tensor

from specengine.kernels.dispatch import Backend, use_triton
from specengine.kernels.sample import row_cluster, weigh_rows_ref
from specengine.kernels.sample.types import ChoiceTable, DrawPlaces


def weigh_rows(
    logits_RV: Tensor,
    table: ChoiceTable,
    places: DrawPlaces,
    stream: int,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """`sample_rows`, and in the place of each row of logits::

        if temperature == 0: 1 for the token, 0 for all others
        else: e, 0 where sample_rows has cut it, or where its weight is 0

    So rules that weigh the target against a draft read what plain decoding samples from. No bit of
    it depends on other rows, nor on the device.

    logits_RV: float32, rows contiguous, written over -> int64 [R]. Any device; on CUDA as
    sample_rows.
    """
    if row_cluster.takes(backend, logits_RV):
        from specengine.kernels.sample import sample_rows_cuda

        return sample_rows_cuda.weigh_rows(logits_RV, table, places, stream)
    if use_triton(backend, logits_RV):
        from specengine.kernels.sample import sample_rows_triton

        return sample_rows_triton.weigh_rows(logits_RV, table, places, stream)
    return weigh_rows_ref.weigh_rows(logits_RV, table, places, stream)
