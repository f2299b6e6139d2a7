"""What llama.cpp's converter does to Llama 4 (gguf_files.py)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

Fields = dict[str, Any]
Tensors = dict[str, Tensor]


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
