"""EAGLE-3 (Li et al. 2025, arXiv:2503.01840) to train: draft/eagle/model.py's equations."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specengine.draft.train.documents import DraftRows
from specengine.draft.train.layer import DraftLayer, DraftNorm
from specengine.draft.train.unroll import Borrowed, LayerInput, UnrolledDraft, borrowed_head
from specengine.layers.layer_spec import LayerSpec

_LEAST_SCALE = 1e-3  # of a feature, relative to the mean of all


class Eagle3Draft(UnrolledDraft):
    """Parameters are called as in SGLang's and SpecForge's checkpoints, but for `fc`, which reads
    features divided by feature_scale, each by its own: residual streams have a few dimensions a
    hundred times larger than the rest, which would otherwise rule every step of the optimiser.
    `checkpoint_fc` is the same map on the features as they are.
    """

    feature_scale: Tensor  # float32 [F]

    def __init__(
        self,
        shape: LayerSpec,
        feature_size: int,
        borrowed: Borrowed,
        own_head: Tensor | None,
        compiles: bool = False,
    ) -> None:
        """own_head: [draft vocabulary, H], where the head starts from; None borrows one."""
        super().__init__(borrowed, compiles)
        size = shape.hidden_size
        self.fc = nn.Linear(feature_size, size, bias=False)
        self.midlayer = DraftLayer(shape, 2 * size, has_hidden_norm=True)
        self.norm = DraftNorm(size, shape.rms_norm_eps)
        self.register_buffer("feature_scale", torch.ones(feature_size), persistent=False)
        self.lm_head: nn.Linear | None = None
        if own_head is not None:
            self.lm_head = nn.Linear(size, len(own_head), bias=False)
            self.lm_head.weight.data.copy_(own_head)

    @property
    def decoder_layer(self) -> DraftLayer:
        return self.midlayer

    def start(self, rows: DraftRows) -> Tensor:
        scaled = (rows.features / self.feature_scale).to(rows.features.dtype)
        out: Tensor = self.fc(scaled)
        return out

    def layer_input(self, state: Tensor, embedded: Tensor) -> LayerInput:
        assert self.midlayer.hidden_norm is not None
        pair = [self.midlayer.input_layernorm(embedded), self.midlayer.hidden_norm(state)]
        return LayerInput(torch.cat(pair, dim=-1), state)

    def next_state(self, stream: Tensor) -> Tensor:
        return stream

    def head_input(self, state: Tensor) -> Tensor:
        out: Tensor = self.norm(state)
        return out

    def head(self) -> Tensor:
        return borrowed_head(self.borrowed) if self.lm_head is None else self.lm_head.weight

    def checkpoint_fc(self) -> Tensor:
        return self.fc.weight.detach() / self.feature_scale

    @torch.no_grad()
    def begin(self, features: Tensor, final_norm: Tensor) -> None:
        """Values to start from. features [T, F]: a sample of the target's. final_norm [H]: the
        weight of the target's norm, before whose head the draft has one too.

        The stream begins as the last of the features does, scaled to 1, with a little of the
        others; the layer adds little to it at first.
        """
        size = len(final_norm)
        # Not the mean: a document's first token may have values a thousand times those of others.
        scale = features.float().abs().median(dim=0).values
        self.feature_scale.copy_(scale.clamp_min(_LEAST_SCALE * float(scale.mean())))
        last = self.feature_scale[-size:]
        nn.init.normal_(self.fc.weight, std=0.1 * self.fc.in_features**-0.5)
        self.fc.weight[:, -size:] += torch.diag(last / last.square().mean().sqrt())
        self.norm.weight.copy_(final_norm)
        self.midlayer.begin()
