"""The models of EAGLE (Li et al. 2024, arXiv:2401.15077) and EAGLE-3 (2025, arXiv:2503.01840).

Row i is that of position i and takes (feature_i, token_{i+1}); its output is the state that the
next step continues in the feature's place, and that logits of token_{i+2} are read from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from specengine.draft.d2t import target_ids_of
from specengine.draft.eagle.layer import EagleForm, EagleLayer, parameter_name
from specengine.draft.model import DraftModel
from specengine.kernels.linear import few_row
from specengine.layers.embedding import VocabEmbedding
from specengine.layers.linear import Linear, LMHead
from specengine.layers.norm import RMSNorm
from specengine.layers.self_attention import PACKED_MODULES
from specengine.layers.weights import fill_places, weight_places

if TYPE_CHECKING:
    from specengine.core.batch import ForwardBatch

# Tensors that checkpoints carry and drafting does not need: the mask that d2t repeats, parts of the
# target.
_IGNORED = ("t2d", "verifier_")


class EagleModel(DraftModel):
    """EAGLE and EAGLE-2: ``layer(fc(cat(embed(token), feature)))``; the target's head reads the
    state as it reads its own normed one, which is what the feature is. Where a checkpoint has a
    norm before the head (speculators' `layernorms`), the state is what leaves that norm.
    """

    fc: Linear | None  # None of EAGLE-3 alone

    def __init__(self, form: EagleForm) -> None:
        super().__init__()
        self.form = form
        self.config = form.config
        self.num_layers = form.num_layers
        self.vocab_size = form.draft_vocab_size
        ids = form.token_map
        if ids is None and form.has_own_vocabulary:
            ids = torch.arange(form.draft_vocab_size)
        elif ids is not None:
            ids = ids.to(torch.get_default_device())  # as the parameters
        self.register_buffer("target_ids", ids, persistent=False)
        size = form.spec.hidden_size
        self.embed_tokens = (
            VocabEmbedding(form.target_vocab_size, size) if form.has_embed_tokens else None
        )
        self.lm_head = LMHead(size, form.draft_vocab_size) if form.has_lm_head else None
        self.add_layer(form, size)

    def add_layer(self, form: EagleForm, size: int) -> None:
        eps = form.spec.rms_norm_eps
        self.fc = Linear(2 * size, size, form.has_fc_bias)
        self.embed_norm = RMSNorm(size, eps) if form.has_embed_norm else None
        self.output_norm = RMSNorm(size, eps) if form.has_output_norm else None
        norm = RMSNorm(size, eps) if form.has_input_layernorm else None
        self.layers = nn.ModuleList([EagleLayer(form, size, norm)])

    @property
    def layer(self) -> EagleLayer:
        return cast(EagleLayer, self.layers[0])

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features [T, feature_size] as what a row takes in, [T, H]."""
        return features

    def forward(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        """input_ids int64 [T], the token after each row's; batch.features [T, H], fused features or
        the states of the step before -> states [T, H]."""
        assert batch.features is not None
        embedded = self.embed.forward(input_ids)
        if self.embed_norm is not None:
            embedded = self.embed_norm(embedded)
        assert self.fc is not None
        stream = self.fc.forward(torch.cat([embedded, batch.features], dim=-1))
        norm = self.layer.input_layernorm
        attended = stream if norm is None else norm(stream)
        out = self.layer.forward(positions, attended, stream, batch)
        return out if self.output_norm is None else self.output_norm(out)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Fill every parameter. Raises ModelLoadError naming any tensor that is missing, unexpected
        or of the wrong shape, and a d2t that leads out of the target's vocabulary."""
        places = weight_places(self, PACKED_MODULES)
        fill_places(places, self._renamed(weights), "the EAGLE draft", _IGNORED)

    def _renamed(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            if name == "d2t":
                self.set_target_ids(tensor)
            else:
                yield parameter_name(name), self._mapped(parameter_name(name), tensor)

    def _mapped(self, name: str, tensor: Tensor) -> Tensor:
        """The rows of the token map, of a head's tensor."""
        ids = self.form.token_map
        return tensor[ids] if ids is not None and name == "lm_head.weight" else tensor

    def set_target_ids(self, d2t: Tensor) -> None:
        """d2t: int [draft_vocab_size], what to add to a draft id to have the target's."""
        sizes = self.form.draft_vocab_size, self.form.target_vocab_size
        ids = target_ids_of(d2t, *sizes)
        self.target_ids = ids.to(self.layer.self_attn.o_proj.device)


class Eagle3Model(EagleModel):
    """EAGLE-3: ``fuse`` makes one feature of those of several layers; attention reads
    ``cat(norm(embed(token)), norm(feature))`` and the feature itself is the residual stream."""

    def add_layer(self, form: EagleForm, size: int) -> None:
        eps = form.spec.rms_norm_eps
        self.fc = Linear(form.feature_size, size, form.has_fc_bias) if form.has_fc else None
        part = form.feature_size // max(form.num_fc_norms, 1)
        self.fc_norm = nn.ModuleList(RMSNorm(part, eps) for _ in range(form.num_fc_norms))
        self.input_norm = RMSNorm(form.feature_size, eps) if form.has_joint_norm else None
        norms = RMSNorm(size, eps), RMSNorm(size, eps)
        self.layers = nn.ModuleList([EagleLayer(form, 2 * size, *norms)])
        for layer_id in range(1, form.num_layers):
            self.layers.append(EagleLayer(form, size, RMSNorm(size, eps), layer_id=layer_id))
        self.norm = RMSNorm(size, eps)

    def fuse(self, features: Tensor) -> Tensor:
        if self.form.num_fc_norms:
            parts = features.chunk(self.form.num_fc_norms, dim=-1)
            normed = [norm(x.contiguous()) for norm, x in zip(self.fc_norm, parts, strict=True)]
            features = torch.cat(normed, dim=-1)
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc is None:
            return features
        if self.fc.is_plain:
            return few_row.linear(features, self.fc.plain, self.fc.bias)
        return self.fc.forward(features)

    def forward(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        assert batch.features is not None
        first = self.layer
        own_norm, feature_norm = first.input_layernorm, first.hidden_norm
        assert own_norm is not None
        assert feature_norm is not None
        attended = self.embed.joined_norm(input_ids, batch.features, own_norm, feature_norm)
        normed = attended[:, batch.features.shape[1] :]
        residual = normed if self.form.norm_before_residual else batch.features
        stream = first.forward(positions, attended, residual, batch)
        for layer in cast(Iterable[EagleLayer], islice(self.layers, 1, None)):
            assert layer.input_layernorm is not None
            stream = layer.forward(positions, layer.input_layernorm(stream), stream, batch)
        return self.norm(stream) if self.form.norm_output else stream

    @property
    def _last_norm(self) -> RMSNorm | None:
        return None if self.form.norm_output else self.norm
