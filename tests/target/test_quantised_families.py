"""Each family reads products as published checkpoints quantise them, whatever order their rows have
there."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from specengine.core.batch import ForwardMode
from specengine.kernels.linear.quantised import Fp8Weight, IntWeight
from specengine.layers.quantization import linears
from specengine.layers.quantization.linears import QuantisedLinear
from tests.halves import slow_but
from tests.support.families import FAMILIES, save_small_model, small_config
from tests.support.quantised import FORMATS, Pair, quantise_model
from tests.support.quantised_models import PROMPT, difference, load

EIGHT = (BLOCKS, ROWS) = "fp8 blocks of 128", "compressed fp8 rows"
FOUR = (AWQ, GPTQ, W4A16) = "awq", "gptq act-order", "compressed w4a16 asymmetric"
# What a family does with its products shows in those above; these are for make test-all alone.
MORE_OF_EIGHT = ("fp8 tensor", "modelopt")
MORE_OF_FOUR = ("gptq", "compressed w4a16 act-order")
# Their checkpoints have rows of q and k, or of q, k and v, in another order.
REORDERED = ("glm", "glm4", "cohere2", "ernie4_5_moe", "llama4", "gptneox", "qwen3next")
# The fast half: one of each way in which families name, join and order their products.
FIRST = [
    ("phi3", ROWS),
    ("phi3", GPTQ),
    ("gemma3", BLOCKS),
    ("starcoder2", ROWS),
    ("glm4", BLOCKS),
    ("glm4", AWQ),
    ("glm4moe", ROWS),
    ("mixtral", BLOCKS),
    ("gptoss", BLOCKS),
    ("qwen3next", W4A16),
    ("qwen3_5moe", ROWS),
    ("deepseekv2", BLOCKS),
    ("gptneox", ROWS),
    ("gptneox", GPTQ),
]
CASES = [*product(FAMILIES, EIGHT + MORE_OF_EIGHT + FOUR + MORE_OF_FOUR)]
# Sizes of small models that are no multiple of what 4 bits share a scale for.
_SIZES = (
    "intermediate_size",
    "intermediate_size_mlp",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "q_lora_rank",
    "v_head_dim",
)


def sizes_of_four_bits(family: str) -> dict[str, int]:
    """The next powers of 2."""
    config = small_config(family)
    found = {name: getattr(config, name, None) for name in _SIZES}
    return {name: 1 << (size - 1).bit_length() for name, size in found.items() if size}


def quantised(family: str, small_models: dict[str, Path], folder: Path, form: str) -> Pair:
    source = small_models[family]
    if form in FOUR + MORE_OF_FOUR:
        source = save_small_model(family, folder / "source", 5, **sizes_of_four_bits(family))
    pair = quantise_model(source, folder, FORMATS[form])
    whole, packed = (
        load_file(one / "model.safetensors").keys() for one in (pair.dense, pair.quantised)
    )
    assert any("attention" in name or "attn" in name for name in packed - whole)
    return pair


@pytest.mark.parametrize(
    ("family", "form"),
    slow_but(FIRST, CASES),
)
def test_quantised_family_gives_the_logits_of_what_it_stands_for(
    family: str, form: str, small_models: dict[str, Path], tmp_path: Path, mini_runner: Any
) -> None:
    assert difference(quantised(family, small_models, tmp_path, form), mini_runner) < 1e-5


@pytest.mark.parametrize(
    ("family", "form"),
    slow_but([("glm4", W4A16), ("gptneox", GPTQ)], product(REORDERED, FOUR)),
)
def test_reordered_products_that_stay_quantised_give_the_same_logits(
    family: str,
    form: str,
    small_models: dict[str, Path],
    tmp_path: Path,
    mini_runner: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU, with the reference's products."""
    pair = quantised(family, small_models, tmp_path, form)
    expected = mini_runner(load(pair.dense)).logits(ForwardMode.EXTEND, [PROMPT])
    monkeypatch.setattr(linears, "wants_dense", lambda device: False)
    model = load(pair.quantised)
    names = ("self_attn.qkv_proj", "in_proj_qkvz")
    kernels = [one.kernel for name, one in model.named_modules() if name.endswith(names)]
    assert kernels
    assert all(isinstance(one, QuantisedLinear) and len(one.parts) == 1 for one in kernels)
    found = mini_runner(model).logits(ForwardMode.EXTEND, [PROMPT])
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-4


@pytest.mark.parametrize("form", [ROWS, W4A16])
@pytest.mark.parametrize("family", slow_but(["glm4", "gptneox"], REORDERED))
def test_rows_left_in_a_checkpoint_s_order_give_other_logits(
    family: str,
    form: str,
    small_models: dict[str, Path],
    tmp_path: Path,
    mini_runner: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for kind in (Fp8Weight, IntWeight):
        monkeypatch.setattr(kind, "take_rows", lambda weight, rows: weight)
    assert difference(quantised(family, small_models, tmp_path, form), mini_runner) > 1e-2
