"""config.json of an EAGLE-3 draft in the two layouts, through one neutral form.

Read from speculators 0.9, vLLM's llama_eagle3 and SGLang 0.5's llama_eagle3. What neither names is
refused: a key that is not understood may change what the draft computes.

Layers whose outputs the draft reads: SGLang's ids, in eagle_config, count outputs from 0; those of
speculators and vLLM say whose input it is, one more. vLLM takes the outer ids where there are any,
and else those in eagle_config as if they were its own, one layer too low: so both are written, and
SGLang's layout serves in either engine. norm_before_residual is always written for speculators,
which takes false where it is missing while vLLM takes true; SGLang has no such thing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specengine.core.errors import ModelLoadError

Raw = dict[str, Any]

IDS = "eagle_aux_hidden_state_layer_ids"
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_LAYER_KEYS = frozenset(
    [
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "num_hidden_layers",
        "hidden_act",
        "rms_norm_eps",
        "max_position_embeddings",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "vocab_size",
        "attention_bias",
        "mlp_bias",
        "attention_dropout",
        "initializer_range",
        "use_cache",
        "pretraining_tp",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "torch_dtype",
        "dtype",
        "layer_types",
        "sliding_window",
        "use_sliding_window",
        "max_window_layers",
    ]
)
# They say nothing of what the draft computes.
_SILENT = frozenset(
    [
        "transformers_version",
        "_name_or_path",
        "speculators_version",
        "embed_requires_grad",
        "speculators_config",
        "num_lookahead_tokens",
    ]
)


@dataclass(frozen=True)
class Eagle3Config:
    """layer: the decoder layer's own keys. feature_layers: outputs, counted from 0; None leaves the
    choice to the engine, by the same rule in both layouts."""

    layer: Raw
    draft_vocab_size: int
    feature_layers: tuple[int, ...] | None
    target_hidden_size: int | None = None
    flags: Mapping[str, bool] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()  # keys that go no further

    @property
    def vocab_size(self) -> int:
        return int(self.layer["vocab_size"])


def vllm_ids(layers: Sequence[int]) -> list[int]:
    """vLLM's numbers of layers that are counted by their output from 0."""
    return [layer + 1 for layer in layers]


def is_speculators(raw: Raw) -> bool:
    return "speculators_model_type" in raw or "transformer_layer_config" in raw


def read_config(raw: Raw, name: str) -> Eagle3Config:
    """Read a configuration of either layout. Raises ModelLoadError, naming what is not
    understood."""
    return _read_speculators(raw, name) if is_speculators(raw) else _read_sglang(raw, name)


def sglang_config(config: Eagle3Config, name: str) -> Raw:
    """Raises ModelLoadError for what SGLang has no counterpart of."""
    if config.flags["norm_before_residual"]:
        raise ModelLoadError(
            f"norm_before_residual of the draft {name} is true, which SGLang's layer cannot do; it "
            "would serve the draft wrongly"
        )
    own: Raw = {"use_aux_hidden_state": True}
    if config.feature_layers is not None:
        own[IDS] = list(config.feature_layers)
    raw: Raw = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **config.layer,
        "tie_word_embeddings": False,
        "draft_vocab_size": config.draft_vocab_size,
        "eagle_config": own,
        **{flag: True for flag in _FLAGS[1:] if config.flags[flag]},
    }
    if config.feature_layers is not None:
        raw[IDS] = vllm_ids(config.feature_layers)
    if config.target_hidden_size is not None:
        raw["target_hidden_size"] = config.target_hidden_size
    return raw


def speculators_config(
    config: Eagle3Config, target: str, target_architectures: list[str], num_tokens: int
) -> Raw:
    """target: what vLLM serves the draft with. num_tokens: drafted a round, unless told otherwise.
    Raises ModelLoadError for what speculators has no counterpart of."""
    if config.flags["norm_before_fc"] and config.flags["fc_norm"]:
        raise ModelLoadError("norm_before_fc and fc_norm are both set; speculators takes one")
    layers = config.feature_layers
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        IDS: None if layers is None else vllm_ids(layers),
        **config.flags,
        "tie_word_embeddings": False,
        "transformer_layer_config": {
            "model_type": "llama",
            **config.layer,
            "tie_word_embeddings": False,
        },
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_tokens}],
            "verifier": {"name_or_path": target, "architectures": target_architectures},
        },
    }


def _read_sglang(raw: Raw, name: str) -> Eagle3Config:
    rest, own = dict(raw), dict(raw.get("eagle_config") or {})
    rest.pop("eagle_config", None)
    _expect(rest, name, "architectures", (None, ["LlamaForCausalLMEagle3"]))
    _expect(rest, name, "model_type", (None, "llama"))
    _expect(rest, name, "tie_word_embeddings", (None, False))
    _expect(rest, name, "bias", (None, False))
    _expect(own, name, "use_aux_hidden_state", (None, True), "eagle_config.")
    layers = own.pop(IDS, None)
    beside = rest.pop(IDS, None)
    if beside is not None and beside != vllm_ids(layers or []):
        raise ModelLoadError(
            f"{IDS} of the draft {name} is {beside} beside eagle_config, where vLLM takes it for "
            f"inputs of layers, and {layers} within, where SGLang takes it for outputs from 0; "
            "the former must be one more than the latter"
        )
    flags = {flag: bool(rest.pop(flag, False)) for flag in _FLAGS}
    flags["norm_before_fc"] |= bool(own.pop("norm_before_fc", False))
    _expect(rest, name, "num_aux_hidden_states", (None, 3 if layers is None else len(layers)))
    _refuse_rest(own, name, "eagle_config.")
    return _config(rest, name, layers, flags, rest)


def _read_speculators(raw: Raw, name: str) -> Eagle3Config:
    rest = dict(raw)
    layer = dict(rest.pop("transformer_layer_config", {}))
    _expect(rest, name, "speculators_model_type", ("eagle3",))
    _expect(rest, name, "architectures", (None, ["Eagle3Speculator"], ["Eagle3DraftModel"]))
    _expect(rest, name, "model_type", (None, "speculator_model"))
    _expect(layer, name, "model_type", ("llama",), "transformer_layer_config.")
    rest.pop("tie_word_embeddings", None)  # each has its own head, whatever this says
    layer.pop("tie_word_embeddings", None)
    layer.pop("architectures", None)
    if "norm_before_residual" not in rest:
        raise ModelLoadError(
            f"config.json of the draft {name} lacks norm_before_residual, which speculators takes "
            "for false then and vLLM for true; write down which it was trained with"
        )
    flags = {flag: bool(rest.pop(flag, False)) for flag in _FLAGS}
    ids = rest.pop(IDS, None)
    if ids is not None and min(ids) < 1:
        raise ModelLoadError(
            f"{IDS} {ids} of the draft {name} names the input of layer 0, the embedding; SGLang "
            "has no id for it"
        )
    layers = None if ids is None else [layer - 1 for layer in ids]
    return _config(layer, name, layers, flags, rest)


def _config(
    layer: Raw, name: str, layers: list[int] | None, flags: dict[str, bool], rest: Raw
) -> Eagle3Config:
    """layer and rest may be one and the same: then the layer's keys lie among the others."""
    draft_vocab_size = rest.pop("draft_vocab_size", None)
    target_hidden_size = rest.pop("target_hidden_size", None)
    own = {key: value for key, value in layer.items() if key in _LAYER_KEYS}
    for key in ("vocab_size", "hidden_size"):
        if key not in own:
            raise ModelLoadError(f"config.json of the draft {name} lacks {key}")
    left_out = [*_other(layer, name, _LAYER_KEYS)]
    if rest is not layer:
        left_out += _other(rest, name, {"torch_dtype", "dtype"})
    _check_layer(own, name)
    return Eagle3Config(
        layer=own,
        draft_vocab_size=int(draft_vocab_size or own["vocab_size"]),
        feature_layers=None if layers is None else tuple(layers),
        target_hidden_size=target_hidden_size,
        flags=flags,
        left_out=tuple(sorted(set(left_out))),
    )


def _check_layer(layer: Raw, name: str) -> None:
    if layer.get("num_hidden_layers", 1) != 1:
        raise ModelLoadError(
            f"num_hidden_layers of the draft {name} is {layer['num_hidden_layers']}; drafts of one "
            "layer are converted"
        )
    if layer.get("use_sliding_window") or "sliding_attention" in (layer.get("layer_types") or []):
        raise ModelLoadError(
            f"the layer of the draft {name} attends within a sliding window, which has no "
            "counterpart in the other layout"
        )


def _other(raw: Raw, name: str, known: frozenset[str] | set[str]) -> list[str]:
    """Keys that go no further: silent ones, and those that repeat a default of transformers."""
    from transformers import PretrainedConfig

    defaults = PretrainedConfig().to_dict()
    rest = {key: value for key, value in raw.items() if key not in known}
    silent = [
        key
        for key, value in rest.items()
        if key in _SILENT or (key in defaults and defaults[key] == value)
    ]
    _refuse_rest({key: rest[key] for key in rest if key not in silent}, name)
    return [key for key in silent if key not in defaults or key in _SILENT]


def _expect(raw: Raw, name: str, key: str, known: tuple[Any, ...], where: str = "") -> None:
    """Take the key out."""
    value = raw.pop(key, None)
    if value not in known:
        wanted = " or ".join(repr(one) for one in known if one is not None)
        raise ModelLoadError(
            f"{where}{key} of the draft {name} is {value!r} and must be {wanted} to be converted"
        )


def _refuse_rest(rest: Raw, name: str, where: str = "") -> None:
    if rest:
        keys = ", ".join(where + key for key in sorted(rest))
        raise ModelLoadError(
            f"config.json of the draft {name} has {keys}, which the other layout has no "
            "counterpart of, or which is not known here; converting would lose it"
        )
