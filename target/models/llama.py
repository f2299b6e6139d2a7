"""Llama and the dense decoders that are Llama with other numbers (SmolLM2, Mistral)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn

from specengine.core.errors import ModelLoadError
from specengine.core.interruption import interruption_point
from specengine.kernels.linear.types import Tail
from specengine.layers.compute_paths import (
    FAST_HEADS,
    FAST_PATHS,
    LAYER_TAIL,
    SPLIT_PREFILL,
    log_refusals,
)
from specengine.layers.decoder import DecoderLayer
from specengine.layers.embedding import VocabEmbedding
from specengine.layers.head import Head
from specengine.layers.layer_spec import ExpertsSpec, HeadSpec, LayerSpec, Multipliers
from specengine.layers.linear import LMHead
from specengine.layers.module import Module
from specengine.layers.norm import make_norm
from specengine.layers.rotary import RotaryEmbedding
from specengine.layers.row_order import halves_of_pairs, reordered
from specengine.layers.self_attention import PACKED_MODULES
from specengine.layers.weights import load_weights, renamed
from specengine.layers.whole_stack import WholeStack
from specengine.runner.loader.family import GgufFormat
from specengine.runner.loader.gguf_fields import WINDOW, biases, window

if TYPE_CHECKING:
    from specengine.core.batch import ForwardBatch
    from specengine.runner.loader.gguf_file import GgufFile


class DecoderStack(Module):
    """Embedding, decoder layers and the final norm: `model.*` of a checkpoint."""

    def __init__(self, config: Any, specs: Sequence[LayerSpec]) -> None:
        """specs: one a layer."""
        super().__init__()
        self.spec = spec = specs[0]  # what concerns the stream is the same in all layers
        if any(_stream_fields(one) != _stream_fields(spec) for one in specs):
            raise ValueError("layers of one model need one kind of norm and one set of multipliers")
        kinds = dict.fromkeys(one.rotary_table for one in specs)
        tables = {kind: RotaryEmbedding.from_config(config, *kind) for kind in kinds}
        rotaries = [tables[one.rotary_table] for one in specs]
        self.embed_tokens = VocabEmbedding(config.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(spec, layer_id, rotary)
            for layer_id, (spec, rotary) in enumerate(zip(specs, rotaries, strict=True))
        )
        self.norm = make_norm(spec, spec.hidden_size, spec.stream_eps)
        self.whole = WholeStack([cast(DecoderLayer, one) for one in self.layers], rotaries[0])
        self.takes_tail = LAYER_TAIL.takes(*specs)
        self.takes_split = SPLIT_PREFILL.takes(*specs)

    def forward(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        """int64 [T], int64 [T] -> hidden states after the final norm, [T, H]."""
        hidden = self.spec.start_stream(self.embed_tokens.forward(input_ids))
        stream = self.whole.run(hidden, batch)
        if stream is not None:
            return self.norm.add(stream, None)[0]
        first = cast(DecoderLayer, self.layers[0])
        if self.takes_tail and first.is_streamed(hidden, batch):
            return self.norm.add(self._stream(positions, hidden, batch), None)[0]
        return self.norm.add(*self._run(positions, hidden, None, batch, 0, len(self.layers)))[0]

    def forward_split(
        self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch, end_layer: int
    ) -> Tensor | None:
        """Layers batch.split_index .. end_layer - 1, with the state of the batch. Layers that may
        not run apart all run in the last call."""
        is_last = end_layer == len(self.layers)
        if not self.takes_split:
            batch.split_index = end_layer
            return self(input_ids, positions, batch) if is_last else None
        if batch.split_index == 0:
            batch.hidden_states = self.spec.start_stream(self.embed_tokens.forward(input_ids))
            batch.residual = None
        hidden = batch.hidden_states
        assert hidden is not None
        start, residual = batch.split_index, batch.residual
        hidden, residual = self._run(positions, hidden, residual, batch, start, end_layer)
        batch.hidden_states, batch.residual, batch.split_index = hidden, residual, end_layer
        return self.norm.add(hidden, residual)[0] if is_last else None

    def _run(
        self,
        positions: Tensor,
        hidden: Tensor,
        residual: Tensor | None,
        batch: ForwardBatch,
        start: int,
        end: int,
    ) -> tuple[Tensor, Tensor | None]:
        """Layers start .. end - 1, one by one. Of rows beside batch.kept_rows nothing reads what
        the last layer gives but the drafter that names this layer."""
        layers, last = [cast(DecoderLayer, one) for one in self.layers], len(self.layers) - 1
        leaves_out = batch.kept_rows is not None and last not in batch.feature_layers
        for layer_id, layer in islice(enumerate(layers), start, end):
            interruption_point()
            if leaves_out and layer_id == last and layer.leaves_rows_out:
                return layer.forward_last(positions, hidden, residual, batch)
            hidden, residual = layer.forward(positions, hidden, residual, batch)
            if layer_id in batch.feature_layers:
                stream = self.norm.stream(hidden, residual)
                batch.layer_features.append(self.spec.true_stream(stream))
        return hidden, residual

    def _stream(self, positions: Tensor, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """The residual stream behind the layers. A layer's last product is the next one's first."""
        tail, layers = Tail(hidden, None), [cast(DecoderLayer, layer) for layer in self.layers]
        for layer_id, layer in enumerate(layers):
            interruption_point()
            following = layers[layer_id + 1] if layer_id + 1 < len(layers) else None
            tail = layer.forward_streamed(positions, tail, batch, following)
            if layer_id in batch.feature_layers:
                batch.layer_features.append(self.spec.true_stream(tail.stream))
        return tail.stream


def _stream_fields(spec: LayerSpec) -> tuple[object, ...]:
    norm = spec.norm, spec.norm_offset, spec.rms_norm_eps
    return *norm, spec.embedding_multiplier, spec.residual_multiplier


def _gguf_biases(file: GgufFile) -> dict[str, Any]:
    return biases(file, attention_bias="attn_q", mlp_bias="ffn_gate")


class LlamaForCausalLM(Module):
    """A core.model.DecoderModel. A family overrides what differs: `layer_spec`,
    `layer_specs` where layers differ in more than windows and experts, `sliding_windows`,
    `experts`, `multipliers`, `logits_softcap`; and `own_tensors`, where renaming does not do.

    Inherited by a family that extends another, as methods are:

    - tensor_names: parts of tensors' names between dots, as checkpoints have them -> as
      DecoderLayer has them.
    - mtp_form: which of draft.mtp.form.FORMS MTP layers of random weights have, by its name.
    - has_rotary_pairs: checkpoints keep rotary pairs side by side.
    - small_config: fields that show what the family has, of the small model that tests make of it.

    Not inherited, but read from the family's own class body (runner/loader/family.py and
    language_part.py); a family without one has none:

    - gguf: how GGUF files hold the family; without it, or where it is None, none load.
    - extends_config: model_type of the configuration that the family extends, where transformers
      has none of its own.
    - config_defaults: of its config.json's fields, where that configuration has others, or none.
    - language_parts: model_type of nested configurations whose language part this family is, where
      transformers has no causal class of them.
    """

    gguf: ClassVar[GgufFormat | None] = GgufFormat(
        ("llama",),
        "llama",
        has_rotary_pairs=True,
        fields=_gguf_biases,
        owns=lambda file: not window(file) and not file.get("{arch}.expert_count"),
    )
    tensor_names: ClassVar[Mapping[str, str]] = {}
    mtp_form: ClassVar[str] = "DeepSeek-V3"
    has_rotary_pairs: ClassVar[bool] = False
    extends_config: ClassVar[str | None] = None
    config_defaults: ClassVar[Mapping[str, Any]] = {}
    language_parts: ClassVar[tuple[str, ...]] = ()
    small_config: ClassVar[dict[str, Any]] = {}

    def __init__(self, config: Any) -> None:
        """config: the Hugging Face configuration. Weights are uninitialised until load_weights.
        Raises ModelLoadError for a family that states what nothing computes."""
        super().__init__()
        _check_is_causal(config)
        specs = self.layer_specs(config)
        self.config = config
        self.num_layers: int = config.num_hidden_layers
        self.vocab_size: int = config.vocab_size
        self.model = DecoderStack(config, specs)
        self.lm_head = LMHead(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.tie(self.model.embed_tokens.weight)
        head_spec = HeadSpec(self.multipliers(config).logits, self.logits_softcap(config))
        self.head = Head(self.lm_head, head_spec)
        device = self.lm_head.device
        log_refusals(FAST_PATHS, specs, device)
        log_refusals(FAST_HEADS, [self.head.spec], device)

    @classmethod
    def layer_spec(cls, config: Any) -> LayerSpec:
        """Of every layer, but for what sliding_windows, experts and multipliers state."""
        bias = bool(config.attention_bias)
        mlp_bias = bool(config.mlp_bias)
        return LayerSpec.from_config(config, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)

    @classmethod
    def sliding_windows(cls, config: Any) -> list[int | None]:
        """Tokens that each layer sees, itself included; None is all."""
        return [None] * config.num_hidden_layers

    @classmethod
    def experts(cls, config: Any) -> list[ExpertsSpec | None]:
        """The experts of each layer; None is one feed-forward layer."""
        return [None] * config.num_hidden_layers

    @classmethod
    def multipliers(cls, config: Any) -> Multipliers:
        return Multipliers()

    @classmethod
    def logits_softcap(cls, config: Any) -> float | None:
        """Logits are cap * tanh(logit / cap); None is no cap."""
        return None

    @classmethod
    def layer_specs(cls, config: Any) -> list[LayerSpec]:
        """One a layer."""
        factors = cls.multipliers(config)
        spec = replace(
            cls.layer_spec(config),
            embedding_multiplier=factors.embedding,
            residual_multiplier=factors.residual,
            attention_multiplier=factors.attention,
        )
        pairs = zip(cls.sliding_windows(config), cls.experts(config), strict=True)
        return [replace(spec, sliding_window=window, experts=one) for window, one in pairs]

    @classmethod
    def mtp_spec(cls, config: Any) -> LayerSpec:
        """Layers that predict further tokens (MTP): as the last one."""
        return cls.layer_specs(config)[-1]

    @property
    def embed(self) -> VocabEmbedding:
        return self.model.embed_tokens

    def forward(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        """int64 [T], int64 [T] -> hidden states after the final norm, [T, H]."""
        return self.model.forward(input_ids, positions, batch)

    def forward_split_prefill(
        self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch, end_layer: int
    ) -> Tensor | None:
        """Run layers batch.split_index .. end_layer - 1, carrying state on the batch. Returns the
        final hidden states [T, H] once the last layer is done, None before."""
        return self.model.forward_split(input_ids, positions, batch, end_layer)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Fill every parameter from (checkpoint name, tensor) pairs. Raises ModelLoadError naming
        any tensor that is missing, unexpected or of the wrong shape."""
        tied = ["lm_head.weight"] if self.config.tie_word_embeddings else []
        named = self.own_tensors(weights)
        load_weights(self, named, PACKED_MODULES, tied + mtp_prefixes(self.config))

    def own_tensors(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """(checkpoint name, tensor) -> as DecoderStack has them."""
        if self.tensor_names:
            weights = renamed(weights, self.tensor_names)
        if self.has_rotary_pairs:
            weights = reordered(weights, _orders_of_pairs(self.model.spec))
        return weights


def _check_is_causal(config: Any) -> None:
    """Embedding models may have their tokens see those behind them."""
    for field, others in (("is_causal", (False,)), ("use_bidirectional_attention", (True, "all"))):
        if (found := getattr(config, field, None)) in others:
            raise ModelLoadError(f"{field} {found} is not supported: texts are causal")


def _orders_of_pairs(spec: LayerSpec) -> dict[str, Tensor]:
    """Of q and k, apart and merged with v, whose checkpoint keeps rotary pairs side by side."""
    rotary_dim = int(spec.head_dim * spec.rotary_fraction)
    q, k = (
        halves_of_pairs(heads, spec.head_dim, rotary_dim)
        for heads in (spec.num_heads, spec.num_kv_heads)
    )
    v = torch.arange(len(k))
    merged = torch.cat((q, len(q) + k, len(q) + len(k) + v))
    return {"q_proj": q, "k_proj": k, "qkv_proj": merged}


def mtp_prefixes(config: Any) -> list[str]:
    """How the tensors begin that predict further tokens (MTP) and lie beside a target's own in
    its checkpoint. The target leaves them to the drafter."""
    first, count = config.num_hidden_layers, getattr(config, "num_nextn_predict_layers", None) or 0
    extra_layers = [f"model.layers.{layer}." for layer in range(first, first + count)]
    return ["mtp.", "model.mtp_", *extra_layers]


class MistralForCausalLM(LlamaForCausalLM):
    """Llama without biases, perhaps with a sliding window in every layer. Its GGUF files are mostly
    marked as Llama's."""

    gguf: ClassVar[GgufFormat | None] = GgufFormat(
        ("mistral", "llama"),
        "mistral",
        has_rotary_pairs=True,
        optional={WINDOW: "sliding_window"},
        owns=lambda file: not file.get("{arch}.expert_count"),  # and what Llama does not own
    )
    small_config: ClassVar[dict[str, Any]] = {"head_dim": 32, "sliding_window": 48}

    @classmethod
    def layer_spec(cls, config: Any) -> LayerSpec:
        return LayerSpec.from_config(config)

    @classmethod
    def sliding_windows(cls, config: Any) -> list[int | None]:
        return [config.sliding_window] * config.num_hidden_layers
