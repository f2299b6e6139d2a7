"""How GGUF files hold DeepSeek-V2 and -V3, and what is built alike: one architecture for all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specengine.core.errors import ModelLoadError
from specengine.runner.loader.family import (
    GGUF_EXPERTS,
    GGUF_ROUTING,
    GGUF_SHARED_EXPERTS,
    GgufFormat,
    Tensors,
)
from specengine.runner.loader.gguf_fields import rope_parameters, shortest

if TYPE_CHECKING:
    from specengine.runner.loader.gguf_file import GgufFile

_SIGMOID = 2  # a value of expert_gating_func
_KEY, _VALUE = ".self_attn.k_b_proj.weight", ".self_attn.v_b_proj.weight"
_TENSORS = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    **GGUF_EXPERTS,
    **GGUF_SHARED_EXPERTS,
}
_METADATA = {
    "attention.kv_lora_rank": "kv_lora_rank",
    "rope.dimension_count": "qk_rope_head_dim",
    **GGUF_ROUTING,
}


def is_sigmoid(file: GgufFile) -> bool:
    """Whether experts are chosen by sigmoid, as in DeepSeek-V3."""
    return bool(file.get("{arch}.expert_gating_func") == _SIGMOID)


def _fields(file: GgufFile) -> dict[str, Any]:
    """Sizes of heads in today's files are those before compression (`_mla`); the others are of
    what is kept. Files from before expert_group_count choose among all experts."""
    rotated: int = file.require("{arch}.rope.dimension_count")
    key = file.get("{arch}.attention.key_length_mla") or file.require("{arch}.attention.key_length")
    value = file.get("{arch}.attention.value_length_mla")
    groups: int = file.get("{arch}.expert_group_count", 1)
    return {
        "num_key_value_heads": file.require("{arch}.attention.head_count"),
        "head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value or file.require("{arch}.attention.value_length"),
        "routed_scaling_factor": shortest(file.get("{arch}.expert_weights_scale", 1.0)),
        "norm_topk_prob": bool(file.get("{arch}.expert_weights_norm", False)),
        "n_group": groups,
        "topk_group": file.get("{arch}.expert_group_used_count", 1),
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
        "rope_parameters": _rope(file),
    }


def _rope(file: GgufFile) -> dict[str, Any]:
    """mscale is mscale_all_dim in all published models; the file has a tenth of it."""
    rope = rope_parameters(file)
    rope.pop("partial_rotary_factor", None)
    scale = file.get("{arch}.rope.scaling.yarn_log_multiplier")
    if scale is None:
        return rope
    return {**rope, "mscale": shortest(10 * scale), "mscale_all_dim": shortest(10 * scale)}


def _joined(tensors: Tensors, file: GgufFile) -> Iterator[tuple[str, Tensor]]:
    """What makes keys and values of the compressed vector, [heads, rank, nope_dim] and [heads,
    value_dim, rank] in today's files, as one kv_b_proj. Raises ModelLoadError."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        kind = next((one for one in (_KEY, _VALUE) if name.endswith(one)), None)
        if kind is None:
            yield name, tensor
            continue
        if tensor.dim() != 3:
            raise ModelLoadError(
                f"tensor {name} has shape {list(tensor.shape)}, not one matrix a head: the GGUF "
                "file is of an old form; convert the model anew"
            )
        layer = name.removesuffix(kind)
        parts = found.setdefault(layer, {})
        parts[kind] = tensor.transpose(1, 2) if kind == _KEY else tensor
        if len(parts) == 2:
            both = torch.cat([parts[_KEY], parts[_VALUE]], dim=1)
            yield f"{layer}.self_attn.kv_b_proj.weight", both.flatten(0, 1)
            del found[layer]
    for layer in found:
        raise ModelLoadError(f"of attn_k_b and attn_v_b of {layer} the GGUF file has one alone")


DEEPSEEK_V2 = GgufFormat(
    ("deepseek2",),
    "deepseek_v2",
    tensors=_TENSORS,
    metadata=_METADATA,
    optional={"attention.q_lora_rank": "q_lora_rank"},
    fields=_fields,
    change=_joined,
    owns=lambda file: not is_sigmoid(file),
)
DEEPSEEK_V3 = GgufFormat(
    ("deepseek2",),
    "deepseek_v3",
    tensors=_TENSORS,
    metadata=_METADATA,
    optional={"attention.q_lora_rank": "q_lora_rank"},
    fields=lambda file: {**_fields(file), "topk_method": "noaux_tc"},
    change=_joined,
    owns=is_sigmoid,
)
