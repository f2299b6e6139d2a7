"""Logits of a quantised checkpoint beside those of the dense one that it stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specengine.core.batch import ForwardMode
from specengine.core.config import ModelConfig
from specengine.runner.loader.load import load_model
from specengine.runner.loader.source import resolve_model
from specengine.target.registry import find_model_class
from tests.support.quantised import Pair

PROMPT = [(7 * i * i + 3 * i) % 300 for i in range(40)]


def load(
    folder: Path,
    quantization: str | None = None,
    dtype: torch.dtype = torch.float32,
    packs: bool = True,
) -> Any:
    source = resolve_model(ModelConfig(model=str(folder)))
    cpu = torch.device("cpu")
    return load_model(source, find_model_class, dtype, cpu, quantization, packs=packs)


def difference(pair: Pair, mini_runner: Any) -> float:
    """Of logits, the largest, as a part of the largest logit."""
    found, expected = (
        mini_runner(load(folder)).logits(ForwardMode.EXTEND, [PROMPT])
        for folder in (pair.quantised, pair.dense)
    )
    return float((found - expected).abs().max() / expected.abs().max())
