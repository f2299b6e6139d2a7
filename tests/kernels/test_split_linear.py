from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specengine import LLM, SamplingParams
from specengine.core.config import SpecConfig
from specengine.kernels.linear import split_linear
from specengine.layers.linear import Linear
from tests.draft.eagle_checkpoints import oracle_eagle3


def test_the_parts_are_a_product() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 256), torch.randn(96, 256)
    parts = split_linear.split_linear(x, weight)
    assert parts.shape == (split_linear.PARTS, 5, 96)
    torch.testing.assert_close(parts[1], x[:, 128:] @ weight[:, 128:].T)
    torch.testing.assert_close(parts.sum(0), x @ weight.T, rtol=1e-4, atol=1e-4)


def test_a_layer_with_a_bias_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_linear, "fits", lambda x, weight: True)
    x = torch.randn(3, 128)
    for bias, dim in ((False, 3), (True, 2)):
        layer = Linear(128, 64, bias)
        for parameter in layer.parameters():
            parameter.data.normal_()
        assert layer.parts(x).dim() == dim


def test_layers_that_take_parts_say_the_same(
    small_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Target and drafter, the states that the drafter reads included."""
    target = small_models["llama"]
    spec = SpecConfig(
        algorithm="EAGLE3",
        draft_model_path=str(oracle_eagle3(tmp_path / "draft", target, 250, focus=20.0)),
    )
    prompts, params = (
        ["abcabcabc", "x", "to be or not"],
        SamplingParams(max_tokens=24, temperature=0),
    )

    def told() -> list[tuple[list[int], list[int]]]:
        llm = LLM(str(target), spec, dtype="float32", max_total_tokens=1024, device="cpu")
        found = [one.completions[0] for one in llm.generate(prompts, params)]
        return [(one.token_ids, one.spec.histogram) for one in found]

    expected, calls = told(), list[int]()

    def take(x: torch.Tensor, weight: torch.Tensor) -> bool:
        calls.append(len(x))
        return True

    monkeypatch.setattr(split_linear, "fits", take)
    monkeypatch.setattr("specengine.runner.loader.load.pack_linears", lambda *given: None)
    assert told() == expected
    assert calls


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [9, 32, 100, 256])
def test_cublas_gives_the_parts(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x = torch.randn(rows, 14336, device="cuda").to(dtype)
    weight = (torch.randn(4096, 14336, device="cuda") / 120).to(dtype)
    assert split_linear.fits(x, weight)
    assert not split_linear.fits(x[:8], weight)
    parts = split_linear.split_linear(x, weight)
    expected = torch.stack(
        [
            x[:, :7168].double() @ weight[:, :7168].double().T,
            x[:, 7168:].double() @ weight[:, 7168:].double().T,
        ]
    )
    assert parts.dtype == torch.float32
    torch.testing.assert_close(parts, expected.float(), rtol=1e-4, atol=1e-4)
