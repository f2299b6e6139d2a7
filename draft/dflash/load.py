"""From a DFlash checkpoint to a model that drafts for a loaded target.

Two layouts are known. z-lab's: a flat config.json of a Qwen3, `dflash_config` with
`target_layer_ids`, which count layers by their output from 0, and `mask_token_id`; `block_size`
beside it or within. That of speculators: the layers' configuration nested in
`transformer_layer_config`, `aux_hidden_state_layer_ids` counting by what layers read, and perhaps a
vocabulary, an embedding and a head of the draft's own.
"""

from __future__ import annotations

from typing import Any, cast

from specengine.core.errors import ConfigError, ModelLoadError
from specengine.draft.dflash.model import DFlashForm, DFlashModel
from specengine.draft.eagle.checkpoint import EagleCheckpoint
from specengine.draft.loaded import DraftTarget, LoadedDraft
from specengine.layers.layer_spec import LayerSpec
from specengine.runner.loader.load import load_model
from specengine.runner.loader.model_source import ModelSource
from specengine.runner.memory.kv_shape import kv_shape_of

_ATTENTION = "layers.0.self_attn."


def load_dflash(target: DraftTarget) -> LoadedDraft:
    """Raises ConfigError or ModelLoadError."""
    if target.is_dummy:
        raise ConfigError("--load-format dummy: DFLASH drafts have no random form; leave it out")
    checkpoint = EagleCheckpoint.read(target.draft_model_path())
    layers = feature_layers(checkpoint, target.loaded.model.num_layers)
    form = _form(checkpoint, target, len(layers))
    _check_options(target, form)
    _check(checkpoint, form, target.hidden_size)
    model_config, target_model = target.loaded.config.model, cast(Any, target.loaded.model)
    loaded = load_model(
        ModelSource(checkpoint.name, form.config, directory=checkpoint.directory),
        lambda architectures: lambda config: DFlashModel(form),
        target.dtype,
        target.loaded.device,
        model_config.quantization,
        model_config.random_seed + 1,
        model_config.context_length,
    )
    model = cast(DFlashModel, loaded)
    model.share(target_model.embed, target_model.head)
    kv_shape = kv_shape_of([model], target.dtype)
    return LoadedDraft((model,), kv_shape, layers, form.spec.hidden_size)


def dflash_field(checkpoint: EagleCheckpoint, name: str) -> Any:
    """The field in `dflash_config`, or else beside it; None where neither says it."""
    own = checkpoint.raw.get("dflash_config") or {}
    return own.get(name, checkpoint.raw.get(name))


def feature_layers(checkpoint: EagleCheckpoint, num_layers: int) -> tuple[int, ...]:
    """Target layers, from 0, whose outputs are the features. Raises ModelLoadError where the
    checkpoint does not say it, or names layers that are not there."""
    read = checkpoint.raw.get("aux_hidden_state_layer_ids")
    own = dflash_field(checkpoint, "target_layer_ids")
    if own is not None:
        layers = tuple(own)
    elif read is not None:
        layers = tuple(layer - 1 for layer in read)
    else:
        raise ModelLoadError(
            f"config.json of the draft {checkpoint.name} lacks dflash_config.target_layer_ids; it "
            "is no draft of DFlash, or does not say which layers it reads"
        )
    if sorted(set(layers)) != list(layers) or layers[0] < 0 or layers[-1] >= num_layers:
        raise ModelLoadError(
            f"the draft {checkpoint.name} reads the outputs of layers {list(layers)} of the "
            f"target, counted from 0, which has {num_layers}; they must ascend within 0.."
            f"{num_layers - 1}. Take the draft of this target"
        )
    return layers


def _form(checkpoint: EagleCheckpoint, target: DraftTarget, num_features: int) -> DFlashForm:
    config = checkpoint.layer_config(target.context_length)
    vocab_size, has = target.loaded.model.vocab_size, checkpoint.has
    return DFlashForm(
        config=config,
        spec=LayerSpec.from_config(
            config,
            qkv_bias=has(_ATTENTION + "q_proj.bias"),
            o_bias=has(_ATTENTION + "o_proj.bias"),
            qk_norm=has(_ATTENTION + "q_norm.weight"),
        ),
        num_layers=checkpoint.num_layers,
        feature_size=num_features * target.hidden_size,
        block_size=_needed(checkpoint, "block_size"),
        mask_token_id=_needed(checkpoint, "mask_token_id"),
        target_vocab_size=vocab_size,
        draft_vocab_size=checkpoint.draft_vocab_size(vocab_size),
        has_embed_tokens=has("embed_tokens.weight"),
        has_lm_head=has("lm_head.weight"),
    )


def _needed(checkpoint: EagleCheckpoint, name: str) -> int:
    found = dflash_field(checkpoint, name)
    if found is None:
        raise ModelLoadError(f"config.json of the draft {checkpoint.name} lacks {name}")
    return int(found)


def _check_options(target: DraftTarget, form: DFlashForm) -> None:
    spec = target.spec
    assert spec.num_steps is not None, "resolved"
    if spec.num_steps >= form.block_size:
        raise ConfigError(
            f"--speculative-num-steps {spec.num_steps}: the draft fills blocks of "
            f"{form.block_size} tokens, the root included; ask for {form.block_size - 1} at most"
        )


def _check(checkpoint: EagleCheckpoint, form: DFlashForm, hidden_size: int) -> None:
    size = form.spec.hidden_size
    if any(checkpoint.layer_windows()):
        raise ModelLoadError(
            f"layers of the draft {checkpoint.name} attend within a window, which blocks of DFLASH "
            "do not compute"
        )
    if checkpoint.raw.get("sample_from_anchor"):
        raise ModelLoadError(
            f"sample_from_anchor of the draft {checkpoint.name} is true: rows of its blocks say "
            "the token after their own, which DFLASH does not compute"
        )
    if not 0 <= form.mask_token_id < form.target_vocab_size:
        raise ModelLoadError(
            f"mask_token_id {form.mask_token_id} of the draft {checkpoint.name} is no token of the "
            f"target's vocabulary of {form.target_vocab_size}"
        )
    shape = [size, form.feature_size]
    why = f"it takes the target's features, each of hidden_size {hidden_size}"
    checkpoint.require_shape("fc.weight", shape, why)
    if size != hidden_size and not (form.has_embed_tokens and form.has_lm_head):
        raise ModelLoadError(
            f"hidden_size of the draft {checkpoint.name} is {size} and the target's {hidden_size}; "
            "so it needs embed_tokens.weight and lm_head.weight of its own. Take the draft of this "
            "target"
        )
