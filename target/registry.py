"""Model classes by the name that config.json gives in `architectures`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specengine.core.errors import ModelLoadError
from specengine.target.models.llama import LlamaForCausalLM, MistralForCausalLM
from specengine.target.models.mimo import MiMoForCausalLM
from specengine.target.models.qwen import Qwen2ForCausalLM, Qwen3ForCausalLM

MODEL_CLASSES: dict[str, type[LlamaForCausalLM]] = {
    model.__name__: model
    for model in (
        LlamaForCausalLM,
        MistralForCausalLM,
        Qwen2ForCausalLM,
        Qwen3ForCausalLM,
        MiMoForCausalLM,
    )
}


def find_model_class(architectures: Sequence[str]) -> Any:
    """The class of the first known name. Raises ModelLoadError listing the known ones."""
    for name in architectures:
        if name in MODEL_CLASSES:
            return MODEL_CLASSES[name]
    known = ", ".join(MODEL_CLASSES)
    raise ModelLoadError(
        f"architecture {' or '.join(architectures) or '(none named)'} is not supported; "
        f"known: {known}"
    )
