"""What can be named, and where each is written: a new one is one file and one line here.

A place is "module:name". Nothing is imported before it is asked for, so flags and checks know
every name at no cost.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

# By the name that config.json gives in `architectures`. The order is that of small models in tests,
# whose random weights depend on it: new ones come last.
MODEL_FAMILIES: dict[str, str] = {
    "LlamaForCausalLM": "specengine.target.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "specengine.target.models.llama:MistralForCausalLM",
    "Qwen2ForCausalLM": "specengine.target.models.qwen:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "specengine.target.models.qwen:Qwen3ForCausalLM",
    "MiMoForCausalLM": "specengine.target.models.mimo:MiMoForCausalLM",
    "Gemma2ForCausalLM": "specengine.target.models.gemma:Gemma2ForCausalLM",
    "Gemma3ForCausalLM": "specengine.target.models.gemma:Gemma3ForCausalLM",
    "Phi3ForCausalLM": "specengine.target.models.phi:Phi3ForCausalLM",
    "GraniteForCausalLM": "specengine.target.models.granite:GraniteForCausalLM",
    "Olmo2ForCausalLM": "specengine.target.models.olmo:Olmo2ForCausalLM",
    "Olmo3ForCausalLM": "specengine.target.models.olmo:Olmo3ForCausalLM",
    "SmolLM3ForCausalLM": "specengine.target.models.smollm:SmolLM3ForCausalLM",
    "GlmForCausalLM": "specengine.target.models.glm:GlmForCausalLM",
    "Glm4ForCausalLM": "specengine.target.models.glm:Glm4ForCausalLM",
    "Cohere2ForCausalLM": "specengine.target.models.cohere:Cohere2ForCausalLM",
    "Exaone4ForCausalLM": "specengine.target.models.exaone:Exaone4ForCausalLM",
    "SeedOssForCausalLM": "specengine.target.models.seed_oss:SeedOssForCausalLM",
    "Starcoder2ForCausalLM": "specengine.target.models.starcoder:Starcoder2ForCausalLM",
    "NemotronForCausalLM": "specengine.target.models.nemotron:NemotronForCausalLM",
    "Qwen3MoeForCausalLM": "specengine.target.models.qwen_moe:Qwen3MoeForCausalLM",
    "MixtralForCausalLM": "specengine.target.models.mixtral:MixtralForCausalLM",
    "Qwen2MoeForCausalLM": "specengine.target.models.qwen_moe:Qwen2MoeForCausalLM",
    "GraniteMoeForCausalLM": "specengine.target.models.granite_moe:GraniteMoeForCausalLM",
    "Glm4MoeForCausalLM": "specengine.target.models.glm_moe:Glm4MoeForCausalLM",
    "Ernie4_5_MoeForCausalLM": "specengine.target.models.ernie_moe:Ernie4_5_MoeForCausalLM",
    "MiniMaxM2ForCausalLM": "specengine.target.models.minimax:MiniMaxM2ForCausalLM",
    "GptOssForCausalLM": "specengine.target.models.gpt_oss:GptOssForCausalLM",
    "Qwen3NextForCausalLM": "specengine.target.models.qwen_hybrid:Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM": "specengine.target.models.qwen_hybrid:Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM": "specengine.target.models.qwen_hybrid:Qwen3_5MoeForCausalLM",
    "Llama4ForCausalLM": "specengine.target.models.llama4:Llama4ForCausalLM",
    "DeepseekV2ForCausalLM": "specengine.target.models.deepseek:DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM": "specengine.target.models.deepseek:DeepseekV3ForCausalLM",
    "Glm4MoeLiteForCausalLM": "specengine.target.models.deepseek:Glm4MoeLiteForCausalLM",
    "StableLmForCausalLM": "specengine.target.models.stablelm:StableLmForCausalLM",
    "GPTNeoXForCausalLM": "specengine.target.models.gpt_neox:GPTNeoXForCausalLM",
    "OlmoeForCausalLM": "specengine.target.models.olmoe:OlmoeForCausalLM",
    "MiniCPMForCausalLM": "specengine.target.models.minicpm:MiniCPMForCausalLM",
    "MiniCPM3ForCausalLM": "specengine.target.models.minicpm:MiniCPM3ForCausalLM",
    "ArceeForCausalLM": "specengine.target.models.arcee:ArceeForCausalLM",
    "Dots1ForCausalLM": "specengine.target.models.dots:Dots1ForCausalLM",
    "HunYuanDenseV1ForCausalLM": "specengine.target.models.hunyuan:HunYuanDenseV1ForCausalLM",
}

# Drafters, by what --speculative-algorithm calls them. Each is made by `from_context`.
DRAFTERS: dict[str, str] = {
    "NGRAM": "specengine.draft.ngram.drafter:NgramDrafter",
    "SUFFIX": "specengine.draft.suffix.drafter:SuffixDrafter",
    "STANDALONE": "specengine.draft.standalone.worker:StandaloneWorker",
    "EAGLE": "specengine.draft.eagle.worker:EagleWorker",
    "EAGLE3": "specengine.draft.eagle.worker:Eagle3Worker",
    "MTP": "specengine.draft.mtp.worker:MtpWorker",
    "DFLASH": "specengine.draft.dflash.worker:DFlashWorker",
}

# Acceptance rules, by what --speculative-verify calls them. Each is made by `from_spec`.
VERIFIERS: dict[str, str] = {
    "match": "specengine.target.verify.match:MatchVerifier",
    "rejection": "specengine.target.verify.rejection:RejectionVerifier",
    "block": "specengine.target.verify.block:BlockVerifier",
    "target_only": "specengine.target.verify.target_only:TargetOnlyVerifier",
    "sibling": "specengine.target.verify.sibling:SiblingVerifier",
    "relaxed": "specengine.target.verify.relaxed:RelaxedVerifier",
}

# Kinds of hardware (core.platform.Platform), by the name of torch.device. --device auto takes the
# first that is there.
PLATFORMS: dict[str, str] = {
    "cuda": "specengine.core.platforms.cuda:CudaPlatform",
    "cpu": "specengine.core.platforms.cpu:CpuPlatform",
}

# Attention backends, by what --attention-backend calls them. Each is made by `for_device`.
ATTENTION_BACKENDS: dict[str, str] = {
    "torch": "specengine.runner.attention.torch_backend:TorchAttentionBackend",
    "triton": "specengine.runner.attention.triton_backend:TritonAttentionBackend",
    "flashinfer": "specengine.runner.attention.flashinfer_backend:FlashInferAttentionBackend",
    "fa": "specengine.runner.attention.flash_backend:FlashAttentionBackend",
}

# Operations at which a forward may be cut into pieces, by what --piecewise-splitting-ops calls
# them.
SPLITTING_OPS: dict[str, str] = {
    "attention": "specengine.layers.split_ops:ATTENTION",
    "latent_attention": "specengine.layers.split_ops:LATENT_ATTENTION",
    "gated_delta": "specengine.layers.split_ops:GATED_DELTA",
    "shared_experts": "specengine.layers.split_ops:SHARED_EXPERTS",
    "all_reduce": "specengine.layers.split_ops:ALL_REDUCE",
}
DEFAULT_SPLITTING_OPS = ("attention", "latent_attention", "gated_delta", "shared_experts")

# What compiles pieces, by what --piecewise-compiler calls it.
PIECEWISE_COMPILERS: dict[str, str] = {
    "eager": "specengine.runner.piecewise.adaptors:Eager",
    "inductor": "specengine.runner.piecewise.adaptors:Inductor",
}

# Quantisations of checkpoints, by `quant_method` of config.json. Each is made by `from_fields`.
QUANTIZATIONS: dict[str, str] = {
    "fp8": "specengine.layers.quantization.fp8:Fp8",
    "compressed-tensors": "specengine.layers.quantization.compressed_tensors:CompressedTensors",
    "modelopt": "specengine.layers.quantization.modelopt:ModelOpt",
    "awq": "specengine.layers.quantization.awq:Awq",
    "gptq": "specengine.layers.quantization.gptq:Gptq",
    "mxfp4": "specengine.layers.quantization.mxfp4:Mxfp4",
}
# Types of weights that linear layers hold, as the methods above give them.
LINEAR_FORMATS: dict[str, str] = {
    "plain": "specengine.kernels.linear.linear_format:PLAIN",
    "fp8": "specengine.kernels.linear.fp8_linear:FORMAT",
    "int": "specengine.kernels.linear.int_linear:FORMAT",
    "mxfp4": "specengine.kernels.linear.mxfp4:FORMAT",
}
# Formats that experts are kept in on a GPU, by the weights that the methods above give.
EXPERT_FORMATS: dict[str, str] = {
    "fp8": "specengine.kernels.experts.formats.fp8:FORMAT",
    "int": "specengine.kernels.experts.formats.int_codes:FORMAT",
    "mxfp4": "specengine.kernels.experts.formats.mxfp4:FORMAT",
}
# What --quantization names beside forms for CPUs: made of floating point while it is loaded, or
# kept from a GGUF file.
LOAD_QUANTIZATIONS: dict[str, str] = {
    "fp8": "specengine.layers.quantization.fp8:Fp8WhileLoading",
    "gguf": "specengine.layers.quantization.gguf:Gguf",
}


def load_place(place: str) -> Any:
    """The object at "module:name"."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
