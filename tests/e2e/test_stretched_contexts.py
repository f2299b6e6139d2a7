"""--context-length beyond max_position_embeddings, where the rotary scaling says a factor."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.errors import ConfigError

PROMPT = [(7 * n) % 300 + 5 for n in range(100)]
SERVED = 120


def scaled(folder: Path, target: Path, kind: str) -> Path:
    """A copy of 64 positions and a factor of 4."""
    shutil.copytree(target, folder)
    path = folder / "config.json"
    rope: dict[str, Any] = {"rope_type": kind, "factor": 4.0, "rope_theta": 1e4}
    if kind == "dynamic":  # which does not read it
        rope["original_max_position_embeddings"] = 32
    fields = {"max_position_embeddings": 64, "rope_parameters": rope}
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


@pytest.mark.parametrize("kind", ["linear", "dynamic"])
@pytest.mark.parametrize("algorithm", [None, "NGRAM"])
def test_tokens_are_those_of_transformers(
    kind: str, algorithm: str | None, small_models: dict[str, Path], tmp_path: Path
) -> None:
    """Whose "dynamic" goes by the length of each text: here that is the context, every time."""
    from transformers import AutoModelForCausalLM

    folder = scaled(tmp_path / "m", small_models["llama"], kind)
    reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = list(PROMPT)
    for _ in range(SERVED - len(PROMPT)):
        whole = torch.tensor([text + [0] * (SERVED - len(text))])
        text.append(int(reference(whole).logits[0, len(text) - 1].argmax()))
    spec = SpecConfig(algorithm=algorithm)
    llm = LLM(str(folder), spec, dtype="float32", max_total_tokens=512, context_length=SERVED)
    greedy = SamplingParams(max_tokens=SERVED, temperature=0.0, ignore_eos=True)
    assert llm.generate([PROMPT], greedy)[0].token_ids == text[len(PROMPT) :]


def test_beyond_the_factor_is_refused(small_models: dict[str, Path], tmp_path: Path) -> None:
    folder = scaled(tmp_path / "m", small_models["llama"], "dynamic")
    with pytest.raises(ConfigError, match="--context-length 257 exceeds the 256 positions"):
        LLM(str(folder), context_length=257)
