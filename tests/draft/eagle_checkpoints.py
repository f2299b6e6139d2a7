"""EAGLE and DFlash drafts for the suite's small models, written as their trainers write them:
SGLang's layout of EAGLE-3, speculators' layout, the original EAGLE's, and z-lab's of DFlash."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]

# 8 heads of 16 over 4 KV heads: not the target's shape.
HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 8, 4, 16, 80
FEATURE_LAYERS = (0, 1, 2)


def config_of(target: Path, **extra: Any) -> dict[str, Any]:
    whole = json.loads((target / "config.json").read_text())
    of_target = whole.get("text_config", whole)
    return {
        "model_type": "llama",
        "hidden_size": of_target["hidden_size"],
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 1,
        "vocab_size": of_target["vocab_size"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "max_position_embeddings": 32,  # less than the target's: drafts are trained on short texts
        "hidden_act": "silu",
        **extra,
    }


def layer_tensors(prefix: str, size: int, input_size: int) -> Tensors:
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, input_size),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, input_size),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, input_size),
        "self_attn.o_proj": (size, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INTERMEDIATE, size),
        "mlp.up_proj": (INTERMEDIATE, size),
        "mlp.down_proj": (size, INTERMEDIATE),
        "post_attention_layernorm": (size,),
    }
    return {f"{prefix}.{name}.weight": weight(*shape) for name, shape in shapes.items()}


def weight(*shape: int) -> Tensor:
    """The weight of a matrix, or of a norm."""
    return 1 + 0.2 * torch.randn(shape) if len(shape) == 1 else 0.1 * torch.randn(shape)


def save(folder: Path, tensors: Tensors, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: one.contiguous() for name, one in tensors.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def eagle3(
    folder: Path, target: Path, *, draft_vocab: int = 100, speculators: bool = False, **options: Any
) -> Path:
    """A random EAGLE-3 draft. options: fc_norm, norm_before_fc, norm_before_residual, norm_output,
    embed (its own embedding), seed, layer (keys of the layer's configuration)."""
    torch.manual_seed(options.pop("seed", 1))
    config = config_of(target, **options.pop("layer", {}))
    size, vocab = config["hidden_size"], config["vocab_size"]
    layer = "layers.0" if speculators else "midlayer"
    tensors = layer_tensors(layer, size, 2 * size)
    tensors |= {
        f"{layer}.input_layernorm.weight": weight(size),
        f"{layer}.hidden_norm.weight": weight(size),
        "fc.weight": weight(size, 3 * size),
        "norm.weight": weight(size),
        "lm_head.weight": weight(draft_vocab, size),
    }
    for number in range(1, config["num_hidden_layers"]):
        tensors |= layer_tensors(f"layers.{number}", size, size)
        tensors[f"layers.{number}.input_layernorm.weight"] = weight(size)
    if options.pop("embed", speculators):
        tensors["embed_tokens.weight"] = weight(vocab, size)
    if options.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": weight(size) for i in range(3)}
    if options.get("norm_before_fc"):
        tensors["input_norm.weight"] = weight(3 * size)
    if draft_vocab != vocab:
        ids = torch.randperm(vocab)[:draft_vocab].sort().values
        tensors["d2t"] = ids - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
    return save(folder, tensors, _eagle3_config(config, draft_vocab, speculators, options))


def _eagle3_config(
    layer: dict[str, Any], draft_vocab: int, speculators: bool, options: dict[str, Any]
) -> dict[str, Any]:
    if speculators:
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": draft_vocab,
            "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in FEATURE_LAYERS],
            "transformer_layer_config": layer,
            **options,
        }
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": draft_vocab,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(FEATURE_LAYERS)},
        **layer,
        **options,
    }


def eagle(folder: Path, target: Path, *, input_norm: bool = False, seed: int = 1) -> Path:
    """A random draft of the original EAGLE's form."""
    torch.manual_seed(seed)
    config = config_of(target, architectures=["LlamaForCausalLM"], bias=True)
    size = config["hidden_size"]
    tensors = layer_tensors("layers.0", size, size)
    tensors |= {"fc.weight": weight(size, 2 * size), "fc.bias": weight(size)}
    if input_norm:
        tensors["layers.0.input_layernorm.weight"] = weight(size)
    return save(folder, tensors, config)


def dflash(folder: Path, target: Path) -> Path:
    """A random DFlash draft of two layers, whose blocks are 4 tokens."""
    torch.manual_seed(1)
    own = {"target_layer_ids": list(FEATURE_LAYERS), "mask_token_id": 299}
    kind = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2}
    config = config_of(target, **kind, block_size=4, dflash_config=own)
    size = config["hidden_size"]
    tensors = {"fc.weight": weight(size, len(FEATURE_LAYERS) * size)}
    tensors |= {f"{name}.weight": weight(size) for name in ("hidden_norm", "norm")}
    for layer in ("layers.0", "layers.1"):
        tensors |= layer_tensors(layer, size, size)
        tensors[f"{layer}.input_layernorm.weight"] = weight(size)
        tensors |= {f"{layer}.self_attn.{one}_norm.weight": weight(HEAD_DIM) for one in "qk"}
    return save(folder, tensors, config)


def eagle3_of_last_state(folder: Path, target: Path) -> Path:
    """As ModelOpt writes drafts of EAGLE-3 that read the target's last state: without fc."""
    folder = eagle3(folder, target, embed=True)
    config = json.loads((folder / "config.json").read_text())
    config["eagle_config"] = {
        "use_aux_hidden_state": False,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
    }
    tensors = load_file(folder / "model.safetensors")
    del tensors["fc.weight"]
    return save(folder, tensors, config)


def speculators_eagle(folder: Path, target: Path, *, layernorms: bool, bias: bool) -> Path:
    """A random draft of speculators' EAGLE, which HASS's drafts are converted to as well."""
    torch.manual_seed(3)
    layer = config_of(target)
    size = layer["hidden_size"]
    tensors = layer_tensors("transformer", size, size)
    tensors["fusion_fc.weight"] = weight(size, 2 * size)
    if bias:
        tensors["fusion_fc.bias"] = weight(size)
    if layernorms:
        names = ("embedding_layernorm", "transformer.input_layernorm", "pre_lm_head_layernorm")
        tensors |= {f"{name}.weight": weight(size) for name in names}
    config = {
        "architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
        "speculators_model_type": "eagle",
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "layernorms": layernorms,
        "fusion_bias": bias,
        "transformer_layer_config": layer,
    }
    return save(folder, tensors, config)


def almost_bigram(folder: Path, target: Path, scale: float) -> Path:
    """A Llama whose layers hardly add anything: it says what its embedding of the last token
    suggests, for sure with scale 0 and mostly with a small one."""
    shutil.copytree(target, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if "o_proj" in name or "down_proj" in name:
            tensors[name] *= scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def oracle_eagle(folder: Path, target: Path, noise: float = 0.0) -> Path:
    """An EAGLE draft that knows bigrams: its state is the embedding of the token it is given. Noise
    makes every row depend on all rows before it."""
    torch.manual_seed(2)
    config = config_of(target)
    size = config["hidden_size"]
    tensors = {
        name: one if one.dim() == 1 else noise * one
        for name, one in layer_tensors("layers.0", size, size).items()
    }
    tensors["fc.weight"] = torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1)
    return save(folder, tensors, config)


def oracle_eagle3(
    folder: Path, target: Path, draft_vocab: int | None = None, focus: float = 200.0
) -> Path:
    """An EAGLE-3 draft that knows bigrams: biases make attention look at its own row, whose
    embedding it passes on. draft_vocab: the first so many tokens; None is all, without d2t. focus:
    how much; with 20 the rows before it show."""
    of_target = load_file(target / "model.safetensors")
    config = config_of(
        target,
        num_attention_heads=4,
        num_key_value_heads=4,
        norm_before_residual=True,
        eagle_config={"eagle_aux_hidden_state_layer_ids": list(FEATURE_LAYERS)},
        **({} if draft_vocab is None else {"draft_vocab_size": draft_vocab}),
    )
    size = config["hidden_size"]
    assert size == 4 * HEAD_DIM
    zeros, eye = torch.zeros(size, size), torch.eye(size)
    tensors = {
        "midlayer.self_attn.q_proj.weight": torch.cat([zeros, zeros], dim=1),
        "midlayer.self_attn.k_proj.weight": torch.cat([zeros, zeros], dim=1),
        "midlayer.self_attn.v_proj.weight": torch.cat([eye, zeros], dim=1),
        "midlayer.self_attn.q_proj.bias": torch.full((size,), focus),
        "midlayer.self_attn.k_proj.bias": torch.ones(size),
        "midlayer.self_attn.v_proj.bias": torch.zeros(size),
        "midlayer.self_attn.o_proj.weight": eye,
        "midlayer.mlp.gate_proj.weight": torch.zeros(INTERMEDIATE, size),
        "midlayer.mlp.up_proj.weight": torch.zeros(INTERMEDIATE, size),
        "midlayer.mlp.down_proj.weight": torch.zeros(size, INTERMEDIATE),
        "fc.weight": torch.zeros(size, 3 * size),
        "lm_head.weight": of_target["lm_head.weight"][:draft_vocab],
    }
    for name in ("midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm"):
        tensors[f"{name}.weight"] = torch.ones(size)
    tensors["midlayer.hidden_norm.weight"] = torch.zeros(size)  # nothing is left of the feature
    if draft_vocab is not None:
        tensors["d2t"] = torch.zeros(draft_vocab, dtype=torch.int64)
    return save(folder, tensors, config)


# Algorithm -> a random draft for a target, in a folder.
RANDOM: dict[str, Callable[[Path, Path], Path]] = {
    "EAGLE": eagle,
    "EAGLE3": eagle3,
    "DFLASH": dflash,
}
