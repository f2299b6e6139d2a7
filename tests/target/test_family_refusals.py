"""A configuration that asks for what a family does not compute is refused by the field's name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from specengine.core.errors import ModelLoadError
from specengine.core.registry import MODEL_FAMILIES, load_place
from tests.support.families import FAMILIES, small_config

KINDS = ("full_attention", "sliding_attention")


def make(family: str, **fields: Any) -> nn.Module:
    """fields: set behind the checks of transformers."""
    config = small_config(family)
    for name, value in fields.items():
        setattr(config, name, value)
    with torch.device("meta"):
        model: nn.Module = load_place(MODEL_FAMILIES[FAMILIES[family]])(config)
    return model


def novel_rope(family: str) -> dict[str, Any]:
    novel = {"rope_type": "novel", "rope_theta": 1e4}
    found = small_config(family).rope_parameters
    return dict.fromkeys(KINDS, novel) if "full_attention" in found else novel


@pytest.mark.parametrize("family", FAMILIES)
def test_unknown_rope_type_is_refused(family: str) -> None:
    with pytest.raises(ModelLoadError, match="rope_type 'novel' is not supported; known: default"):
        make(family, rope_parameters=novel_rope(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_unknown_activation_is_refused(family: str) -> None:
    config = small_config(family)
    name = "hidden_activation" if hasattr(config, "hidden_activation") else "hidden_act"
    with pytest.raises(ModelLoadError, match=r"activation 'quick_gelu' (is|are) not supported"):
        make(family, **{name: "quick_gelu"})


@pytest.mark.parametrize(
    "family",
    ["qwen2", "qwen3", "gemma2", "gemma3", "olmo3", "smollm3", "cohere2", "exaone4"],
)
def test_unknown_layer_type_is_refused(family: str) -> None:
    with pytest.raises(ModelLoadError, match="layer type 'chunked_attention' is not supported"):
        make(family, layer_types=["chunked_attention"] * 3)


@pytest.mark.parametrize("family", ["llama", "granite", "olmo2", "seedoss", "smollm3", "exaone4"])
def test_partial_rotation_is_refused_where_the_family_has_none(family: str) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    with pytest.raises(
        ModelLoadError, match=r"partial_rotary_factor 0\.5: rotating part of a head"
    ):
        make(family, rope_parameters=rope)


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_attention_in_both_directions_is_refused(family: str) -> None:
    with pytest.raises(ModelLoadError, match="use_bidirectional_attention is not supported"):
        make(family, use_bidirectional_attention=True)


def test_contexts_past_the_first_chunk_are_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"attention_chunk_size 100.*--context-length 100"):
        make("llama4", attention_chunk_size=100)
    make("llama4", attention_chunk_size=100, served_context=100)
    make("llama4", attention_chunk_size=100, layer_types=["full_attention"] * 3)
