"""On a GPU, families whose checkpoints have rows in another order say in 4 bits and in FP8 what the
dense models say that they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specengine import LLM, SamplingParams, SpecConfig
from tests.support.families import save_small_model
from tests.support.quantised import FORMATS, Pair, edit_config, quantise_model
from tests.target.test_quantised_families import BLOCKS, FOUR, REORDERED, sizes_of_four_bits

PROMPTS = ["abcabcabcabcabc", "x", "0123456789" * 9]
NGRAM = SpecConfig(algorithm="NGRAM", adaptive=False, num_draft_tokens=6, ngram_min_match=1)
# Inputs stay as they are, which dense models read.
WEIGHTS_ALONE = {
    "quant_method": "compressed-tensors",
    "format": "naive-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "float",
                "strategy": "block",
                "block_structure": [128, 128],
            },
        }
    },
}


def greedy(folder: Path, **flags: Any) -> list[list[int]]:
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    llm = LLM(str(folder), dtype="float32", max_total_tokens=2048, **flags)
    return [one.token_ids for one in llm.generate(PROMPTS, params)]


def quantised(family: str, form: str, models: dict[str, Path], folder: Path) -> Pair:
    source = save_small_model(family, folder / "source", 5, **sizes_of_four_bits(family))
    for path in models[family].glob("*token*"):
        (source / path.name).write_bytes(path.read_bytes())
    pair = quantise_model(source, folder, FORMATS[form])
    if form == BLOCKS:
        edit_config(pair.quantised, quantization_config=WEIGHTS_ALONE)
    return pair


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("form", [BLOCKS, *FOUR])
@pytest.mark.parametrize("family", REORDERED)
def test_reordered_families_say_what_dense_ones_say(
    family: str, form: str, small_models: dict[str, Path], tmp_path: Path
) -> None:
    pair = quantised(family, form, small_models, tmp_path)
    expected = greedy(pair.dense, disable_cuda_graph=True)
    assert greedy(pair.quantised, disable_cuda_graph=True) == expected
    assert greedy(pair.quantised, spec=NGRAM, cuda_graph_bs=(1, 2, 4)) == expected
