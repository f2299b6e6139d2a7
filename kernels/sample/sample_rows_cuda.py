"""Tokens and weights from logits in CUDA C++ (cuda/sample_rows.cu): a cluster a row, which it reads
once."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from specengine.kernels.cuda.program import compiled
from specengine.kernels.sample.row_cluster import BLOCKS, ClusterForm
from specengine.kernels.sample.types import ChoiceTable, DrawPlaces

_SOURCE = Path(__file__).parents[1] / "cuda" / "sample_rows.cu"


def sample_rows(logits_RV: Tensor, table: ChoiceTable, places: DrawPlaces, stream: int) -> Tensor:
    return _launch(logits_RV, table, places, stream, weighs=False)


def weigh_rows(logits_RV: Tensor, table: ChoiceTable, places: DrawPlaces, stream: int) -> Tensor:
    return _launch(logits_RV, table, places, stream, weighs=True)


def _launch(
    logits_RV: Tensor, table: ChoiceTable, places: DrawPlaces, stream: int, weighs: bool
) -> Tensor:
    rows, vocab = logits_RV.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    form, depths = ClusterForm.of(vocab), places.depths_R
    asked = ("HAS_DEPTHS", int(depths is not None)), ("STREAM", stream), ("WEIGHS", int(weighs))
    defines = (*form.defines, *asked)
    index = logits_RV.device.index or 0
    kernel = compiled(_SOURCE, "sample_rows", defines, form.shared_bytes, index)
    kernel.launch(
        (BLOCKS, rows, 1),
        form.threads,
        form.shared_bytes,
        (
            logits_RV,
            logits_RV,
            table.words,
            places.slots_B,
            places.starts_B,
            depths,
            out,
            vocab,
            places.nodes,
            logits_RV.stride(0),
            logits_RV.stride(0),
            *table.words.stride(),
        ),
    )
    return out
