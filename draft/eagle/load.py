"""From an EAGLE checkpoint to a model that drafts for a loaded target."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from torch import Tensor

from specengine.core.errors import ConfigError, ModelLoadError
from specengine.draft.eagle.checkpoint import EagleCheckpoint
from specengine.draft.eagle.layer import EagleForm
from specengine.draft.eagle.model import Eagle3Model, EagleModel
from specengine.draft.loaded import DraftTarget, LoadedDraft
from specengine.draft.rope import draft_rope
from specengine.draft.token_map import read_token_map
from specengine.layers.layer_spec import LayerSpec
from specengine.runner.loader.load import load_model
from specengine.runner.loader.model_source import ModelSource
from specengine.runner.memory.kv_shape import kv_shape_of

_DUMMY_VOCABULARY = 32_000
_LAYER = "layers.0."
# What a draft of random weights takes over from its target's configuration.
_MEASURES = frozenset(
    {
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "vocab_size",
        "max_position_embeddings",
    }
)


def load_eagle(target: DraftTarget) -> LoadedDraft:
    """EAGLE and EAGLE-2. Raises ConfigError or ModelLoadError."""
    checkpoint = _open(target)
    checkpoint.refuse_several_layers("EAGLE drafts have one layer")
    size = target.hidden_size
    form = _form(checkpoint, target, num_features=1)
    checkpoint.require_shape(
        "fc.weight",
        [size, 2 * size],
        f"it joins an embedding and a state of the target (hidden_size {size})",
    )
    return _load(checkpoint, target, form, EagleModel)


def load_eagle3(target: DraftTarget) -> LoadedDraft:
    """Raises ConfigError or ModelLoadError."""
    checkpoint = _open(target)
    checkpoint.refuse_other_features()
    if not target.is_dummy and not checkpoint.has(_LAYER + "hidden_norm.weight"):
        checkpoint.refuse_several_layers("it has no hidden_norm, and so is no draft of EAGLE-3")
    if checkpoint.reads_last_state:
        form = _form(checkpoint, target, num_features=1)
        shape = [form.spec.hidden_size, form.feature_size]
        why = "eagle_config.use_aux_hidden_state is false, so it reads the target's last state"
        checkpoint.require_shape("fc.weight", shape, why)
        return _load(checkpoint, target, form, Eagle3Model)
    layers = checkpoint.feature_layers(target.loaded.model.num_layers)
    size = target.hidden_size
    form = _form(checkpoint, target, num_features=len(layers))
    checkpoint.require_shape(
        "fc.weight",
        [form.spec.hidden_size, form.feature_size],
        f"it takes the outputs of {len(layers)} target layers {list(layers)} of hidden_size {size}",
    )
    return _load(checkpoint, target, form, Eagle3Model, layers)


def _open(target: DraftTarget) -> EagleCheckpoint:
    """The draft that was named; beside dummy weights its configuration alone, or, where none was
    named, one of the target's own measures."""
    path, config = target.spec.draft_model_path, target.loaded.source.hf_config
    if not target.is_dummy:
        return EagleCheckpoint.read(target.draft_model_path())
    if path is not None:
        return EagleCheckpoint.read(path, with_weights=False)
    raw = {name: value for name, value in config.to_dict().items() if name in _MEASURES}
    raw["rope_parameters"] = draft_rope(config)
    size = min(_DUMMY_VOCABULARY, config.vocab_size)
    return EagleCheckpoint("of random weights", {**raw, "draft_vocab_size": size})


def _form(checkpoint: EagleCheckpoint, target: DraftTarget, num_features: int) -> EagleForm:
    config = checkpoint.layer_config(target.context_length)
    vocab_size = target.loaded.model.vocab_size
    draft_vocab_size = checkpoint.draft_vocab_size(vocab_size)
    size, has = target.hidden_size, checkpoint.has
    token_map = _token_map(checkpoint, target, draft_vocab_size)
    form = EagleForm(
        config=config,
        spec=_spec(config, checkpoint),
        target_vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size if token_map is None else len(token_map),
        token_map=token_map,
        feature_size=num_features * size,
        has_embed_tokens=has("embed_tokens.weight"),
        has_lm_head=has("lm_head.weight") or (target.is_dummy and draft_vocab_size != vocab_size),
        windows=checkpoint.layer_windows(),
        has_fc=not checkpoint.reads_last_state or has("fc.weight"),
        has_fc_bias=checkpoint.wants("fusion_bias", "fc.bias"),
        has_embed_norm=checkpoint.wants("layernorms", "embed_norm.weight"),
        has_output_norm=checkpoint.wants("layernorms", "output_norm.weight"),
        has_input_layernorm=checkpoint.wants("layernorms", _LAYER + "input_layernorm.weight"),
        num_fc_norms=num_features if checkpoint.wants("fc_norm", "fc_norm.0.weight") else 0,
        has_joint_norm=checkpoint.wants("norm_before_fc", "input_norm.weight"),
        norm_before_residual=checkpoint.wants("norm_before_residual"),
        norm_output=checkpoint.wants("norm_output"),
    )
    _check_vocabulary(checkpoint, form, draft_vocab_size, target.is_dummy)
    _check_shared(checkpoint, form, size)
    return form


def _spec(config: Any, checkpoint: EagleCheckpoint) -> LayerSpec:
    def has(name: str) -> bool:
        return checkpoint.has(_LAYER + name)

    return LayerSpec.from_config(
        config,
        qkv_bias=has("self_attn.q_proj.bias"),
        o_bias=has("self_attn.o_proj.bias"),
        mlp_bias=has("mlp.up_proj.bias"),
        qk_norm=has("self_attn.q_norm.weight"),
    )


def _token_map(
    checkpoint: EagleCheckpoint, target: DraftTarget, draft_vocab_size: int
) -> Tensor | None:
    """int64 [D], where one was named."""
    path, vocab_size = target.spec.token_map, target.loaded.model.vocab_size
    if path is None:
        return None
    if draft_vocab_size != vocab_size or checkpoint.has("d2t"):
        raise ConfigError(
            f"--speculative-token-map {path}: the draft {checkpoint.name} has a vocabulary of "
            f"{draft_vocab_size} tokens of its own; leave the map out"
        )
    return read_token_map(Path(path), vocab_size)


def _check_vocabulary(
    checkpoint: EagleCheckpoint, form: EagleForm, draft_vocab_size: int, is_dummy: bool
) -> None:
    """draft_vocab_size: of the checkpoint, whatever a token map leaves of it."""
    vocab_size = form.target_vocab_size
    why = f"the target's vocab_size is {vocab_size} and draft_vocab_size {draft_vocab_size}"
    size = form.spec.hidden_size
    checkpoint.require_shape("lm_head.weight", [draft_vocab_size, size], why)
    checkpoint.require_shape("embed_tokens.weight", [vocab_size, size], why)
    checkpoint.require_shape("d2t", [draft_vocab_size], why)
    checkpoint.require_shape("t2d", [vocab_size], why)
    if draft_vocab_size != vocab_size and not is_dummy and not checkpoint.has("d2t"):
        raise ModelLoadError(
            f"the draft {checkpoint.name} has no tensor d2t, which says what its tokens are to the "
            f"target: {why}"
        )


def _check_shared(checkpoint: EagleCheckpoint, form: EagleForm, hidden_size: int) -> None:
    """The target's embedding and head serve drafts of the target's hidden size only."""
    own = form.spec.hidden_size
    if own != hidden_size and not (form.has_embed_tokens and form.has_lm_head):
        raise ModelLoadError(
            f"hidden_size of the draft {checkpoint.name} is {own} and the target's {hidden_size}; "
            "so it needs embed_tokens.weight and lm_head.weight of its own. Take the draft of this "
            "target"
        )


def _load(
    checkpoint: EagleCheckpoint,
    target: DraftTarget,
    form: EagleForm,
    model_class: type[EagleModel],
    feature_layers: tuple[int, ...] = (),
) -> LoadedDraft:
    model_config, target_model = target.loaded.config.model, cast(Any, target.loaded.model)
    source = ModelSource(
        checkpoint.name, form.config, directory=checkpoint.directory, is_dummy=target.is_dummy
    )
    loaded = load_model(
        source,
        lambda architectures: lambda config: model_class(form),
        target.dtype,
        target.loaded.device,
        model_config.quantization,
        model_config.random_seed + 1,
        model_config.context_length,
    )
    model = cast(EagleModel, loaded)
    model.share(target_model.embed, target_model.head)
    kv_shape = kv_shape_of([model], target.dtype)
    return LoadedDraft((model,), kv_shape, feature_layers, form.spec.hidden_size)
