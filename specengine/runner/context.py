"""What captured forwards need of the runner whose model they run."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from specengine.core.batch import AttentionBackend, ForwardBatch
from specengine.core.model import DecoderModel
from specengine.runner.graph_guard import GraphGuard
from specengine.runner.memory.graph_memory import GraphMemory


class ForwardContext(Protocol):
    """ModelRunner, as its graphs see it."""

    model: DecoderModel
    device: torch.device
    attn_backend: AttentionBackend
    graph_memory: GraphMemory
    compile_max_bs: int  # largest batch size that is captured through torch.compile
    first_keys: Tensor | None  # of its row batches, of a drafter that can pause
    reads_hidden: bool  # something reads hidden states that the head does not

    @property
    def page_table(self) -> Tensor:
        """int32 [rows, context]: KV slots by request row and position."""
        ...

    @property
    def batch_fields(self) -> dict[str, Any]:
        """The fields that every ForwardBatch of this runner shares: pools, attention, features."""
        ...

    def guard_of(self, **owners: object) -> GraphGuard | None:
        """A guard over all tensors that the owners hold, or None where graphs are not guarded."""
        ...


def hidden_of(
    context: ForwardContext, batch: ForwardBatch, rows_T: Tensor, places_T: Tensor
) -> Tensor:
    """The model's hidden states, [T, H], or those of batch.kept_rows alone where the model leaves
    others out. For captures: the slots that the batch writes, those at places_T of rows_T of the
    page table, int64 [T] each, are found on the device, and its features are left anew."""
    batch.out_cache_loc.copy_(context.page_table[rows_T, places_T])
    batch.layer_features.clear()
    return context.model.forward(batch.input_ids, batch.positions, batch)


def joined_features(batch: ForwardBatch) -> Tensor | None:
    """[T, F], the outputs of the batch's feature_layers side by side; None without such layers."""
    return torch.cat(batch.layer_features, dim=-1) if batch.layer_features else None
