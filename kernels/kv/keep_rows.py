"""Keeps one new row of each request in a table."""

from __future__ import annotations

from torch import Tensor

from specengine.kernels.dispatch import Backend, use_triton


def keep_rows(
    table: Tensor,
    rows_B: Tensor,
    new_TH: Tensor,
    chosen_B: Tensor,
    *,
    backend: Backend = "auto",
) -> None:
    """``table[rows[b]] = new[b * W + chosen[b]]``, W = T / B.

    table: [num_rows, H]; rows_B: int64 [B], distinct but for 0, which pads and is not written;
    new_TH: [B * W, H] of the table's dtype; chosen_B: int64 [B] in 0..W - 1.
    """
    if use_triton(backend, new_TH):
        from specengine.kernels.kv import keep_rows_triton

        keep_rows_triton.keep_rows(table, rows_B, new_TH, chosen_B)
        return
    kept = new_TH.view(len(rows_B), -1, new_TH.shape[1])
    index = chosen_B[:, None, None].expand(-1, 1, new_TH.shape[1])
    is_real = (rows_B != 0)[:, None]
    table[rows_B] = kept.gather(1, index).squeeze(1).where(is_real, table[0])
