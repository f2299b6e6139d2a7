"""A model with 4-bit weights on the CUDA kernels, emulated on a CPU: rounds multiply more rows than
plain decoding, by another kernel."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from specengine import LLM, SamplingParams, SpecConfig
from specengine.kernels.cuda import program
from specengine.kernels.linear import int_linear, int_linear_cuda
from specengine.layers.quantization import linears
from tests.draft import eagle_checkpoints
from tests.kernels.emulated_cuda import Compiled, EmulatedKernel
from tests.support.families import save_small_model
from tests.support.quantised import FORMATS, Format, gptq, quantise_model

W4A16 = Format(
    FORMATS["gptq asymmetric"].config | {"group_size": 128},
    lambda weight: gptq(weight, 4, 128, False, False, 1),
)
PROMPTS = ["x", "ab", "abc", "0"]


@pytest.fixture
def kernels(emulated: Compiled, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each was launched."""
    launched = Counter[str]()

    def compiled(
        source: Path, name: str, defines: tuple[tuple[str, int], ...], *rest: Any
    ) -> EmulatedKernel:
        launched[name] += 1
        launched[f"{name} with activation"] += dict(defines)["GATED"]
        return emulated(source, name, defines, *rest)

    monkeypatch.setattr(int_linear_cuda, "compiled", compiled)
    monkeypatch.setattr(int_linear_cuda, "has_warpgroups", lambda x: True)
    monkeypatch.setattr(int_linear, "has_dependent_launch", lambda x: True)
    monkeypatch.setattr(program, "available", lambda: True)
    monkeypatch.setattr(linears, "wants_dense", lambda device: False)
    return launched


def test_rounds_of_more_than_16_rows_change_no_token(
    kernels: Counter[str], small_models: dict[str, Path], tmp_path: Path
) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 128, "head_dim": 32}
    source = save_small_model("llama", tmp_path / "source", 5, **sizes)
    for path in small_models["llama"].glob("*token*"):
        (source / path.name).write_bytes(path.read_bytes())
    pair = quantise_model(source, tmp_path, W4A16)
    draft = eagle_checkpoints.eagle3(tmp_path / "draft", pair.dense)

    def greedy(spec: SpecConfig | None = None) -> list[list[int]]:
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        given = {"dtype": "bfloat16", "max_total_tokens": 256, "device": "cpu"}
        llm = LLM(str(pair.quantised), spec, **given)
        return [one.token_ids for one in llm.generate(PROMPTS, params)]

    expected = greedy()
    assert kernels["int4_rows with activation"] > 0
    assert kernels["int4_wgmma"] == 0
    spec = SpecConfig(algorithm="EAGLE3", num_steps=5, draft_model_path=str(draft), adaptive=False)
    assert greedy(spec) == expected
    assert kernels["int4_wgmma with activation"] > 0
