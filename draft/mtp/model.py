"""One layer that predicts the token after the next, of the shape of the target's last."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specengine.draft.model import DraftModel
from specengine.draft.mtp.form import MtpLayerName
from specengine.kernels.linear.types import Tail
from specengine.layers.compute_paths import (
    COMPILED,
    FEW_ROWS,
    LAYER_TAIL,
    MTP_LAYER,
    log_refusals,
)
from specengine.layers.decoder import DecoderLayer
from specengine.layers.embedding import VocabEmbedding
from specengine.layers.layer_spec import LayerSpec
from specengine.layers.linear import Linear, LMHead
from specengine.layers.norm import Norm, make_norm
from specengine.layers.rotary import RotaryEmbedding
from specengine.layers.self_attention import PACKED_MODULES
from specengine.layers.weights import add_offsets, fill_places, weight_places

if TYPE_CHECKING:
    from specengine.core.batch import ForwardBatch


Weights = Iterable[tuple[str, Tensor]]


class MtpModel(DraftModel):
    """form.py's equation, on a decoder layer of the target's shape.

    kv_layer: the layer of the draft KV pool that it writes.
    """

    feature_layers: tuple[int, ...] = ()
    num_layers = 1
    target_ids = None

    def __init__(
        self,
        config: Any,
        spec: LayerSpec,
        name: MtpLayerName,
        kv_layer: int = 0,
        own_tensors: Callable[[Weights], Weights] = lambda weights: weights,
    ) -> None:
        """config: the target's. own_tensors: from a checkpoint's names to those of DecoderLayer, as
        the target's family has it. Weights are uninitialised until load_weights. Raises
        ModelLoadError for a layer that is described with what a draft does not compute."""
        super().__init__()
        MTP_LAYER.require(spec)
        size, eps = spec.hidden_size, spec.rms_norm_eps
        self.config = config
        self.name = name
        self.vocab_size: int = config.vocab_size
        self.own_tensors = own_tensors
        self.embedding_norm = make_norm(spec, size, eps)
        self.hidden_norm = make_norm(spec, size, eps)
        self.projection = Linear(2 * size, size)
        log_refusals((COMPILED, FEW_ROWS, LAYER_TAIL), [spec], self.projection.device)
        rotary = RotaryEmbedding.from_config(config, *spec.rotary_table)
        self.layer = DecoderLayer(spec, kv_layer, rotary)
        self.final_norm = make_norm(spec, size, eps) if name.form.final_norm else None
        self.embed_tokens = VocabEmbedding(self.vocab_size, size) if name.has_embed_tokens else None
        self.lm_head = LMHead(size, self.vocab_size) if name.has_lm_head else None

    def share_norm(self, norm: Norm) -> None:
        """Use the target's final norm, where the form has none; before it runs, like `share`."""
        self.final_norm = self.final_norm or norm

    def forward(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        """input_ids int64 [T], the token after each row's; batch.features [T, H], the state that
        each row continues -> its own states, [T, H], which both the head and the next step take."""
        assert batch.features is not None
        assert self.final_norm is not None, "share_norm comes first"
        pair = [
            self.embedding_norm(self.embed(input_ids)),
            self.hidden_norm(batch.features),
        ]
        if self.name.form.hidden_first:
            pair.reverse()
        stream = self.projection(torch.cat(pair, dim=-1))
        if self.layer.is_streamed(stream, batch):
            before = Tail(stream, None)
            tail = self.layer.forward_streamed(positions, before, batch, None)
            return self.final_norm.add(tail.stream, None)[0]
        out, residual = self.layer(positions, stream, None, batch)
        return self.final_norm.add(out, residual)[0]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Fill every parameter from a checkpoint, which may hold a target and other layers too.
        Raises ModelLoadError naming any tensor that is missing, unexpected or of the wrong shape.
        """
        places = {
            self.name.tensor(own): place
            for own, place in weight_places(self, PACKED_MODULES).items()
        }
        mine = ((name, tensor) for name, tensor in weights if self.name.owns(name))
        mine_here = self.own_tensors(mine)
        fill_places(places, mine_here, f"the MTP layer of form {self.name.form.name}")
        add_offsets(self)
