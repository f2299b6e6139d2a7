from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import HunYuanDenseV1Config, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.glm4.modeling_glm4 import Glm4RotaryEmbedding
from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import (
    HunYuanDenseV1RotaryEmbedding,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specengine.core.errors import ModelLoadError
from specengine.layers.rotary import (
    RotaryEmbedding,
    longest_context,
    rope_frequencies,
    rope_parameters,
    rotary_fraction,
)

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    "yarn, all options": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
        "mscale": 0.8,
        "mscale_all_dim": 1.2,
    },
    "yarn, own attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "attention_factor": 1.5,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0 + i / 8 for i in range(32)],
        "long_factor": [1.0 + i / 8 for i in range(32)],
        "attention_factor": 1.0,
        "factor": 1.0,
        "original_max_position_embeddings": 1024,
    },
    "longrope, short context": {
        "rope_type": "longrope",
        "short_factor": [1.0 + i / 8 for i in range(32)],
        "long_factor": [2.0 + i for i in range(32)],
        "factor": 8.0,
        "original_max_position_embeddings": 1024,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
}


def _config(parameters: dict[str, Any]) -> Any:
    return LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        num_hidden_layers=1,
        max_position_embeddings=1024,
        rope_parameters=parameters | {"rope_theta": 50000.0},
    )


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_equal_transformers(name: str) -> None:
    config = _config(SCALINGS[name])
    found, factor = rope_frequencies(64, 1024, rope_parameters(config))
    kind = SCALINGS[name]["rope_type"]
    if kind == "default":
        expected, expected_factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        expected, expected_factor = ROPE_INIT_FUNCTIONS[kind](config)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor)


@pytest.mark.parametrize("name", SCALINGS)
def test_table_equals_transformers(name: str) -> None:
    config = _config(SCALINGS[name])
    table = RotaryEmbedding.from_config(config).cos_sin_cache
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(1024)[None])
    assert table.shape == (1024, 64)
    torch.testing.assert_close(table[:, :32], cos[0, :, :32], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(table[:, 32:], sin[0, :, :32], rtol=1e-4, atol=1e-4)


def test_older_configurations_keep_scaling_beside_theta() -> None:
    old = SimpleNamespace(rope_theta=50000.0, rope_scaling={"type": "linear", "factor": 4.0})
    assert rope_parameters(old) == {
        "rope_theta": 50000.0,
        "type": "linear",
        "rope_type": "linear",
        "factor": 4.0,
    }


def test_configuration_without_scaling_is_default() -> None:
    assert rope_parameters(SimpleNamespace(rope_theta=7.0, rope_scaling=None)) == {
        "rope_theta": 7.0,
        "rope_type": "default",
    }


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "novel", "factor": 2.0}, "'novel' is not supported; known: default"),
        ({"rope_type": "linear"}, "lack 'factor'"),
        (SCALINGS["longrope"] | {"short_factor": [1.0], "long_factor": [1.0]}, "has 1 values"),
    ],
)
def test_what_is_not_supported_is_refused(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        rope_frequencies(64, 1024, {"rope_theta": 1e4} | parameters)


def test_longrope_takes_the_long_divisors_where_requests_may_be_longer() -> None:
    longrope = SCALINGS["longrope, short context"] | {"original_max_position_embeddings": 512}
    config = _config(longrope)
    found, factor = rope_frequencies(64, 1024, rope_parameters(config))
    expected, expected_factor = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=1024)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor)
    config.served_context = 512
    found, _ = rope_frequencies(64, 1024, rope_parameters(config))
    expected, _ = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=512)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_longrope_without_a_factor_scales_by_the_model_s_context_whatever_is_served() -> None:
    """As Phi-3.5 is published."""
    longrope = SCALINGS["longrope, short context"] | {"original_max_position_embeddings": 256}
    config = _config({name: value for name, value in longrope.items() if name != "factor"})
    expected = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=1024)[1]
    assert expected > 1.0
    for config.served_context in (1024, 512, 256):
        found = rope_frequencies(64, 1024, rope_parameters(config))[1]
        assert found == pytest.approx(expected)


def test_dynamic_with_a_fixed_alpha_stretches_the_base() -> None:
    rope = SCALINGS["dynamic"] | {"factor": 1.0, "alpha": 50.0, "rope_theta": 1e4}
    config = HunYuanDenseV1Config(head_dim=64, max_position_embeddings=1024, rope_parameters=rope)
    found, factor = rope_frequencies(64, 1024, rope_parameters(config))
    reference = HunYuanDenseV1RotaryEmbedding(config)
    torch.testing.assert_close(found, reference.inv_freq, rtol=1e-6, atol=0)
    assert factor == reference.attention_scaling == 1.0
    plain, _ = rope_frequencies(64, 1024, rope | {"alpha": None})
    assert float(plain[-1] / found[-1]) == pytest.approx(50.0)


@pytest.mark.parametrize("original", [{}, {"original_max_position_embeddings": 256}])
@pytest.mark.parametrize("served", [512, 1024, 1025, 3000, 4096])
def test_dynamic_grows_with_the_context_that_requests_may_have(
    served: int, original: dict[str, Any]
) -> None:
    config = _config(SCALINGS["dynamic"] | original)
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=served)
    config.served_context = served
    found, _ = rope_frequencies(64, 1024, rope_parameters(config))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("parameters", "longest"),
    [
        ({"rope_type": "default"}, 1024),
        ({"rope_type": "linear", "factor": 4.0}, 4096),
        ({"rope_type": "dynamic", "factor": 4.0}, 4096),
        ({"rope_type": "dynamic", "factor": 4.0, "alpha": 50.0}, 1024),
        ({"full_attention": {"rope_type": "linear", "factor": 4.0}, "other": {}}, 1024),
    ],
)
def test_longest_context(parameters: dict[str, Any], longest: int) -> None:
    config = SimpleNamespace(max_position_embeddings=1024, rope_parameters=parameters)
    assert longest_context(config) == longest


@pytest.mark.parametrize("factor", ["4", [4.0], math.nan, math.inf])
def test_longest_context_of_a_factor_that_is_no_number(factor: Any) -> None:
    rope = {"rope_type": "linear", "factor": factor}
    config = SimpleNamespace(max_position_embeddings=1024, rope_parameters=rope)
    with pytest.raises(ModelLoadError, match=r"factor .* is no finite number"):
        longest_context(config)


def test_part_of_a_head_is_rotated() -> None:
    config = _config({"rope_type": "default", "partial_rotary_factor": 0.5})
    expected, _ = Glm4RotaryEmbedding.compute_default_rope_parameters(config)
    table = RotaryEmbedding.from_config(config, None, rotary_fraction(config)).cos_sin_cache
    assert table.shape == (1024, 32)
    torch.testing.assert_close(table[1, :16], expected.cos()[:16], rtol=1e-6, atol=1e-6)


def test_partial_rotation_is_refused_where_a_family_does_not_state_it() -> None:
    config = _config({"rope_type": "default", "partial_rotary_factor": 0.5})
    with pytest.raises(ModelLoadError, match=r"partial_rotary_factor 0.5: rotating part of a head"):
        RotaryEmbedding.from_config(config)


KINDS: dict[str, dict[str, Any]] = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def test_layer_types_have_tables_of_their_own() -> None:
    config = SimpleNamespace(rope_parameters=KINDS)
    assert rope_parameters(config, "full_attention") == KINDS["full_attention"]
    assert rope_parameters(config, "sliding_attention") == KINDS["sliding_attention"]
    assert rotary_fraction(config) == 1.0


@pytest.mark.parametrize("kind", [None, "novel_attention"])
def test_tables_by_layer_type_are_refused_where_no_type_is_asked(kind: str | None) -> None:
    with pytest.raises(ModelLoadError, match=r"differ by layer type \(full_attention, sliding"):
        rope_parameters(SimpleNamespace(rope_parameters=KINDS), kind)


def test_fractions_that_differ_by_layer_type_are_refused() -> None:
    kinds = KINDS | {"sliding_attention": {"partial_rotary_factor": 0.5}}
    with pytest.raises(ModelLoadError, match="partial_rotary_factor differs"):
        rotary_fraction(SimpleNamespace(rope_parameters=kinds))
