"""Pieces that PyTorch's code generator compiles, kept on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specengine.core.config import ModelConfig
from specengine.core.forward_mode import ForwardMode
from specengine.runner.loader.load import load_model
from specengine.runner.loader.source import resolve_model
from specengine.target.registry import find_model_class
from tests.support.piecewise import in_pieces, pieces_of
from tests.target.conftest import MiniRunner

PROMPTS = [[(7 * i * i + 3 * i) % 300 for i in range(12)], [5, 9, 301]]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3moe"])
def test_compiled_pieces_equal_the_eager_forward_and_are_loaded_at_a_second_start(
    family: str, small_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specengine.runner.loader.load.pack_linears", lambda *_: None)
    source = resolve_model(ModelConfig(model=str(small_models[family])))
    model: Any = load_model(source, find_model_class, torch.float32, torch.device("cpu"))
    runner = MiniRunner(model)
    batch = runner.batch(ForwardMode.EXTEND, PROMPTS)
    with torch.inference_mode():
        expected = model(batch.input_ids, batch.positions, batch)
    options = {"compiler": "inductor", "folder": tmp_path}
    first = pieces_of(model, (15, 40), (1,), **options)
    assert first.compiled.compiled > 0
    second = pieces_of(model, (15, 40), (1,), **options)
    assert (second.compiled.compiled, second.compiled.loaded) == (0, first.compiled.compiled)
    for pieces in (first, second):
        for tokens in (PROMPTS, PROMPTS[:1]):  # of the second, 12 rows are padded to 15
            found = in_pieces(pieces, MiniRunner(model).batch(ForwardMode.EXTEND, tokens))
            torch.testing.assert_close(found, expected[: len(found)], rtol=1e-4, atol=1e-5)
