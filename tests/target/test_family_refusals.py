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
    [
        "qwen2",
        "qwen3",
        "gemma2",
        "gemma3",
        "olmo3",
        "smollm3",
        "cohere2",
        "exaone4",
        "qwen3next",
        "dots1",
        "gptoss",
        "llama4",
    ],
)
def test_unknown_layer_type_is_refused(family: str) -> None:
    with pytest.raises(ModelLoadError, match="layer type 'block_attention' is not supported"):
        make(family, layer_types=["block_attention"] * 3)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5moe", "qwen3next"])
def test_other_activations_are_refused_beside_the_delta_rule(family: str) -> None:
    """Whose convolution and gated norm have one of their own."""
    with pytest.raises(ModelLoadError, match=r"activation 'gelu' (is|are) not supported"):
        make(family, hidden_act="gelu")


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [
        ("minimaxm2", "scoring_func", "softmax"),
        ("minimaxm2", "use_qk_norm", False),
        ("qwen3_5", "attn_output_gate", False),
    ],
)
def test_fields_of_one_known_value(family: str, name: str, value: Any) -> None:
    make(family, **{name: "sigmoid" if name == "scoring_func" else True})
    with pytest.raises(ModelLoadError, match=f"{name} {value!r} is not supported"):
        make(family, **{name: value})


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "granite",
        "olmo2",
        "seedoss",
        "smollm3",
        "exaone4",
        "arcee",
        "dots1",
        "hunyuandensev1",
    ],
)
def test_partial_rotation_is_refused_where_the_family_has_none(family: str) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    with pytest.raises(
        ModelLoadError, match=r"partial_rotary_factor 0\.5: rotating part of a head"
    ):
        make(family, rope_parameters=rope)


@pytest.mark.parametrize(
    ("field", "value"), [("is_causal", False), ("use_bidirectional_attention", True)]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_attention_in_both_directions_is_refused(family: str, field: str, value: bool) -> None:
    with pytest.raises(ModelLoadError, match=f"{field} {value} is not supported: texts are causal"):
        make(family, **{field: value})


def test_clipped_projections_are_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"clip_qkv 8\.0 of config\.json is not supported"):
        make("olmoe", clip_qkv=8.0)


@pytest.mark.parametrize("field", ["linear_num_value_heads", "linear_conv_kernel_dim"])
def test_linear_attention_that_does_not_fit_together_is_refused(field: str) -> None:
    with pytest.raises(ModelLoadError, match=r"linear attention with .* is not supported"):
        make("qwen3next", **{field: 1})


ROUTING: dict[str, dict[str, tuple[Any, str]]] = {
    "deepseekv2": {
        "topk_method": ("noaux_tc", "topk_method 'noaux_tc' is not supported; known: 'greedy'"),
        "scoring_func": ("sigmoid", "scoring_func 'sigmoid' is not supported; known: 'softmax'"),
        "norm_topk_prob": (True, "norm_topk_prob True is not supported"),
        "attention_bias": (True, "attention_bias without q_lora_rank"),
        "mlp_bias": (True, "mlp_bias of config.json is true"),
    },
    "deepseekv3": {
        "topk_method": ("greedy", "topk_method 'greedy' is not supported; known: 'noaux_tc'"),
        "scoring_func": ("softmax", "scoring_func 'softmax' is not supported; known: 'sigmoid'"),
    },
    "dots1": {
        "topk_method": ("greedy", "topk_method 'greedy' is not supported; known: 'noaux_tc'"),
        "scoring_func": ("softmax", "scoring_func 'softmax' is not supported; known: 'noaux_tc'"),
    },
}
ROUTING_CASES = [(family, name) for family, fields in ROUTING.items() for name in fields]


@pytest.mark.parametrize(("family", "name"), ROUTING_CASES)
def test_other_routing_and_biases_are_refused(family: str, name: str) -> None:
    value, message = ROUTING[family][name]
    with pytest.raises(ModelLoadError, match=message):
        make(family, **{name: value})
