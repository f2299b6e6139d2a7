"""What form a DFlash draft has, in words: for people who look at files that do not work."""

from __future__ import annotations

from specengine.draft.dflash.load import dflash_field
from specengine.draft.eagle.checkpoint import EagleCheckpoint

_LAYER = (
    "input_layernorm.weight",
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    "post_attention_layernorm.weight",
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
)
_NEEDED = ("fc.weight", "hidden_norm.weight", "norm.weight")
_INPUTS = "aux_hidden_state_layer_ids"  # of speculators
_FIELDS = ("block_size", "mask_token_id")


def is_dflash(checkpoint: EagleCheckpoint) -> bool:
    """Whether these files say that they are a draft of DFlash, fit to be served or not: by a field
    that only such configurations have, or by a norm over the joined features, which EAGLE lacks."""
    is_configured = any(name in checkpoint.raw for name in ("dflash_config", _INPUTS))
    return is_configured or (checkpoint.has("fc.weight") and checkpoint.has("hidden_norm.weight"))


def named_layers(checkpoint: EagleCheckpoint) -> tuple[int, ...] | None:
    """Those whose outputs it says that it reads, counted from 0, possible or not."""
    own = dflash_field(checkpoint, "target_layer_ids")
    read = checkpoint.raw.get(_INPUTS)
    if own is not None:
        return tuple(own)
    return None if read is None else tuple(layer - 1 for layer in read)


def describe(checkpoint: EagleCheckpoint) -> list[str]:
    """A line a fact, and last what a draft of this form needs and this one lacks."""
    is_nested = "transformer_layer_config" in checkpoint.raw
    count, layers = checkpoint.num_layers, named_layers(checkpoint)
    size, mask = (dflash_field(checkpoint, name) for name in _FIELDS)
    lines = [
        f"DFlash in the layout of {'speculators' if is_nested else 'z-lab'}, "
        f"{count} layer{'s' * (count > 1)}",
        f"blocks of {_known(size)} tokens, the root included; mask token {_known(mask)}",
        f"embedding: {checkpoint.owner('embed_tokens.weight')}, head: "
        f"{checkpoint.owner('lm_head.weight')}",
        checkpoint.vocabulary,
    ]
    if layers is not None:
        lines.append(f"reads the outputs of layers {list(layers)} of the target, counted from 0")
    if fields := missing_fields(checkpoint):
        lines.append(f"config.json lacks: {', '.join(fields)}")
    if missing := missing_tensors(checkpoint):
        lines.append(f"missing tensors: {', '.join(missing)}")
    return lines


def missing_fields(checkpoint: EagleCheckpoint) -> list[str]:
    missing = [name for name in _FIELDS if dflash_field(checkpoint, name) is None]
    return missing + ["target_layer_ids"] * (named_layers(checkpoint) is None)


def missing_tensors(checkpoint: EagleCheckpoint) -> list[str]:
    """Names of the model's parameters; those that the target can lend are not among them."""
    needed = [f"layers.{i}.{name}" for i in range(checkpoint.num_layers) for name in _LAYER]
    needed += _NEEDED
    if checkpoint.own_vocab_size is not None:
        needed.append("d2t")
    return [name for name in needed if not checkpoint.has(name)]


def _known(value: object) -> str:
    return "unknown" if value is None else str(value)
