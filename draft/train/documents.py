"""A packed batch as the unrolled drafter sees it: rows of documents, padded to a steady shape."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from specengine.draft.train.data.packing import PackedBatch

_PAD_DOCUMENT = 128  # tokens of the empty documents that fill a batch up


@dataclass(frozen=True)
class DraftRows:
    """Row i of a document takes (feature_i, token_{i+1}) at step 0. R rows: the batch's tokens, and
    padding behind them that belongs to documents of its own."""

    input_ids: Tensor  # int64 [R]
    positions: Tensor  # int64 [R], from 0 in each document
    first_rows: Tensor  # int64 [R], where each row's document begins
    lens: list[int]  # rows a document, summing up to R
    features: Tensor  # [R, F]
    hidden: Tensor  # [R, H], the target's states after its final norm
    learns: Tensor  # bool [R], whether the token *after* each row's own is an answer to learn

    @property
    def num_rows(self) -> int:
        return len(self.input_ids)

    def tokens_at(self, step: int) -> Tensor:
        """int64 [R], what row i takes in at a step: token i + step + 1. Rows that reach past their
        document's end hold something that must not be read."""
        return self.input_ids.roll(-(step + 1))

    @classmethod
    def of(
        cls, batch: PackedBatch, features: Tensor, hidden: Tensor, num_rows: int | None = None
    ) -> DraftRows:
        """num_rows: to pad to; None pads nothing."""
        pad = 0 if num_rows is None else num_rows - batch.num_tokens
        lens = list(batch.lens)
        lens += [min(_PAD_DOCUMENT, pad - at) for at in range(0, pad, _PAD_DOCUMENT)]
        device = batch.input_ids.device
        lengths = torch.tensor(lens, device=device)
        starts = lengths.cumsum(0) - lengths
        rows = batch.num_tokens + pad
        first_rows = torch.repeat_interleave(starts, lengths, output_size=rows)
        places = torch.arange(rows, device=device)
        asked = F.pad(batch.loss_mask, (0, pad + 1))[1:]
        same = F.pad(first_rows, (0, 1), value=-1)[1:] == first_rows
        return cls(
            input_ids=F.pad(batch.input_ids, (0, pad)),
            positions=places - first_rows,
            first_rows=first_rows,
            lens=lens,
            features=F.pad(features, (0, 0, 0, pad)),
            hidden=F.pad(hidden, (0, 0, 0, pad)),
            learns=asked & same,
        )
