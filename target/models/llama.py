"""Llama and the dense decoders that are Llama with other numbers (SmolLM2, Mistral)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from specengine.core.errors import ModelLoadError
from specengine.kernels.head_topk import Shares
from specengine.kernels.layer_tail import Tail
from specengine.layers.decoder import PACKED_MODULES, DecoderLayer, DecoderShape
from specengine.layers.embedding import VocabEmbedding
from specengine.layers.linear import LMHead
from specengine.layers.norm import RMSNorm
from specengine.layers.rotary import RotaryEmbedding
from specengine.layers.weights import load_weights
from specengine.layers.whole_stack import WholeStack

if TYPE_CHECKING:
    from specengine.core.batch import ForwardBatch


class DecoderStack(nn.Module):
    """Embedding, decoder layers and the final norm: `model.*` of a checkpoint."""

    def __init__(self, config: Any, shape: DecoderShape, windows: list[int | None]) -> None:
        super().__init__()
        rotary = RotaryEmbedding.from_config(config)
        self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(shape, layer_id, rotary, window) for layer_id, window in enumerate(windows)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.whole = WholeStack([cast(DecoderLayer, one) for one in self.layers], shape, rotary)

    def forward(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        """int64 [T], int64 [T] -> hidden states after the final norm, [T, H]."""
        hidden: Tensor = self.embed_tokens(input_ids)
        stream = self.whole.run(hidden, batch)
        if stream is not None:
            return self.norm.add(stream, None)[0]
        first = cast(DecoderLayer, self.layers[0])
        if first.is_streamed(hidden, batch):
            return self.norm.add(self._stream(positions, hidden, batch), None)[0]
        residual: Tensor | None = None
        for layer_id, layer in enumerate(self.layers):
            hidden, residual = layer(positions, hidden, residual, batch)
            if layer_id in batch.capture_layers:
                batch.captured.append(self.norm.stream(hidden, residual))
        return self.norm.add(hidden, residual)[0]

    def _stream(self, positions: Tensor, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """The residual stream behind the layers. A layer's last product is the next one's first."""
        tail, layers = Tail(hidden, None), [cast(DecoderLayer, layer) for layer in self.layers]
        for layer_id, layer in enumerate(layers):
            following = layers[layer_id + 1] if layer_id + 1 < len(layers) else None
            tail = layer.forward_streamed(positions, tail, batch, following)
            if layer_id in batch.capture_layers:
                batch.captured.append(tail.stream)
        return tail.stream


class LlamaForCausalLM(nn.Module):
    """A core.interfaces.DecoderModel. A family overrides `decoder_shape` and `sliding_windows`."""

    def __init__(self, config: Any) -> None:
        """config: the Hugging Face configuration. Weights are uninitialised until load_weights."""
        super().__init__()
        if config.hidden_act != "silu":
            raise ModelLoadError(f"hidden_act {config.hidden_act!r} is not supported; only silu is")
        self.config = config
        self.num_layers: int = config.num_hidden_layers
        self.vocab_size: int = config.vocab_size
        self.model = DecoderStack(config, self.decoder_shape(config), self.sliding_windows(config))
        self.lm_head = LMHead(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.tie(self.model.embed_tokens.weight)

    @classmethod
    def decoder_shape(cls, config: Any) -> DecoderShape:
        bias = bool(config.attention_bias)
        mlp_bias = bool(config.mlp_bias)
        return DecoderShape.from_config(config, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)

    @classmethod
    def sliding_windows(cls, config: Any) -> list[int | None]:
        """Tokens that each layer sees, itself included; None is all."""
        return [None] * config.num_hidden_layers

    def forward(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        """int64 [T], int64 [T] -> hidden states after the final norm, [T, H]."""
        out: Tensor = self.model(input_ids, positions, batch)
        return out

    def forward_split_prefill(
        self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch, end_layer: int
    ) -> Tensor | None:
        """Run layers batch.split_index .. end_layer - 1, carrying state on the batch. Returns the
        final hidden states [T, H] once the last layer is done, None before."""
        if batch.split_index == 0:
            batch.hidden_states = self.model.embed_tokens(input_ids)
            batch.residual = None
        hidden, residual = batch.hidden_states, batch.residual
        assert hidden is not None
        for layer in self.model.layers[batch.split_index : end_layer]:
            hidden, residual = layer(positions, hidden, residual, batch)
        batch.hidden_states, batch.residual, batch.split_index = hidden, residual, end_layer
        if end_layer < self.num_layers:
            return None
        return self.model.norm.add(hidden, residual)[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[R, H] -> float32 [R, V]."""
        logits: Tensor = self.lm_head(hidden)
        return logits.float()

    def compute_shares(self, hidden: Tensor, topk: int) -> Shares | None:
        """A draft.tree_rows.TreeModel's, of trees of STANDALONE."""
        return self.lm_head.shares(hidden, topk)

    def best_tokens(self, hidden: Tensor) -> Tensor:
        """[R, H] -> int64 [R], the token of the largest logit."""
        return self.lm_head.best(hidden)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Fill every parameter from (checkpoint name, tensor) pairs. Raises ModelLoadError naming
        any tensor that is missing, unexpected or of the wrong shape."""
        tied = ["lm_head.weight"] if self.config.tie_word_embeddings else []
        load_weights(self, weights, PACKED_MODULES, tied + mtp_prefixes(self.config))


def mtp_prefixes(config: Any) -> list[str]:
    """How the tensors begin that predict further tokens (MTP) and stand beside a target's own in
    its checkpoint. The target leaves them to the drafter."""
    first, count = config.num_hidden_layers, getattr(config, "num_nextn_predict_layers", None) or 0
    extra_layers = [f"model.layers.{layer}." for layer in range(first, first + count)]
    return ["mtp.", "model.mtp_layers.", *extra_layers]


class MistralForCausalLM(LlamaForCausalLM):
    """Llama without biases, perhaps with a sliding window in every layer."""

    @classmethod
    def decoder_shape(cls, config: Any) -> DecoderShape:
        return DecoderShape.from_config(config)

    @classmethod
    def sliding_windows(cls, config: Any) -> list[int | None]:
        return [config.sliding_window] * config.num_hidden_layers
