"""The language part of a multimodal model: its configuration and its tensors. The rest of the
checkpoint is not read, and the model takes text alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from specengine.core.registry import MODEL_FAMILIES, load_place

# How names of the language part begin -> as in a checkpoint of the language model alone. The first
# that fits counts.
_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
}
# Parts that see and hear, and what joins them to the language part; alone or under "model.".
_OTHER_PARTS = (
    "vision_tower.",
    "vision_model.",
    "vision_embed_tokens.",
    "visual.",
    "audio_tower.",
    "multi_modal_projector.",
    "mm_projector.",
    "embed_vision.",
    "connector.",
    "image_newline",
)
_BESIDE = ("architectures", "eos_token_id", "bos_token_id", "pad_token_id", "dtype")


def language_config(config: Any, fields: dict[str, Any]) -> Any:
    """The configuration of the language part, or `config` itself where it is all there is. fields:
    of config.json. Raises ValueError where no family computes that part."""
    text = config.get_text_config(decoder=True)
    if text is config or _is_registered(config):
        return config
    for name in _BESIDE:
        if getattr(text, name, None) is None:
            setattr(text, name, getattr(config, name, None))
    text.architectures = [_architecture_of(text.model_type)]
    stated = [given for given in (fields, fields.get("text_config")) if isinstance(given, dict)]
    ties = [given["tie_word_embeddings"] for given in stated if "tie_word_embeddings" in given]
    text.tie_word_embeddings = bool([*ties, getattr(config, "tie_word_embeddings", False)][0])
    text.is_language_part = True
    return text


def language_tensors(
    weights: Iterable[tuple[str, Tensor]], config: Any
) -> Iterable[tuple[str, Tensor]]:
    """(checkpoint name, tensor) as the language model alone has them; all of them where `config`,
    of `language_config`, is not that of a part."""
    return _of_language(weights) if getattr(config, "is_language_part", False) else weights


def _of_language(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        if name.removeprefix("model.").startswith(_OTHER_PARTS):
            continue
        yield language_name(name), tensor


def language_name(name: str) -> str:
    """A tensor's name in a checkpoint of the language model alone."""
    found = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)
    return name if found is None else _PREFIXES[found] + name.removeprefix(found)


def _is_registered(config: Any) -> bool:
    return any(name in MODEL_FAMILIES for name in config.architectures or ())


def _architecture_of(model_type: str) -> str:
    """The family whose file names the model_type, or transformers' class for it."""
    for architecture, place in MODEL_FAMILIES.items():
        if model_type in vars(load_place(place)).get("language_parts", ()):
            return architecture
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found: str | None = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    if found is None:
        raise ValueError(f"its language part, of model_type {model_type!r}, is not supported")
    return found
