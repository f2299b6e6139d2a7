"""What llama.cpp's converter does to Llama 4, ERNIE 4.5, StableLM and GPT-NeoX (gguf_files.py)."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

Fields = dict[str, Any]
Tensors = dict[str, Tensor]
_HEAD_NORM = re.compile(r"(.*_layernorm)\.norms\.(\d+)\.weight")


def llama4(fields: Fields) -> Fields:
    """A window of 0 is written where all layers see all of the text."""
    kinds = set(fields["layer_types"])
    return {
        "feed_forward_length": fields["intermediate_size_mlp"],
        "expert_feed_forward_length": fields["intermediate_size"],
        "interleave_moe_layer_step": fields["interleave_moe_layer_step"],
        "rope.dimension_count": fields["head_dim"],
        **({"attention.sliding_window": 0} if kinds == {"full_attention"} else {}),
    }


def llama4_tensors(found: Tensors, fields: Fields) -> Tensors:
    """The checkpoint's experts are transposed, gate beside up."""
    made = {}
    for name, tensor in found.items():
        start, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj":
            gate, up = tensor.transpose(1, 2).chunk(2, dim=1)
            made |= {f"{start}.gate_proj.weight": gate, f"{start}.up_proj.weight": up}
        elif leaf == "down_proj":
            made[f"{name}.weight"] = tensor.transpose(1, 2)
        else:
            made[name] = tensor
    return made


def ernie(fields: Fields) -> Fields:
    shared = fields["moe_num_shared_experts"]
    width = fields["intermediate_size"] // fields["num_key_value_heads"]
    return {
        "expert_count": fields["moe_num_experts"],
        "expert_used_count": fields["moe_k"],
        "interleave_moe_layer_step": fields["moe_layer_interval"],
        "leading_dense_block_count": fields["moe_layer_start_index"],
        "expert_feed_forward_length": fields["moe_intermediate_size"],
        "expert_shared_count": shared,
        # Whatever the shared experts have.
        **({"expert_shared_feed_forward_length": width} if shared else {}),
    }


def ernie_tensors(found: Tensors, fields: Fields) -> Tensors:
    own, theirs = "e_score_correction_bias", "e_score_correction.bias"
    return {name.replace(own, theirs): tensor for name, tensor in found.items()}


def squeezed_ernie_tensors(found: Tensors, fields: Fields) -> Tensors:
    """Older converters drop the first dimension of one row."""
    made = ernie_tensors(found, fields)
    return {
        name: tensor.view(-1) if name.endswith("correction.bias") else tensor
        for name, tensor in made.items()
    }


def stablelm(fields: Fields) -> Fields:
    return {
        "rope.dimension_count": _rotated(fields),
        "use_parallel_residual": fields["use_parallel_residual"],
    }


def stablelm_tensors(found: Tensors, fields: Fields) -> Tensors:
    """Gains of the heads of q, and of k, as one tensor a layer."""
    made: Tensors = {}
    heads: dict[str, dict[int, Tensor]] = {}
    for name, tensor in found.items():
        one = _HEAD_NORM.fullmatch(name)
        if one is None:
            made[name] = tensor
        else:
            heads.setdefault(one[1], {})[int(one[2])] = tensor
    stacks = {
        f"{name}.weight": torch.stack([each[head] for head in sorted(each)])
        for name, each in heads.items()
    }
    return made | stacks


def gptneox(fields: Fields) -> Fields:
    return stablelm(fields)


def gptneox_tensors(found: Tensors, fields: Fields) -> Tensors:
    """q of all heads, then k, then v; in checkpoints the three of a head stand together."""
    heads = fields["num_attention_heads"]
    made = {}
    for name, tensor in found.items():
        if ".query_key_value." in name:
            parts = tensor.view(heads, 3, -1, *tensor.shape[1:]).transpose(0, 1)
            tensor = parts.reshape(tensor.shape)
        made[name] = tensor
    return made


def _rotated(fields: Fields) -> int:
    head: int = fields["hidden_size"] // fields["num_attention_heads"]
    return int(head * fields["rope_parameters"]["partial_rotary_factor"])
