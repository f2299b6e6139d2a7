"""How GGUF files hold Qwen3-Next and Qwen3.5: `ssm_a` is -exp(A_log), and gains of norms are whole,
where checkpoints have them less 1. In files of Qwen3.5 the value heads of a gated delta layer are
in another order: first the first one of each key head, then the second ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specengine.core.errors import ModelLoadError
from specengine.runner.loader.family import GGUF_EXPERTS, GgufFormat, Tensors
from specengine.runner.loader.gguf_fields import num_layers, rope_of_part
from specengine.target.models.qwen_moe import GGUF_GATED_SHARED_EXPERT, gguf_shared_gates

if TYPE_CHECKING:
    from specengine.runner.loader.gguf_file import GgufFile

_GATED_DELTA = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "post_attention_norm": "post_attention_layernorm",
}
_NEXT = {"ssm_ba": "linear_attn.in_proj_ba", "ssm_in": "linear_attn.in_proj_qkvz"}
_3_5 = {"ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a"}
_EXPERTS = {**GGUF_EXPERTS, **GGUF_GATED_SHARED_EXPERT}
_SIZES = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
_SIZES_OF_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_OWN_NORM = ".linear_attn.norm.weight"


def _fields(file: GgufFile) -> dict[str, Any]:
    return {
        "layer_types": _layer_types(file),
        "linear_value_head_dim": _value_dim(file),
        "attention_bias": any(name.endswith(".attn_q.bias") for name in file.tensor_names),
        "rope_parameters": rope_of_part(file),
    }


def _fields_of_next(file: GgufFile) -> dict[str, Any]:
    """Of published models, all layers have experts, whose weights are normalised."""
    sparse = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    return {**_fields(file), **sparse}


def _layer_types(file: GgufFile) -> list[str]:
    """Given one by one, or by the period whose last layer attends."""
    count = num_layers(file)
    told = file.get("{arch}.attention.recurrent_layers")
    if isinstance(told, list):
        recurrent = [bool(one) for one in told][:count]
    else:
        period = file.get("{arch}.full_attention_interval", 4)
        if not isinstance(period, int) or period < 1:
            raise ModelLoadError(f"{file.path}: full_attention_interval {period!r} is no period")
        recurrent = [bool((layer + 1) % period) for layer in range(count)]
    if len(recurrent) != count:
        raise ModelLoadError(
            f"{file.path}: recurrent_layers is of {len(recurrent)} layers, the model has {count}"
        )
    return ["linear_attention" if one else "full_attention" for one in recurrent]


def _value_dim(file: GgufFile) -> int:
    inner, heads = (file.require(f"{{arch}}.ssm.{key}") for key in ("inner_size", "time_step_rank"))
    if heads < 1 or inner % heads:
        raise ModelLoadError(f"{file.path}: {heads} value heads do not divide {inner} (inner_size)")
    return int(inner // heads)


def _as_checkpoint(tensors: Tensors, file: GgufFile) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in gguf_shared_gates(tensors, file):
        if name.endswith("norm.weight") and not name.endswith(_OWN_NORM):
            tensor = tensor - 1
        elif name.endswith(".A_log"):
            if bool((tensor > 0).any()):
                raise ModelLoadError(f"{file.path}: ssm_a of {name} is above 0, no -exp(A_log)")
            tensor = torch.log(-tensor)
        elif name.endswith(".conv1d.weight"):
            tensor = tensor.view(len(tensor), 1, -1)
        yield name, tensor


def _with_value_heads_by_key_head(tensors: Tensors, file: GgufFile) -> Iterator[tuple[str, Tensor]]:
    """In the order of checkpoints: value heads of one key head lie together. Inputs of an
    out_proj that is kept in its blocks are put in order where these are read: `column_order`."""
    keys, heads = (file.require(f"{{arch}}.ssm.{key}") for key in ("group_count", "time_step_rank"))
    size, before = _value_dim(file), 2 * keys * file.require("{arch}.ssm.state_size")
    order = torch.arange(heads).view(-1, keys).t().reshape(-1)
    rows = (order[:, None] * size + torch.arange(size)).view(-1)
    behind_keys = torch.cat([torch.arange(before), before + rows])
    orders: Mapping[str, Tensor] = {
        "in_proj_qkv": behind_keys,
        "conv1d": behind_keys,
        "in_proj_z": rows,
        "in_proj_b": order,
        "in_proj_a": order,
        "A_log": order,
        "dt_bias": order,
        "out_proj": rows,
    }
    for name, tensor in _as_checkpoint(tensors, file):
        _, marker, rest = name.partition(".linear_attn.")
        part, _, leaf = rest.partition(".")
        if not marker or part not in orders:
            yield name, tensor
        elif part != "out_proj":
            yield name, _ordered(name, tensor, orders[part], 0)
        elif leaf == "weight":
            yield name, _ordered(name, tensor, rows, 1)
        else:
            yield name, tensor
            yield f"{name.removesuffix(leaf)}column_order", rows


def _ordered(name: str, tensor: Tensor, order: Tensor, dim: int) -> Tensor:
    if tensor.shape[dim] != len(order):
        raise ModelLoadError(
            f"tensor {name} has shape {list(tensor.shape)}; by the file's sizes of heads "
            f"dimension {dim} is {len(order)}"
        )
    return tensor.index_select(dim, order)


QWEN3_NEXT = GgufFormat(
    ("qwen3next",),
    "qwen3_next",
    tensors={**_GATED_DELTA, **_NEXT, **_EXPERTS},
    metadata={**_SIZES, **_SIZES_OF_EXPERTS},
    fields=_fields_of_next,
    change=_as_checkpoint,
)
QWEN3_5 = GgufFormat(
    ("qwen35",),
    "qwen3_5_text",
    tensors={**_GATED_DELTA, **_3_5},
    metadata=_SIZES,
    fields=_fields,
    change=_with_value_heads_by_key_head,
)
QWEN3_5_MOE = GgufFormat(
    ("qwen35moe",),
    "qwen3_5_moe_text",
    tensors={**_GATED_DELTA, **_3_5, **_EXPERTS},
    metadata={**_SIZES, **_SIZES_OF_EXPERTS},
    fields=_fields,
    change=_with_value_heads_by_key_head,
)
