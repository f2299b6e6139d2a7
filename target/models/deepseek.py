"""DeepSeek-V2 (2024, arXiv:2405.04434) and -V3 (arXiv:2412.19437), with latent attention."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from specengine.core.errors import ModelLoadError
from specengine.layers.layer_spec import ExpertsSpec, LatentSpec, LayerSpec, Multipliers
from specengine.layers.rotary import rope_parameters
from specengine.runner.loader.family import GgufFormat
from specengine.runner.loader.known_values import require
from specengine.target.models.deepseek_gguf import DEEPSEEK_V2, DEEPSEEK_V3
from specengine.target.models.llama import LlamaForCausalLM

_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.8,
    "first_k_dense_replace": 1,
}


def latent_layer(config: Any, has_pairs: bool) -> LayerSpec:
    """What the configurations of latent attention state alike. Raises ModelLoadError."""
    if config.attention_bias and config.q_lora_rank is None:
        raise ModelLoadError("attention_bias without q_lora_rank is not supported")
    if getattr(config, "mlp_bias", False):
        raise ModelLoadError("mlp_bias of config.json is true, which is not supported")
    latent = LatentSpec(
        kv_rank=config.kv_lora_rank,
        nope_dim=config.qk_nope_head_dim,
        rope_dim=config.qk_rope_head_dim,
        value_dim=config.v_head_dim,
        q_rank=config.q_lora_rank,
        has_pairs=has_pairs,
    )
    bias = bool(config.attention_bias)
    return LayerSpec.from_config(
        config,
        qkv_bias=bias,
        o_bias=bias,
        head_dim=latent.nope_dim + latent.rope_dim,
        latent=latent,
    )


def latent_scale(config: Any) -> float:
    """The scale of scores. YaRN's mscale_all_dim, squared, is in it: cosines and sines have what is
    left of mscale, and rotate a part of q and k alone."""
    scale: float = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    rope = rope_parameters(config)
    extent, factor = rope.get("mscale_all_dim"), rope.get("factor") or 1.0
    if rope["rope_type"] == "default" or not extent or factor <= 1:
        return scale
    return scale * (0.1 * float(extent) * math.log(factor) + 1.0) ** 2


class DeepseekV2ForCausalLM(LlamaForCausalLM):
    """Latent attention; dense first layers, then experts chosen by softmax, perhaps within groups,
    beside shared ones."""

    gguf: ClassVar[GgufFormat | None] = DEEPSEEK_V2
    tensor_names: ClassVar[dict[str, str]] = {"shared_experts": "shared_expert"}
    small_config: ClassVar[dict[str, Any]] = {
        **_LATENT,
        **_EXPERTS,
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 64,
        },
    }

    @classmethod
    def layer_spec(cls, config: Any) -> LayerSpec:
        return latent_layer(config, has_pairs=True)

    @classmethod
    def multipliers(cls, config: Any) -> Multipliers:
        return Multipliers(attention=latent_scale(config))

    @classmethod
    def experts(cls, config: Any) -> list[ExpertsSpec | None]:
        """Weights of the chosen are not normalised: where norm_topk_prob asks for it, the published
        code and transformers' differ."""
        require(config, scoring_func=("softmax",), norm_topk_prob=(False, None))
        require(config, topk_method=("greedy", "group_limited_greedy"))
        in_groups = config.topk_method == "group_limited_greedy"
        return cls.sparse_layers(
            config,
            normalised=False,
            num_groups=config.n_group if in_groups else 1,
            num_chosen_groups=config.topk_group if in_groups else 1,
            group_best=1,
        )

    @classmethod
    def sparse_layers(cls, config: Any, **routing: Any) -> list[ExpertsSpec | None]:
        """One a layer. routing: what families state differently."""
        spec = ExpertsSpec(
            config.n_routed_experts,
            config.num_experts_per_tok,
            config.moe_intermediate_size,
            scaling=config.routed_scaling_factor,
            shared_size=(config.n_shared_experts or 0) * config.moe_intermediate_size,
            **routing,
        )
        return [spec if is_sparse else None for is_sparse in cls.sparse(config)]

    @classmethod
    def sparse(cls, config: Any) -> list[bool]:
        """Whether each layer has experts."""
        first, every = config.first_k_dense_replace, getattr(config, "moe_layer_freq", 1)
        layers = range(config.num_hidden_layers)
        return [layer >= first and layer % every == 0 for layer in layers]


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """Experts are chosen within groups by sigmoid, with a correction. Kimi-K2 and Moonlight publish
    the same under names of their own."""

    gguf: ClassVar[GgufFormat | None] = DEEPSEEK_V3
    extends_config = "deepseek_v3"
    small_config: ClassVar[dict[str, Any]] = {**_LATENT, **_EXPERTS}

    @classmethod
    def layer_spec(cls, config: Any) -> LayerSpec:
        return latent_layer(config, has_pairs=bool(config.rope_interleave))

    @classmethod
    def experts(cls, config: Any) -> list[ExpertsSpec | None]:
        require(config, scoring_func=("sigmoid",), topk_method=("noaux_tc",))
        return cls.sparse_layers(
            config,
            scores="sigmoid",
            normalised=config.norm_topk_prob,
            has_correction=True,
            num_groups=config.n_group,
            num_chosen_groups=config.topk_group,
        )


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    """GLM-4.7-Flash. Layers with experts are listed."""

    small_config: ClassVar[dict[str, Any]] = {
        **_LATENT,
        **{name: value for name, value in _EXPERTS.items() if name != "first_k_dense_replace"},
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    }

    @classmethod
    def sparse(cls, config: Any) -> list[bool]:
        return [kind == "sparse" for kind in config.mlp_layer_types]
