"""MiMo, which transformers does not know: its target against a plain reading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specengine.core.batch import ForwardMode
from specengine.core.config import ModelConfig
from specengine.runner.loader.load import load_model
from specengine.runner.loader.source import resolve_model
from specengine.target.models.mimo import MiMoForCausalLM
from specengine.target.registry import find_model_class
from tests.draft.mtp_reading import Reading, add_mtp

PROMPT = [(7 * i * i + 3 * i) % 300 for i in range(70)]


def test_logits_equal_the_reading(
    small_models: dict[str, Path], tmp_path: Path, mini_runner: Any
) -> None:
    folder = add_mtp(small_models["qwen2"], tmp_path, "mimo")
    source = resolve_model(ModelConfig(model=str(folder)))
    model = load_model(source, find_model_class, torch.float32, torch.device("cpu"))
    assert isinstance(model, MiMoForCausalLM)
    found = mini_runner(model).logits(ForwardMode.EXTEND, [PROMPT])
    reading = Reading.of(folder)
    expected = reading.head(reading.hidden(PROMPT))
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5


def test_configuration_is_read_without_its_own_code(
    small_models: dict[str, Path], tmp_path: Path
) -> None:
    """Published MiMo directories bring Python code, which is never run."""
    folder = add_mtp(small_models["qwen2"], tmp_path, "mimo")
    path = folder / "config.json"
    path.write_text(path.read_text()[:-1] + ', "auto_map": {"AutoConfig": "evil.Config"}}')
    config = resolve_model(ModelConfig(model=str(folder))).hf_config
    assert (config.hidden_size, config.num_nextn_predict_layers) == (64, 1)
    assert config.rope_parameters["rope_theta"] == 10000.0
