"""The model of DFlash (Chen, Liang and Liu 2026, arXiv:2602.06036).

A block of tokens, the root and masks behind it, goes through a few decoder layers at once; every
row of it sees every other one, and, of each position before the root, keys and values that the
layers make of the target's features there. Row i says the token at position root + i.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from specengine.draft.d2t import target_ids_of
from specengine.draft.model import DraftModel
from specengine.layers.decoder import DecoderLayer
from specengine.layers.embedding import VocabEmbedding
from specengine.layers.layer_spec import LayerSpec
from specengine.layers.linear import Linear, LMHead
from specengine.layers.norm import RMSNorm
from specengine.layers.rotary import RotaryEmbedding
from specengine.layers.self_attention import PACKED_MODULES, SelfAttention
from specengine.layers.weights import fill_places, weight_places

if TYPE_CHECKING:
    from specengine.core.batch import ForwardBatch

_IGNORED = ("t2d", "verifier_")


@dataclass(frozen=True)
class DFlashForm:
    """What a checkpoint has. config: of its decoder layers."""

    config: Any
    spec: LayerSpec
    num_layers: int
    feature_size: int  # of the target: hidden size times the layers that are read
    block_size: int  # root included
    mask_token_id: int
    target_vocab_size: int
    draft_vocab_size: int
    has_embed_tokens: bool = False  # else the target's
    has_lm_head: bool = False  # else the target's


class DFlashModel(DraftModel):
    """A core.model.DecoderModel of two forwards. With a tree, whose mask sees everything, it runs
    blocks; without, it writes KV of fused features (`fuse`), batch.features [T, H], and attends
    nothing.
    """

    def __init__(self, form: DFlashForm) -> None:
        super().__init__()
        self.form, self.config = form, form.config
        self.num_layers, self.vocab_size = form.num_layers, form.draft_vocab_size
        has_own_vocabulary = form.draft_vocab_size != form.target_vocab_size
        ids = torch.arange(form.draft_vocab_size) if has_own_vocabulary else None
        self.register_buffer("target_ids", ids, persistent=False)
        spec = form.spec
        size, eps = spec.hidden_size, spec.rms_norm_eps
        self.fc = Linear(form.feature_size, size)
        self.hidden_norm = RMSNorm(size, eps)
        rotary = RotaryEmbedding.from_config(form.config, spec.rotary_kind, spec.rotary_fraction)
        self.layers = nn.ModuleList(
            DecoderLayer(spec, layer_id, rotary) for layer_id in range(form.num_layers)
        )
        self.norm = RMSNorm(size, eps)
        self.embed_tokens = (
            VocabEmbedding(form.target_vocab_size, size) if form.has_embed_tokens else None
        )
        self.lm_head = LMHead(size, form.draft_vocab_size) if form.has_lm_head else None

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features [T, feature_size] as layers take them, [T, H]."""
        out: Tensor = self.hidden_norm(self.fc(features))
        return out

    def forward(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        """int64 [T], int64 [T] -> what the head reads, [T, H]; without a tree, the features."""
        if batch.tree is None:
            return self._write_context(positions, batch)
        hidden, residual = self.embed(input_ids), None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual, batch)
        return self.norm.add(hidden, residual)[0]

    def _write_context(self, positions: Tensor, batch: ForwardBatch) -> Tensor:
        features = batch.features
        assert features is not None, "a forward of context takes in features"
        for layer in cast(Iterable[DecoderLayer], self.layers):
            assert isinstance(layer.self_attn, SelfAttention)
            _store(layer.self_attn, positions, features, batch)
        return features

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Fill every parameter. Raises ModelLoadError naming any tensor that is missing, unexpected
        or of the wrong shape, and a d2t that leads out of the target's vocabulary."""
        places = weight_places(self, PACKED_MODULES)
        fill_places(places, self._without_map(weights), "the DFlash draft", _IGNORED)

    def _without_map(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            if name == "d2t":
                sizes = self.form.draft_vocab_size, self.form.target_vocab_size
                self.target_ids = target_ids_of(tensor, *sizes).to(self.fc.device)
            else:
                yield name.removeprefix("model."), tensor


def _store(
    attention: SelfAttention, positions: Tensor, hidden: Tensor, batch: ForwardBatch
) -> None:
    """Write keys and values of int64 [T], [T, H], and attend nothing."""
    _, k, v = torch.split(attention.qkv_proj(hidden), attention.sizes, dim=-1)
    if attention.k_norm is not None:
        k = attention.k_norm(k.reshape(-1, len(attention.k_norm.weight))).view(k.shape)
    attention.attn.store(positions, k, v, batch)
