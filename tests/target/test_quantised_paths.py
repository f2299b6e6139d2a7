"""Fast paths that read plain weights refuse layers whose weights are quantised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specengine.core.config import ModelConfig
from specengine.layers.compute_paths import FAST_PATHS, SPLIT_PREFILL, ComputePath
from specengine.layers.quantization import linears
from specengine.runner.loader.load import load_model
from specengine.runner.loader.source import resolve_model
from specengine.target.registry import find_model_class
from tests.support.families import save_small_model
from tests.support.fast_paths import run_path
from tests.support.quantised import FORMATS, quantise_model

TOKENS = [[5, 9, 301, 17], [7]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which the first layer's down_proj alone is plain."""
    root = tmp_path_factory.mktemp("quantised")
    save_small_model("llama", root / "source", 5, intermediate_size=128)
    return quantise_model(root / "source", root / "made", FORMATS["gptq"]).quantised


@pytest.mark.parametrize("path", FAST_PATHS, ids=lambda path: path.name)
def test_paths_that_read_plain_weights_are_refused(
    path: ComputePath, folder: Path, mini_runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linears, "wants_dense", lambda device: False)
    monkeypatch.setattr("specengine.runner.loader.load.pack_linears", lambda *_: None)
    source = resolve_model(ModelConfig(model=str(folder)))
    model = load_model(source, find_model_class, torch.float32, torch.device("cpu"))
    plain = run_path(mini_runner(model), None, TOKENS, monkeypatch)
    found = run_path(mini_runner(model), path, TOKENS, monkeypatch)
    assert found.was_taken == (path is SPLIT_PREFILL)  # which runs the layers as they are
    found.assert_near(plain)
