"""Each family reads products in FP8 as published checkpoints name them, or refuses them by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specengine.core.batch import ForwardMode
from specengine.core.config import ModelConfig
from specengine.core.errors import ModelLoadError
from specengine.runner.loader.load import load_model
from specengine.runner.loader.source import resolve_model
from specengine.target.registry import find_model_class
from tests.halves import slow_but
from tests.support.families import FAMILIES
from tests.support.quantised import FORMATS, Pair, quantise_model

PROMPT = [(7 * i * i + 3 * i) % 300 for i in range(40)]
# Their rows of q and k, or of q, k and v, stand in an order that quantised rows are not taken from.
REFUSED = {
    "glm": "rotary pairs",
    "glm4": "rotary pairs",
    "cohere2": "rotary pairs",
    "ernie4_5_moe": "rotary pairs",
    "llama4": "rotary pairs",
}
# Its products have other names; test_family_forms.py says that they are refused.
READ = [name for name in FAMILIES if name not in REFUSED and name != "gptneox"]
FORMS_OF = (BLOCKS, ROWS) = "fp8 blocks of 128", "compressed fp8 rows"
# The fast half: one of each way in which families name and join their products.
FIRST = [
    ("phi3", ROWS),
    ("gemma3", BLOCKS),
    ("starcoder2", ROWS),
    ("glm4moe", ROWS),
    ("mixtral", BLOCKS),
    ("gptoss", BLOCKS),
    ("qwen3_5moe", ROWS),
    ("deepseekv2", BLOCKS),
]


def quantised(family: str, small_models: dict[str, Path], folder: Path, form: str) -> Pair:
    pair = quantise_model(small_models[family], folder, FORMATS[form])
    names = load_file(pair.quantised / "model.safetensors")
    assert any(name.endswith(("weight_scale", "weight_scale_inv")) for name in names)
    return pair


def load(folder: Path) -> Any:
    source = resolve_model(ModelConfig(model=str(folder)))
    return load_model(source, find_model_class, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("family", "form"), slow_but(FIRST, ((family, form) for family in READ for form in FORMS_OF))
)
def test_quantised_family_gives_the_logits_of_what_it_stands_for(
    family: str, form: str, small_models: dict[str, Path], tmp_path: Path, mini_runner: Any
) -> None:
    pair = quantised(family, small_models, tmp_path, form)
    found, expected = (
        mini_runner(load(folder)).logits(ForwardMode.EXTEND, [PROMPT])
        for folder in (pair.quantised, pair.dense)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("family", slow_but(["glm4"], REFUSED))
def test_quantised_rows_in_another_order_are_refused_by_name(
    family: str, small_models: dict[str, Path], tmp_path: Path
) -> None:
    pair = quantised(family, small_models, tmp_path, ROWS)
    with pytest.raises(ModelLoadError, match=REFUSED[family]):
        load(pair.quantised)
