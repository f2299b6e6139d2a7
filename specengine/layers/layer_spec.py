"""The one description of a decoder layer, and that of a head.

`compute_paths.py` says which paths compute which fields. A path that does not name a field there
refuses every layer in which the field is not at its default. So a new field is denied everywhere
until a path says that it computes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specengine.core.errors import ConfigError, ModelLoadError
from specengine.core.parallel import communicator
from specengine.kernels.delta.types import DeltaShape
from specengine.kernels.experts.types import ACTIVATIONS, SCORES
from specengine.layers.query_temperature import QueryTemperature
from specengine.layers.rotary import config_head_dim


@dataclass(frozen=True)
class Multipliers:
    """Constants by which a family scales parts of a model (Granite, MiniCPM)."""

    embedding: float = 1.0  # of the embedding, where the residual stream starts
    residual: float = 1.0  # of what attention and feed-forward add to the stream
    attention: float | None = None  # of q . k; None is head_dim ** -0.5
    logits: float = 1.0  # positive


@dataclass(frozen=True)
class ExpertsSpec:
    """The experts of a layer, and how a row chooses among them (`layers/experts.py`). Raises
    ModelLoadError for numbers that do not fit together, and names that nothing computes."""

    num_experts: int
    num_chosen: int  # by each row
    intermediate_size: int  # of one expert
    scores: str = "softmax"  # of the router's logits; or "sigmoid"
    normalised: bool = True  # weights of the chosen are divided by their sum
    scaling: float = 1.0  # of the weights, after that
    has_correction: bool = False  # a learnt number an expert is added to scores when choosing
    num_groups: int = 1  # of experts, of equal size
    num_chosen_groups: int = 1  # experts of other groups are not chosen
    group_best: int = 2  # a group's score is the sum of its best two; or 1: of its best
    router_bias: bool = False
    expert_bias: bool = False
    weighs_input: bool = False  # the weight multiplies what an expert reads, not what it gives
    activation: str = "silu"
    activation_alpha: float = 1.702  # these two: of "clamped" (kernels/experts/types.py)
    activation_limit: float = 7.0
    shared_size: int = 0  # intermediate size of what every row runs beside the chosen ones
    shared_gate: bool = False  # whose output a sigmoid of the row scales

    def __post_init__(self) -> None:
        for name, known in (("scores", SCORES), ("activation", ACTIVATIONS)):
            if getattr(self, name) not in known:
                raise ModelLoadError(
                    f"experts with {name} {getattr(self, name)!r} are not supported; known: "
                    + ", ".join(known)
                )
        if self.group_best not in (1, 2):
            raise ModelLoadError(
                f"groups ranked by their best {self.group_best} experts are not supported"
            )
        fits = 0 < self.num_chosen <= self.num_experts // self.num_groups * self.num_chosen_groups
        if not fits or self.num_experts % self.num_groups:
            raise ModelLoadError(
                f"{self.num_chosen} of {self.num_experts} experts cannot be chosen from "
                f"{self.num_chosen_groups} of {self.num_groups} groups"
            )


@dataclass(frozen=True)
class GatedDeltaSpec(DeltaShape):
    """Linear attention by the gated delta rule (`layers/gated_delta.py`). Raises ModelLoadError for
    numbers that do not fit together."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_key_heads or self.conv_width < 2:
            raise ModelLoadError(
                f"linear attention with {self.num_heads} value heads over {self.num_key_heads} key "
                f"heads and a convolution of {self.conv_width} is not supported"
            )


@dataclass(frozen=True)
class LatentSpec:
    """Attention over keys and values that are compressed together (DeepSeek-V2, arXiv:2405.04434,
    section 2.1; `layers/latent_attention.py`). A head of q and k has nope_dim numbers, and
    rope_dim that are rotated."""

    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int  # of a head
    q_rank: int | None = None  # q is compressed too; None: projected at once
    has_pairs: bool = True  # rotary pairs lie side by side, (2 i, 2 i + 1)
    norm_eps: float = 1e-6  # of the norms of what is compressed

    @property
    def kept_dim(self) -> int:
        """Numbers that a token leaves in the KV memory."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True)
class LayerSpec:
    """A decoder layer: its sizes and the epsilon of its norms, which every path computes and which
    have no default; then what it may have beside them. The defaults are Llama's."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float  # of norms of any kind
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # each head of q and k normalised before the rotation (Qwen3)
    sliding_window: int | None = None  # tokens that a query sees, itself included; None is all
    # A query sees the keys from the start of its own chunk of so many positions (Llama 4), in place
    # of a window.
    attention_chunk: int | None = None
    embedding_multiplier: float = 1.0  # these three: Multipliers
    residual_multiplier: float = 1.0
    attention_multiplier: float | None = None
    # Ranks that share each layer, whose sizes above are of all of them together. A path that names
    # it sums over ranks what o_proj and down_proj give.
    tp_size: int = 1
    activation: str = "silu"  # a key of kernels.linear.activation.ACTIVATIONS
    gated_mlp: bool = True  # down(act(gate(x)) * up(x)); else down(act(up(x)))
    norm: str = "rms"  # others: "layer", "layer_bias"
    norm_offset: float = 0.0  # added to the weights of norms (Gemma: 1)
    # Before attention and before feed-forward; others: "after" each (OLMo 2), "around" each
    # (Gemma 2); of both computed side by side "shared": one before both (Cohere), or "parallel":
    # one before each (GPT-NeoX)
    norm_places: str = "before"
    qk_norm_whole: bool = False  # q and k normalised as one vector each, over all heads (OLMo 2)
    # LayerNorm of each head of q and k, without bias, with gains that heads do not share (Cohere)
    qk_norm_by_head: bool = False
    qk_norm_rotated: bool = False  # each head normalised behind the rotation (Hunyuan)
    has_rotary: bool = True
    rotary_kind: str | None = None  # which of the configuration's rope_parameters, by layer type
    rotary_fraction: float = 1.0  # the part of a head that is rotated, from its start
    attention_softcap: float | None = None  # cap * tanh(score / cap) (Gemma 2)
    attention_sinks: bool = False  # a learnt logit a head in the softmax (gpt-oss)
    query_temperature: QueryTemperature | None = None
    experts: ExpertsSpec | None = None  # in place of the one feed-forward
    attention_gate: bool = False  # a sigmoid of the row, beside q, scales what heads give
    gated_delta: GatedDeltaSpec | None = None  # in place of attention
    latent: LatentSpec | None = None  # in place of keys and values of heads

    @classmethod
    def from_config(cls, config: Any, **family: Any) -> LayerSpec:
        """The layer of a Hugging Face configuration; `family`: fields that its model states by
        itself."""
        stated: dict[str, Any] = {
            "activation": config_activation(config),
            "tp_size": communicator().size,
        }
        for name in ("rms_norm_eps", "intermediate_size"):
            if name not in family:
                stated[name] = getattr(config, name)
        stated |= {
            "hidden_size": config.hidden_size,
            "num_heads": config.num_attention_heads,
            "num_kv_heads": getattr(config, "num_key_value_heads", None)
            or config.num_attention_heads,
            "head_dim": config_head_dim(config),
        }
        return cls(**stated | family)

    def check_ranks(self) -> None:
        """Raises ValueError where layers are made for other ranks than the description says: fast
        paths would leave out their sums. Raises ConfigError for what ranks cannot share."""
        if self.tp_size != communicator().size:
            made = communicator().size
            raise ValueError(f"a layer of tp_size {self.tp_size} is made on {made} ranks")
        if self.qk_norm_whole and self.tp_size > 1 and self.norm != "rms":
            raise ConfigError(
                f"--tp-size {self.tp_size}: q and k are normalised over all heads together, by "
                f"{self.norm!r}, which is not split; leave it out"
            )

    @property
    def rotary_table(self) -> tuple[str | None, float, int | None]:
        """Which table the layer rotates by: what RotaryEmbedding.from_config takes."""
        size = None if self.latent is None else self.latent.rope_dim
        return self.rotary_kind, self.rotary_fraction, size

    @property
    def attention_scale(self) -> float:
        scale = self.attention_multiplier
        return self.head_dim**-0.5 if scale is None else scale

    # The residual stream is kept divided by residual_multiplier, so that layers add to it what they
    # compute. A norm gives the same with eps divided by the multiplier's square.

    @property
    def stream_eps(self) -> float:
        """Epsilon of the norms that read the stream. Those of q and k have rms_norm_eps."""
        return self.rms_norm_eps / self.residual_multiplier**2

    def start_stream(self, embedded: Tensor) -> Tensor:
        """Rows of the embedding table [T, H] -> the stream before the first layer."""
        return _times(embedded, self.embedding_multiplier / self.residual_multiplier)

    def true_stream(self, stream: Tensor) -> Tensor:
        """The stream as the family defines it, which drafters read: [T, H] -> [T, H]."""
        return _times(stream, self.residual_multiplier)

    def num_weights(self, input_size: int | None = None) -> int:
        """Weights of a layer's matrices, without experts, which have kernels of their own.
        input_size: of what attention reads, if not hidden_size."""
        matrices = 0 if self.experts is not None else 3 if self.gated_mlp else 2
        feed_forward = matrices * self.hidden_size * self.intermediate_size
        return self._attention_weights(input_size or self.hidden_size) + feed_forward

    def _attention_weights(self, input_size: int) -> int:
        heads, hidden, latent = self.head_dim * self.num_heads, self.hidden_size, self.latent
        if latent is None:
            queries = 2 * heads if self.attention_gate else heads
            qkv = (queries + 2 * self.head_dim * self.num_kv_heads) * input_size
            return qkv + heads * hidden
        q = heads * input_size
        if latent.q_rank is not None:
            q = latent.q_rank * (input_size + heads)
        values = latent.value_dim * self.num_heads
        kv = latent.kept_dim * input_size
        kv += latent.kv_rank * (latent.nope_dim * self.num_heads + values)
        return q + kv + values * hidden


# What configurations call activations -> what kernels.linear.activation calls them.
_ACTIVATIONS = {
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_python": "gelu",
}


def config_activation(config: Any) -> str:
    """The activation of the feed-forward layers, whichever field states it."""
    found = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    return _ACTIVATIONS.get(found or "silu", found or "silu")


@dataclass(frozen=True)
class HeadSpec:
    """What a head may do beside the product. Raises ModelLoadError for a multiplier that would turn
    the order of logits."""

    logits_multiplier: float = 1.0
    logits_softcap: float | None = None  # cap * tanh(logit / cap), of what was multiplied

    def __post_init__(self) -> None:
        if not self.logits_multiplier > 0:
            given = self.logits_multiplier
            raise ModelLoadError(f"logits_multiplier {given}: it must be positive")


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor
