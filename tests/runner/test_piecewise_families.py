"""Every registered family in pieces, padded and unpadded, as it runs without."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specengine.core.config import ModelConfig
from specengine.core.forward_mode import ForwardMode
from specengine.runner.loader.load import load_model
from specengine.runner.loader.source import resolve_model
from specengine.target.registry import find_model_class
from tests.support.families import FAMILIES
from tests.support.piecewise import in_pieces, pieces_of
from tests.target.conftest import MiniRunner

PROMPTS = [[(7 * i * i + 3 * i) % 300 for i in range(12)], [5, 9, 301]]
MORE = [[4], [8, 15, 16]]
FEATURES = (0, 2)


# One of each kind of layer, its weights in one of the two forms; the others in make test-all.
# Llama's are in test_piecewise.py.
QUICK = {
    **dict.fromkeys(("gemma2", "cohere2", "gptoss", "qwen3next"), False),
    **dict.fromkeys(("olmo2", "qwen3moe", "deepseekv3"), True),
}
CASES = [
    pytest.param(family, packed, marks=() if QUICK.get(family) is packed else (pytest.mark.slow,))
    for family in FAMILIES
    for packed in (False, True)
]


def forbid_choosing_kernels(patch: pytest.MonkeyPatch) -> None:
    """Where a GPU is, to ask for its kernels ends a trace. A CPU would not tell."""

    def use_triton(backend: str, x: Tensor) -> bool:
        raise AssertionError("a trace asks which kernel runs")

    for name, module in sorted(sys.modules.items()):
        if name.startswith("specengine.kernels") and hasattr(module, "use_triton"):
            patch.setattr(module, "use_triton", use_triton)


@pytest.mark.parametrize(("family", "is_packed"), CASES)
def test_family_in_pieces_equals_its_eager_forward(
    family: str, is_packed: bool, small_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights as a CPU keeps them, and as a GPU does."""
    if not is_packed:
        monkeypatch.setattr("specengine.runner.loader.load.pack_linears", lambda *_: None)
    source = resolve_model(ModelConfig(model=str(small_models[family])))
    model: Any = load_model(source, find_model_class, torch.float32, torch.device("cpu"))
    with monkeypatch.context() as patch:
        forbid_choosing_kernels(patch)
        pieces = pieces_of(model, (15, 40), FEATURES)
    eager, cut = MiniRunner(model), MiniRunner(model)
    for tokens in (PROMPTS, MORE):  # 15 tokens, and 4 that are padded
        batch = eager.batch(ForwardMode.EXTEND, tokens)
        batch.feature_layers = FEATURES
        with torch.inference_mode():
            expected = model(batch.input_ids, batch.positions, batch)
        other = cut.batch(ForwardMode.EXTEND, tokens)
        torch.testing.assert_close(in_pieces(pieces, other), expected, rtol=1e-4, atol=1e-5)
        features = torch.cat(batch.layer_features, -1)
        torch.testing.assert_close(other.layer_features[0], features, rtol=1e-4, atol=1e-5)
    assert pieces.counters["replays"] == 2
