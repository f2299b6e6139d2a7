"""Models of other architectures end in a refusal that names theirs and those that are supported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING

from specengine.core.config import EngineConfig, ModelConfig
from specengine.core.errors import ModelLoadError
from specengine.engine.build import load
from specengine.engine.phases import Phases
from specengine.runner.loader.load import load_model
from specengine.runner.loader.source import resolve_model
from specengine.target.registry import find_model_class

# Those whose language part is of a known family are loaded instead.
# The refusal names the language part, whatever the whole model is called.
NESTED = {
    "whisper": "WhisperForCausalLM",
    "lfm2_vl": "Lfm2ForCausalLM",
    "aria": "AriaTextForCausalLM",
}
OTHERS = ["mamba", "bloom", "gpt2", "phi3", "mixtral"]


@pytest.mark.parametrize("model_type", [*NESTED, *OTHERS])
@pytest.mark.parametrize("architectures", [["SomeOtherModel"], None], ids=["named", "none named"])
def test_another_architecture_is_refused_before_anything_else_is_read(
    architectures: list[str] | None, model_type: str, tmp_path: Path
) -> None:
    """Nothing but its config.json is there."""
    CONFIG_MAPPING[model_type](architectures=architectures).save_pretrained(tmp_path)
    named = "SomeOtherModel" if architectures else f"of model_type '{model_type}'"
    named = NESTED.get(model_type, named)
    message = f"architecture {named} is not supported; known: LlamaForCausalLM, Mistral"
    with pytest.raises(ModelLoadError, match=message):
        load(EngineConfig(model=ModelConfig(model=str(tmp_path))), Phases())


@pytest.mark.parametrize("architectures", [["SomeOtherModel"], None], ids=["named", "none named"])
def test_language_part_that_encodes_and_decodes_is_refused(
    architectures: list[str] | None, tmp_path: Path
) -> None:
    CONFIG_MAPPING["t5"](architectures=architectures).save_pretrained(tmp_path)
    message = (
        r"config\.json cannot be used: its language part, of model_type 't5', is not supported"
    )
    with pytest.raises(ModelLoadError, match=message):
        load(EngineConfig(model=ModelConfig(model=str(tmp_path))), Phases())


@pytest.mark.parametrize("model_type", ["gpt2", "qwen3_vl"])
def test_a_configuration_of_another_architecture_than_it_names_is_refused(
    model_type: str, tmp_path: Path
) -> None:
    CONFIG_MAPPING[model_type](architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    source = resolve_model(ModelConfig(model=str(tmp_path), load_format="dummy"))
    with pytest.raises(ModelLoadError, match="does not fit LlamaForCausalLM, which it names"):
        load_model(source, find_model_class, torch.float32, torch.device("cpu"))


def test_a_configuration_without_a_length_of_context_is_refused(tmp_path: Path) -> None:
    CONFIG_MAPPING["bloom"](architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=r"config\.json of .* lacks max_position_embeddings"):
        load(EngineConfig(model=ModelConfig(model=str(tmp_path))), Phases())
