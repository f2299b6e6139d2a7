"""Drafts change no token of a model from a GGUF file, whose rows and columns are put in order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specengine import LLM, SamplingParams, SpecConfig
from tests.support.families import reference_model, save_small_model
from tests.support.gguf_files import CONVERSIONS, convert

NEW_TOKENS = 14
PROMPTS = [[5, 6, 7] * 9, [(7 * i * i + 3 * i) % 300 for i in range(40)], [9] * 20]
TREE = SpecConfig(
    algorithm="NGRAM", adaptive=False, num_draft_tokens=8, ngram_branches=3, ngram_min_match=1
)


@pytest.mark.parametrize("family", ["qwen3next", "qwen3_5", "llama4", "stablelm", "gptneox"])
def test_ngram_trees_say_what_transformers_says(family: str, tmp_path: Path) -> None:
    conversion = CONVERSIONS[family][0]
    folder = save_small_model(family, tmp_path / "small", 3, **conversion.small)
    path = convert(folder, tmp_path / "small.gguf", conversion, has_tokenizer=True)
    llm = LLM(str(path), dtype="float32", max_total_tokens=1024, spec=TREE, page_size=16)
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    outputs = [one.token_ids for one in llm.generate(PROMPTS, params)]
    model = reference_model(folder, family)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert len(output) == NEW_TOKENS
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == output
