"""What a model family declares in its file for those who read its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specengine.core.registry import MODEL_FAMILIES, load_place

if TYPE_CHECKING:
    from torch import Tensor

    from specengine.runner.loader.gguf_file import GgufFile


# Experts of a layer in GGUF files -> their names here (layers/experts.py). gate and up are separate
# or, one below the other, merged.
GGUF_EXPERTS: Mapping[str, str] = {
    "ffn_gate_inp": "mlp.gate",
    **{f"ffn_{one}_exps": f"mlp.experts.*.{one}_proj" for one in ("gate", "up", "down", "gate_up")},
}
# Fields of experts behind dense first layers, where config.json calls them as DeepSeek does.
GGUF_ROUTING: Mapping[str, str] = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace",
}
# The one that every row runs, where checkpoints say `shared_experts`.
GGUF_SHARED_EXPERTS: Mapping[str, str] = {
    f"ffn_{one}_shexp": f"mlp.shared_experts.{one}_proj" for one in ("gate", "up", "down")
}

Tensors = Iterable[tuple[str, "Tensor"]]  # (name, tensor)


@dataclass(frozen=True)
class GgufFormat:
    """How GGUF files hold a family. The family's class has it as `gguf`; it is not inherited.

    architectures: values of general.architecture. model_type: of the equivalent config.json.
    has_rotary_pairs: rows of q and k are stored in rotary pairs (2i, 2i + 1), where the family's
    checkpoints have halves. norm_offset: added to the gains of norms in the file. epsilon: field of
    config.json for the norms' epsilon. tensors: GGUF name in a block -> name in a layer of the
    checkpoint, of what Llama has not, or names otherwise; with its suffix (`attn_sinks.weight`)
    where the checkpoint's has another. A name with `*` is of a tensor of all experts; it matches
    their numbers. metadata: GGUF key without the architecture's prefix -> field of config.json,
    beside those of all families; a file has all of them. optional: the same, None where a file
    lacks one. fields: of config.json, that no single key holds. change: what else is otherwise in
    the file: (checkpoint name, tensor) pairs in, and the file, which has the sizes; the
    checkpoint's pairs out. Columns of a kept matrix stay: beside it goes `column_order`
    (layers/quantization/gguf.py). owns: whether a file of these architectures is of this family,
    where several share one.
    """

    architectures: tuple[str, ...]
    model_type: str
    has_rotary_pairs: bool = False
    norm_offset: float = 0.0
    epsilon: str = "rms_norm_eps"
    tensors: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    optional: Mapping[str, str] = field(default_factory=dict)
    fields: Callable[[GgufFile], dict[str, Any]] = lambda file: {}
    change: Callable[[Tensors, GgufFile], Tensors] = lambda tensors, file: tensors
    owns: Callable[[GgufFile], bool] = lambda file: True


def gguf_formats() -> Iterator[tuple[str, GgufFormat]]:
    """(architecture as config.json names it, format) of each registered family that has one."""
    for architecture, place in MODEL_FAMILIES.items():
        found = vars(load_place(place)).get("gguf")
        if found is not None:
            yield architecture, found


def extended_config(architectures: object) -> tuple[str | None, dict[str, Any]]:
    """The model_type whose configuration a family extends, where transformers has none of its own;
    and the defaults that differ from it. architectures: of config.json, whatever it holds."""
    family = _family_of(architectures)
    stated = {} if family is None else vars(family)
    return stated.get("extends_config"), stated.get("config_defaults", {})


def tensor_names(architectures: object) -> Mapping[str, str]:
    """Parts of tensors' names in a family's checkpoints -> what Llama calls them; empty for no
    family that is known."""
    family = _family_of(architectures)
    return {} if family is None else family.tensor_names


def _family_of(architectures: object) -> Any:
    """The class of the first that is registered; None for none."""
    for name in architectures if isinstance(architectures, list) else []:
        if isinstance(name, str) and name in MODEL_FAMILIES:
            return load_place(MODEL_FAMILIES[name])
    return None
