"""Configurations of common families, on transformers' base class, so that they start fast.

They are optional: of other families, transformers' own classes are taken. Those import a hub of
kernels, PyTorch's compiler, torch.distributed and, if installed, torchvision and scikit-learn,
which takes 8 to 10 seconds; the base class does not. All fields that a model reads are equal (a
test compares them).
"""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

# Annotations are evaluated when a configuration is made: no `from __future__ import annotations`.


class _Family(PreTrainedConfig):  # type: ignore[misc]
    """Fields of all families, with Llama's defaults."""

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None  # as many as num_attention_heads
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2

    def __post_init__(self, **others: Any) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        super().__post_init__(**others)


class _WithHeadDim(_Family):
    head_dim: int | None = None  # hidden_size, divided among the heads

    def __post_init__(self, **others: Any) -> None:
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        super().__post_init__(**others)


@strict
class Llama(_WithHeadDim):
    model_type = "llama"

    attention_bias: bool = False
    mlp_bias: bool = False

    def validate_architecture(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is no multiple of num_attention_heads "
                f"{self.num_attention_heads}"
            )


@strict
class Mistral(_WithHeadDim):
    model_type = "mistral"

    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    sliding_window: int | None = 4096


@strict
class Qwen2(_Family):
    model_type = "qwen2"

    vocab_size: int = 151936
    intermediate_size: int = 22016
    num_key_value_heads: int | None = 32
    max_position_embeddings: int = 32768
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **others: Any) -> None:
        if not self.use_sliding_window:
            self.sliding_window = None
        if self.layer_types is None:
            first = (
                self.num_hidden_layers if self.sliding_window is None else self.max_window_layers
            )
            self.layer_types = [
                "full_attention" if layer < first else "sliding_attention"
                for layer in range(self.num_hidden_layers)
            ]
        super().__post_init__(**others)


@strict
class Qwen3(Qwen2):
    model_type = "qwen3"

    attention_bias: bool = False
    head_dim: int = 128


@strict
class Qwen3Moe(_Family):
    model_type = "qwen3_moe"
    attribute_map: ClassVar[dict[str, str]] = {"num_experts": "num_local_experts"}

    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 6144
    num_hidden_layers: int = 24
    num_key_value_heads: int = 4
    max_position_embeddings: int = 32768
    attention_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    decoder_sparse_step: int = 1
    moe_intermediate_size: int = 768
    num_experts_per_tok: int = 8
    num_experts: int = 128
    norm_topk_prob: bool = False
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001
    mlp_only_layers: list[int] | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **others: Any) -> None:
        if not self.use_sliding_window:
            self.sliding_window = None
        if self.mlp_only_layers is None:
            self.mlp_only_layers = []
        super().__post_init__(**others)


FAMILIES: dict[str, Any] = {
    "llama": Llama,
    "mistral": Mistral,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "qwen3_moe": Qwen3Moe,
}
