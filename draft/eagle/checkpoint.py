"""What a directory says about an EAGLE draft: its configuration, and the tensors that it has.

Two layouts are known. SGLang's and SpecForge's: a flat config.json, the layer as `midlayer.*`,
`eagle_config.eagle_aux_hidden_state_layer_ids` counting layers by their output from 0. And that of
speculators: the layer's configuration nested in `transformer_layer_config`, the layer as
`layers.0.*`, and `eagle_aux_hidden_state_layer_ids` beside it counting as vLLM does, where id n is
what layer n reads: the output of layer n - 1. A flat config.json may carry these too, for vLLM. A
wrong set of layers makes every draft useless and shows nowhere else.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from specengine.core.errors import ModelLoadError
from specengine.draft.eagle.layer import parameter_name
from specengine.draft.loaded import draft_directory
from specengine.runner.loader.hf_config import make_config
from specengine.runner.loader.hf_directory import read_tensor_shapes

_IDS = "eagle_aux_hidden_state_layer_ids"
# Options of ModelOpt that change what a draft computes, and the values that are computed here.
_MODELOPT = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "eagle_decoder_type": "llama",
}
# Scales and caps that a target's layers may have, and a draft's have not.
_SCALES: dict[str, tuple[Any, ...]] = {
    "residual_multiplier": (None, 1.0),
    "embedding_multiplier": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "attention_multiplier": (None,),
    "query_pre_attn_scalar": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
}
_LAYER_TYPES = ("full_attention", "sliding_attention")
_NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads")


@dataclass(frozen=True)
class EagleCheckpoint:
    """`shapes`: of the tensors, under the names of the model's parameters. A checkpoint without
    directory is a shape to be filled with random weights."""

    name: str
    raw: dict[str, Any]  # config.json
    directory: Path | None = None
    shapes: dict[str, list[int]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str, with_weights: bool = True) -> EagleCheckpoint:
        """Read a local directory or a hub id. Raises ModelLoadError."""
        directory = draft_directory(path, with_weights)
        shapes = read_tensor_shapes(directory) if with_weights else {}
        named = {parameter_name(name): shape for name, shape in shapes.items()}
        return cls(path, read_json(directory / "config.json"), directory, named)

    @property
    def layer_raw(self) -> dict[str, Any]:
        return dict(self.raw.get("transformer_layer_config", self.raw))

    @property
    def eagle_config(self) -> dict[str, Any]:
        return dict(self.raw.get("eagle_config") or {})

    def has(self, name: str) -> bool:
        return name in self.shapes

    def wants(self, option: str, tensor: str = "") -> bool:
        """Whether the configuration sets an option, or a tensor is there that belongs to it."""
        return bool(self.raw.get(option) or self.eagle_config.get(option)) or self.has(tensor)

    def draft_vocab_size(self, target_vocab_size: int) -> int:
        """Raises ModelLoadError for a draft of another vocabulary than the target's."""
        embedded = self.layer_raw.get("vocab_size", target_vocab_size)
        if embedded != target_vocab_size:
            raise ModelLoadError(
                f"the draft {self.name} was made for a target of vocab_size {embedded}, and this "
                f"one's is {target_vocab_size}; take the draft of this target"
            )
        return int(self.raw.get("draft_vocab_size") or target_vocab_size)

    @property
    def own_vocab_size(self) -> int | None:
        """None where the draft can say all tokens."""
        own, whole = self.raw.get("draft_vocab_size"), self.layer_raw.get("vocab_size")
        return None if own in (None, whole) else int(own)

    @property
    def vocabulary(self) -> str:
        """In words."""
        own, whole = self.own_vocab_size, self.layer_raw.get("vocab_size", "unknown")
        if own is None:
            return f"vocabulary: the target's, {whole} tokens"
        return f"vocabulary: {own} of the target's {whole} tokens, by d2t"

    def owner(self, tensor: str) -> str:
        """Whose tensor serves, in words."""
        return "its own" if self.has(tensor) else "the target's"

    @property
    def reads_last_state(self) -> bool:
        """EAGLE-3 on the target's last state, after its final norm, in place of outputs of layers
        (ModelOpt)."""
        return self.eagle_config.get("use_aux_hidden_state") is False

    @property
    def num_layers(self) -> int:
        return int(self.layer_raw.get("num_hidden_layers") or 1)

    def refuse_other_features(self) -> None:
        """Raises ModelLoadError where ModelOpt's options, or those of drafts that say several
        tokens at once (P-EAGLE), ask for what nothing here computes."""
        if self.raw.get("parallel_drafting"):
            raise ModelLoadError(
                f"parallel_drafting of the draft {self.name} is true; --speculative-algorithm "
                "EAGLE3 serves drafts of one token after the other alone"
            )
        for option, served in _MODELOPT.items():
            found = self.eagle_config.get(option)
            if found is not None and found != served:
                raise ModelLoadError(
                    f"eagle_config.{option} of the draft {self.name} is {found!r}; "
                    f"--speculative-algorithm EAGLE3 serves drafts with {served!r} alone"
                )

    def refuse_several_layers(self, why: str) -> None:
        if self.num_layers != 1:
            raise ModelLoadError(
                f"num_hidden_layers of the draft {self.name} is {self.num_layers}; {why}. For a "
                "whole model as the draft use --speculative-algorithm STANDALONE"
            )

    def layer_windows(self) -> tuple[int | None, ...]:
        """The tokens that a query of each layer sees, itself included; None is all."""
        raw = self.layer_raw
        default = "sliding_attention" if raw.get("use_sliding_window") else "full_attention"
        types = raw.get("layer_types") or [default] * self.num_layers
        if other := set(types) - {*_LAYER_TYPES}:
            raise ModelLoadError(
                f"layer type {min(other)!r} of the draft {self.name} is not supported; known: "
                f"{', '.join(_LAYER_TYPES)}"
            )
        window = raw.get("sliding_window")
        slides = [one == "sliding_attention" for one in types[: self.num_layers]]
        if any(slides) and window is None:
            raise ModelLoadError(
                f"config.json of the draft {self.name} lacks sliding_window, which its layers use"
            )
        return tuple(window if one else None for one in slides)

    def layer_config(self, context_length: int) -> Any:
        """The configuration of the decoder layer, with room for the target's context:
        drafts are often trained on shorter texts and say so."""
        raw = self.layer_raw
        for name in _NEEDED:
            if name not in raw:
                raise ModelLoadError(f"config.json of the draft {self.name} lacks {name}")
        for name, known in _SCALES.items():
            if raw.get(name) not in known:
                raise ModelLoadError(
                    f"{name} {raw[name]} of the draft {self.name} is not supported; drafts have "
                    "the layers of a Llama"
                )
        config = _config_of(raw, self.name)
        if config.hidden_act != "silu":
            raise ModelLoadError(
                f"hidden_act {config.hidden_act!r} of the draft {self.name} is not supported; only "
                "silu is"
            )
        config.max_position_embeddings = max(config.max_position_embeddings, context_length)
        return config

    def named_layers(self) -> tuple[int, ...] | None:
        """Those whose outputs it says that it reads, counted from 0."""
        own, shared = self.eagle_config.get(_IDS), self.raw.get(_IDS)
        if own is not None:
            return tuple(own)
        return None if shared is None else tuple(layer - 1 for layer in shared)

    def feature_layers(self, num_layers: int) -> tuple[int, ...]:
        """Target layers, from 0, whose outputs are the features. Raises ModelLoadError where they
        cannot be."""
        layers = self.named_layers() or (1, num_layers // 2 - 1, num_layers - 4)
        field_name = f"eagle_config.{_IDS}" if _IDS in self.eagle_config else _IDS
        ascending = all(low < high for low, high in pairwise(layers))
        if not layers or not ascending or layers[0] < 0 or layers[-1] >= num_layers:
            raise ModelLoadError(
                f"the draft {self.name} reads the outputs of layers {list(layers)} of the target, "
                f"counted from 0, which has {num_layers}; they must ascend within 0.."
                f"{num_layers - 1}. Correct {field_name} in the draft's config.json, or take the "
                "draft of this target"
            )
        return layers

    def require_shape(self, name: str, expected: list[int], why: str) -> None:
        """Raises ModelLoadError where a tensor is there and has another shape."""
        found = self.shapes.get(name)
        if found is not None and found != expected:
            raise ModelLoadError(
                f"{name} of the draft {self.name} is {found} and must be {expected}: {why}"
            )


def read_json(path: Path) -> dict[str, Any]:
    """Raises ModelLoadError for what is no JSON object."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ModelLoadError(f"{path} is not a JSON object")
    return raw


def _config_of(raw: dict[str, Any], name: str) -> Any:
    left_out = {"architectures", "auto_map"}
    fields = {key: value for key, value in raw.items() if key not in left_out}
    try:
        return make_config({"model_type": "llama"} | fields)
    except Exception as error:
        raise ModelLoadError(f"config.json of the draft {name} cannot be used: {error}") from error
