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


def joined_features(batch: ForwardBatch) -> Tensor | None:
    """[T, F], the outputs of the batch's feature_layers side by side; None without such layers."""
    return torch.cat(batch.layer_features, dim=-1) if batch.layer_features else None
