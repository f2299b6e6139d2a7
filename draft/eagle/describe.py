"""What form an EAGLE draft has, in words: for people who look at files that do not work."""

from __future__ import annotations

from specengine.draft.eagle.checkpoint import EagleCheckpoint

_LAYER = (
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "post_attention_layernorm.weight",
)
_OPTIONS = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output", "layernorms")


def describe(checkpoint: EagleCheckpoint) -> list[str]:
    """A line a fact, and last what a draft of this form needs and this one lacks."""
    is_eagle3 = checkpoint.has("layers.0.hidden_norm.weight")
    is_nested = "transformer_layer_config" in checkpoint.raw
    count = checkpoint.num_layers
    lines = [
        f"EAGLE{'-3' if is_eagle3 else ''} in the layout of "
        f"{'speculators' if is_nested else 'SGLang'}, {count} layer{'s' * (count > 1)}",
        f"embedding: {checkpoint.owner('embed_tokens.weight')}, head: "
        f"{checkpoint.owner('lm_head.weight')}",
        checkpoint.vocabulary,
    ]
    if is_eagle3:
        lines.append(_features(checkpoint))
    if options := [name for name in _OPTIONS if checkpoint.wants(name)]:
        lines.append(f"options: {', '.join(options)}")
    if missing := missing_tensors(checkpoint, is_eagle3):
        lines.append(f"missing tensors: {', '.join(missing)}")
    return lines


def missing_tensors(checkpoint: EagleCheckpoint, is_eagle3: bool) -> list[str]:
    """Names of the model's parameters; those that the target can lend are not among them."""
    needed = [f"layers.{i}.{name}" for i in range(checkpoint.num_layers) for name in _LAYER]
    needed += [f"layers.{i}.input_layernorm.weight" for i in range(1, checkpoint.num_layers)]
    if is_eagle3:
        needed += ["norm.weight", "layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight"]
    if not (is_eagle3 and checkpoint.reads_last_state):
        needed.append("fc.weight")
    if checkpoint.wants("fusion_bias"):
        needed.append("fc.bias")
    if checkpoint.own_vocab_size is not None:
        needed.append("d2t")
    return [name for name in needed if not checkpoint.has(name)]


def _features(checkpoint: EagleCheckpoint) -> str:
    if checkpoint.reads_last_state:
        return "reads the target's last state, after its final norm"
    layers = checkpoint.named_layers()
    if layers is None:
        return "reads the outputs of layers 1, n / 2 - 1 and n - 4 of the target's n, as none named"
    return f"reads the outputs of layers {list(layers)} of the target, counted from 0"
