"""Drafts change no token of a model from a GGUF file, whose rows and columns are put in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from specengine import LLM, SamplingParams, SpecConfig
from specengine.layers.quantization import linears
from tests.support.drafting import DRAFTS, drafting
from tests.support.families import reference_model, save_small_model
from tests.support.gguf_files import CONVERSIONS, convert

NEW_TOKENS = 14
PROMPTS = [[5, 6, 7] * 9, [(7 * i * i + 3 * i) % 300 for i in range(40)], [9] * 20]
TREE = SpecConfig(
    algorithm="NGRAM", adaptive=False, num_draft_tokens=8, ngram_branches=3, ngram_min_match=1
)


def greedy(file: Path, **flags: Any) -> list[list[int]]:
    llm = LLM(str(file), dtype="float32", max_total_tokens=1024, **flags)
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    return [one.token_ids for one in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("family", ["qwen3next", "qwen3_5", "llama4", "stablelm", "gptneox"])
def test_ngram_trees_say_what_transformers_says(family: str, tmp_path: Path) -> None:
    conversion = CONVERSIONS[family][0]
    folder = save_small_model(family, tmp_path / "small", 3, **conversion.small)
    path = convert(folder, tmp_path / "small.gguf", conversion, has_tokenizer=True)
    outputs = greedy(path, spec=TREE, page_size=16)
    model = reference_model(folder, family)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert len(output) == NEW_TOKENS
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == output


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A Llama's folder, and its file with 4 and 8 bits."""
    root = tmp_path_factory.mktemp("blocks")
    folder = save_small_model("llama", root / "small", 3, intermediate_size=128)
    kinds = {"attn_norm": None, "ffn_norm": None, "attn_": Kind.Q8_0, "ffn_": Kind.Q4_0}
    conversion = CONVERSIONS["llama"][0]
    return folder, convert(folder, root / "m.gguf", conversion, kinds, has_tokenizer=True)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "gguf"])
@pytest.mark.parametrize("drafts", DRAFTS)
def test_each_kind_of_drafts_changes_no_token(
    drafts: str,
    quantization: str | None,
    blocks: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a file that is dequantised, and of blocks that are kept as on a GPU."""
    monkeypatch.setattr(linears, "wants_dense", lambda device: False)
    folder, file = blocks
    flags = {"quantization": quantization, "device": "cpu"}
    spec = drafting(drafts, file, folder, tmp_path)
    assert greedy(file, spec=spec, **flags) == greedy(file, **flags)
