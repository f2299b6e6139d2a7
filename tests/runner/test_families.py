"""Configurations of the families, beside transformers' own."""

from __future__ import annotations

import subprocess
import sys
from copy import deepcopy
from typing import Any

import pytest

from specengine.runner.loader.builtin import BUILTIN_MODELS
from specengine.runner.loader.families import FAMILIES
from specengine.runner.loader.hf_config import make_config

# What no model here reads: it is for training, or for transformers' own models.
_UNREAD = {"attention_dropout", "initializer_range", "pretraining_tp", "use_cache"}

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}

_CASES: dict[str, dict[str, Any]] = {
    "nothing said": {},
    "small": {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2},
    "heads of their own size": {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32},
    "older rope": {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "yarn": {"rope_theta": 1e6, "rope_scaling": _YARN, "max_position_embeddings": 8192},
    "older dtype": {"torch_dtype": "float16"},
    "dtype": {"dtype": "bfloat16"},
    "window": {"use_sliding_window": True, "max_window_layers": 3, "num_hidden_layers": 5},
    "no window": {"sliding_window": None},
    "ends": {"eos_token_id": [3, 4], "bos_token_id": None},
    "other fields": {"num_nextn_predict_layers": 1, "architectures": ["LlamaForCausalLM"]},
    "layers named": {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2},
}
_WRONG: dict[str, dict[str, Any]] = {
    "text": {"vocab_size": "many"},
    "half a layer": {"num_hidden_layers": 1.5},
    "a list": {"rope_parameters": [1.0]},
}


def _theirs(fields: dict[str, Any]) -> dict[str, Any]:
    from transformers import CONFIG_MAPPING

    made = CONFIG_MAPPING[fields["model_type"]].from_dict(deepcopy(fields)).to_dict()
    return {name: value for name, value in made.items() if name not in _UNREAD - fields.keys()}


@pytest.mark.parametrize("case", _CASES)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_as_transformers_makes_it(family: str, case: str) -> None:
    fields = {"model_type": family, **_CASES[case]}
    assert make_config(fields).to_dict() == _theirs(fields)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_fields_that_are_null(family: str) -> None:
    nulls = ("num_key_value_heads", "rope_scaling", "rope_parameters", "eos_token_id")
    fields = {"model_type": family, **dict.fromkeys(nulls)}
    assert make_config(fields).to_dict() == _theirs(fields)


@pytest.mark.parametrize("case", _WRONG)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_refused_as_transformers_refuses_it(family: str, case: str) -> None:
    fields = {"model_type": family, **_WRONG[case]}
    with pytest.raises(Exception) as theirs:  # noqa: PT011 (of whatever type)
        _theirs(fields)
    with pytest.raises(type(theirs.value)) as ours:
        make_config(fields)
    assert str(ours.value).splitlines()[0] == str(theirs.value).splitlines()[0]


def test_heads_that_do_not_fit() -> None:
    with pytest.raises(Exception, match="hidden_size 65 is no multiple of num_attention_heads 32"):
        make_config({"model_type": "llama", "hidden_size": 65})


def test_family_that_transformers_has_not_extends_a_configuration() -> None:
    fields = {"num_hidden_layers": 2, "architectures": ["MiMoForCausalLM"]}
    mimo = make_config({"model_type": "mimo", **fields})
    assert mimo.to_dict() | {"model_type": "qwen2"} == _theirs({"model_type": "qwen2", **fields})


@pytest.mark.parametrize("name", [name for name, one in BUILTIN_MODELS.items() if one.is_shape])
def test_built_in_shapes(name: str) -> None:
    fields = BUILTIN_MODELS[name].config
    made = make_config(fields).to_dict()  # a family without a class there has theirs
    ours = {name: value for name, value in made.items() if name not in _UNREAD - fields.keys()}
    assert ours == _theirs(fields)


def test_what_was_given_stays_as_it_was() -> None:
    fields = {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": {"type": "default"}}
    before = deepcopy(fields)
    make_config(fields)
    assert fields == before


def test_a_family_of_transformers_alone() -> None:
    assert make_config({"model_type": "phi", "hidden_size": 32}).hidden_size == 32


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "model_type names the family, and is None"),
        ({"model_type": None}, "model_type names the family, and is None"),
        ({"model_type": ["llama"]}, r"model_type names the family, and is \['llama'\]"),
        ({"model_type": "no-such-model"}, "model_type 'no-such-model' is not known"),
    ],
)
def test_an_unknown_family(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(fields)


def test_finding_a_model_imports_no_compiler() -> None:
    script = (
        "import gc, os, sys\n"
        "gc.disable()\n"  # what is imported stays
        "from specengine.core.config import ModelConfig\n"
        "from specengine.runner.loader.source import resolve_model\n"
        "from specengine.runner.loader.tokenizer import load_tokenizer\n"
        "load_tokenizer(resolve_model(ModelConfig(model='tiny')))\n"
        "heavy = ('torch._dynamo', 'sympy', 'transformers.activations')\n"
        "print([name for name in heavy if name in sys.modules], flush=True)\n"
        "os._exit(0)\n"  # without the end of each object
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"
