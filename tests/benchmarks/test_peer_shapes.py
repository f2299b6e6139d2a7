"""What peers are given of a built-in shape."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from specengine.runner.loader.builtin import BUILTIN_MODELS
from tests.test_layering import ROOT


@pytest.mark.parametrize("name", ["qwen3-next-fp8-shape", "llama-3.1-8b-w4a16-shape"])
def test_config_has_every_published_field_and_the_defaults_of_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks/peers")
    fields = BUILTIN_MODELS[name].config
    importlib.import_module("common").write_config(fields, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert fields.keys() < written.keys()
    assert written["quantization_config"] == fields["quantization_config"]
    assert written.get("full_attention_interval") == fields.get("full_attention_interval")
