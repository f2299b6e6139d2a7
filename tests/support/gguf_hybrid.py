"""What llama.cpp's converter does to Qwen3-Next and Qwen3.5 (gguf_files.py).

Value heads: checkpoints have those of the first key head before those of the second. Files of
Qwen3-Next keep this; files of Qwen3.5 have the first value head of each key head, then the second
ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Fields = dict[str, Any]
Tensors = dict[str, Tensor]
_L, _A = "linear_attention", "full_attention"
# Three value heads a key head: their new order is not its own inverse.
SMALL: Fields = {"layer_types": [_L, _A, _L], "linear_num_value_heads": 6}
SMALL_BY_4: Fields = {
    **SMALL,
    "num_hidden_layers": 5,
    "layer_types": [_L, _L, _L, _A, _L],
}


def sizes(fields: Fields) -> Fields:
    heads = fields["linear_num_value_heads"]
    found = {
        "ssm.conv_kernel": fields["linear_conv_kernel_dim"],
        "ssm.state_size": fields["linear_key_head_dim"],
        "ssm.group_count": fields["linear_num_key_heads"],
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * fields["linear_value_head_dim"],
        "full_attention_interval": fields["layer_types"].index(_A) + 1,
        "rope.dimension_count": int(fields["head_dim"] * 0.25),
    }
    if "moe_intermediate_size" in fields:
        found["expert_feed_forward_length"] = fields["moe_intermediate_size"]
        shared = fields["shared_expert_intermediate_size"]
        found["expert_shared_feed_forward_length"] = shared
    return found


def sizes_3_5(fields: Fields) -> Fields:
    """With the parts of a rotation by time, height and width, which are one in text."""
    return {**sizes(fields), "rope.dimension_sections": [11, 11, 10, 0]}


def sizes_with_mtp(fields: Fields) -> Fields:
    layers = fields["num_hidden_layers"] + 1
    return {**sizes_3_5(fields), "block_count": layers, "nextn_predict_layers": 1}


def next_tensors(found: Tensors, fields: Fields) -> Tensors:
    """q, k and v of all key heads one after the other, and z apart; in_proj_ba as it is."""
    keys, size = fields["linear_num_key_heads"], fields["linear_key_head_dim"]
    group = fields["linear_num_value_heads"] // keys * fields["linear_value_head_dim"]
    made = {}
    for name, tensor in found.items():
        if name.endswith("in_proj_qkvz.weight"):
            heads = tensor.view(keys, 2 * (size + group), -1)
            *qkv, z = (part.flatten(0, 1) for part in heads.split([size, size, group, group], 1))
            made[name.replace("qkvz", "qkv")] = torch.cat(qkv)
            made[name.replace("qkvz", "z")] = z
        else:
            made[name] = tensor
    return _changed(made)


def old_next_tensors(found: Tensors, fields: Fields) -> Tensors:
    """Files of the first converter keep in_proj_qkvz (`ssm_in`)."""
    return _changed(found)


def tensors_3_5(found: Tensors, fields: Fields) -> Tensors:
    keys, heads = fields["linear_num_key_heads"], fields["linear_num_value_heads"]
    size, before = fields["linear_value_head_dim"], 2 * keys * fields["linear_key_head_dim"]

    def tiled(tensor: Tensor, of_head: int) -> Tensor:
        """Along the first dimension, of which each head has of_head."""
        shape = keys, heads // keys, of_head, *tensor.shape[1:]
        return tensor.reshape(shape).transpose(0, 1).reshape(tensor.shape)

    made = {}
    for name, tensor in found.items():
        part = name.partition(".linear_attn.")[2].removesuffix(".weight")
        if part in ("in_proj_qkv", "conv1d"):
            tensor = torch.cat([tensor[:before], tiled(tensor[before:], size)])
        elif part == "in_proj_z":
            tensor = tiled(tensor, size)
        elif part in ("in_proj_b", "in_proj_a", "A_log", "dt_bias"):
            tensor = tiled(tensor, 1)
        elif part == "out_proj":
            tensor = tiled(tensor.t(), size).t()
        made[name] = tensor
    return _changed(made)


def tensors_with_mtp(found: Tensors, fields: Fields) -> Tensors:
    extra = f"blk.{fields['num_hidden_layers']}."
    beside = {
        f"{extra}nextn.eh_proj.weight": torch.ones(4, 8),
        f"{extra}attn_q.weight": torch.ones(4, 8),
    }
    return {**tensors_3_5(found, fields), **beside}


def _changed(found: Tensors) -> Tensors:
    """What both families have: gains of norms from 0, -exp(A_log), a convolution of two
    dimensions."""
    made = {}
    for name, tensor in found.items():
        if name.endswith(".A_log"):
            tensor = -torch.exp(tensor)
        elif name.endswith(".dt_bias"):
            name = name.replace(".dt_bias", ".dt_proj.bias")
        elif name.endswith(".conv1d.weight"):
            tensor = tensor.squeeze(1)
        elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            tensor = tensor + 1
        made[name] = tensor
    return made
