"""A multi-token-prediction layer (DeepSeek-V3, arXiv:2412.19437, section 2.2) to train:
draft/mtp/model.py's equations, and its names for parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specengine.draft.train.documents import DraftRows
from specengine.draft.train.layer import DraftLayer, DraftNorm
from specengine.draft.train.unroll import Borrowed, LayerInput, UnrolledDraft, borrowed_head
from specengine.layers.layer_spec import LayerSpec


class MtpDraft(UnrolledDraft):
    """One layer that serves every step. It borrows embedding and head."""

    def __init__(self, shape: LayerSpec, borrowed: Borrowed, compiles: bool = False) -> None:
        super().__init__(borrowed, compiles)
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.embedding_norm = DraftNorm(size, eps)
        self.hidden_norm = DraftNorm(size, eps)
        self.projection = nn.Linear(2 * size, size, bias=False)
        self.layer = DraftLayer(shape, size, has_hidden_norm=False)
        self.final_norm = DraftNorm(size, eps)

    @property
    def decoder_layer(self) -> DraftLayer:
        return self.layer

    def start(self, rows: DraftRows) -> Tensor:
        return rows.hidden

    def layer_input(self, state: Tensor, embedded: Tensor) -> LayerInput:
        pair = [self.embedding_norm(embedded), self.hidden_norm(state)]
        stream = self.projection(torch.cat(pair, dim=-1))
        return LayerInput(self.layer.input_layernorm(stream), stream)

    def next_state(self, stream: Tensor) -> Tensor:
        out: Tensor = self.final_norm(stream)
        return out

    def head_input(self, state: Tensor) -> Tensor:
        return state

    def head(self) -> Tensor:
        return borrowed_head(self.borrowed)

    @torch.no_grad()
    def begin(self, final_norm: Tensor) -> None:
        """Values to start from: the stream is the target's state, and a little of the embedding.
        final_norm [H]: the weight of the target's norm, whose place the draft's takes."""
        size = len(final_norm)
        nn.init.normal_(self.projection.weight, std=0.1 * (2 * size) ** -0.5)
        self.projection.weight[:, size:] += torch.eye(size)
        self.final_norm.weight.copy_(final_norm)
        self.layer.begin()
