"""What a draft rotates by: as near to its target as a plain layer comes."""

from __future__ import annotations

from typing import Any

from specengine.layers.rotary import dynamic_base, rope_parameters

# Kinds that are the same for every layer and text; others depend on one or the other.
_KINDS = ("default", "linear", "llama3", "yarn")
# Of parts of a head, of images, and of what the target is served with.
_LEFT_OUT = (
    *("partial_rotary_factor", "mrope_section", "mrope_interleaved"),
    *("context", "made_for", "type"),
)


def draft_rope(target: Any) -> dict[str, Any]:
    """`rope_theta`, `rope_type` and what belongs to the type. target: its Hugging Face
    configuration. Where layers rotate by different tables, that of full attention; of kinds that a
    plain layer has not, the base alone."""
    found = getattr(target, "rope_parameters", None) or {}
    kinds = [name for name, one in found.items() if isinstance(one, dict)]
    kind = "full_attention" if "full_attention" in kinds else next(iter(kinds), None)
    parameters = dict(rope_parameters(target, kind))
    if parameters["rope_type"] not in _KINDS:
        dim = getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads
        is_dynamic = parameters["rope_type"] == "dynamic"
        positions = {"max_positions": target.max_position_embeddings}
        base = dynamic_base(dim, positions | parameters) if is_dynamic else parameters["rope_theta"]
        return {"rope_theta": base, "rope_type": "default"}
    return {name: value for name, value in parameters.items() if name not in _LEFT_OUT}
