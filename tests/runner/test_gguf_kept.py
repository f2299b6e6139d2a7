"""GGUF's blocks that are kept stand for what they are dequantised to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from specengine.core.config import EngineConfig, ModelConfig
from specengine.core.errors import ConfigError, ModelLoadError
from specengine.engine.build import load as load_engine_model
from specengine.engine.phases import Phases
from specengine.kernels.linear.quantised import IntWeight
from specengine.layers.linear import Linear
from specengine.layers.quantization import linears
from specengine.layers.quantization.gguf import KEPT, Gguf
from specengine.layers.quantization.linears import QuantisedLinear
from specengine.runner.loader.load import load_model
from specengine.runner.loader.source import resolve_model
from specengine.target.registry import find_model_class
from tests.layers.test_quantization import layer_of
from tests.runner.test_loader_gguf import _small_model, _write

# One type for each of the parts that are joined, and two that cannot be joined.
KINDS = {
    "q_proj": Kind.Q4_0,
    "k_proj": Kind.Q4_0,
    "v_proj": Kind.Q8_0,
    "o_proj": Kind.Q4_1,
    "gate_proj": Kind.Q4_1,
    "up_proj": Kind.Q4_1,
    "down_proj": Kind.F16,
    "embed_tokens": Kind.Q8_0,
    "lm_head": Kind.Q8_0,
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    model = _small_model("LlamaForCausalLM")
    _write(tmp_path / "m.gguf", "llama", model, kinds=KINDS)
    return tmp_path / "m.gguf"


def load(file: Path, quantization: str | None) -> Any:
    source = resolve_model(ModelConfig(model=str(file)))
    cpu = torch.device("cpu")
    return load_model(source, find_model_class, torch.float32, cpu, quantization)


@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q8_0"])
def test_blocks_are_what_the_library_dequantises(kind: str) -> None:
    values = np.random.default_rng(0).standard_normal((6, 96)).astype(np.float32)
    values[2, 32:64] = 0.37  # a level block, which has no scale in q4_1
    packed = gguf.quants.quantize(values, Kind[kind.upper()])
    layer = layer_of({kind: torch.from_numpy(packed)}, 6, 96)
    made = Gguf().read(layer)
    layer.finish()
    expected = torch.from_numpy(gguf.quants.dequantize(packed, Kind[kind.upper()]))
    torch.testing.assert_close(made.dequantised(), expected, rtol=1e-6, atol=1e-7)
    assert packed.shape[1] == 3 * KEPT[kind]


def test_a_model_keeps_what_it_can(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = load(file, None)
    dense_state = {
        name: module for name, module in dense.named_modules() if isinstance(module, Linear)
    }
    monkeypatch.setattr(linears, "wants_dense", lambda device: False)
    kept = load(file, "gguf")
    x = {64: torch.randn(3, 64), 96: torch.randn(3, 96)}
    for name, module in kept.named_modules():
        if isinstance(module, Linear):
            given = x[module.in_features]
            torch.testing.assert_close(
                module(given), dense_state[name](given), rtol=1e-4, atol=1e-4
            )
            assert isinstance(module.kernel, QuantisedLinear) == ("down_proj" not in name)
    attention = kept.model.layers[1].self_attn
    assert [part.bits for part in attention.qkv_proj.kernel.parts] == [4, 4, 8]
    assert isinstance(attention.o_proj.kernel.parts[0], IntWeight)
    assert len(kept.model.layers[0].mlp.gate_up_proj.kernel.parts) == 1
    assert torch.equal(kept.model.embed_tokens.weight, dense.model.embed_tokens.weight)


def test_a_block_of_another_size_is_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"q4_0 has shape \[4, 17\]"):
        Gguf().read(layer_of({"q4_0": torch.zeros(4, 17, dtype=torch.uint8)}, 4, 32))


def test_random_blocks_are_of_the_usual_size() -> None:
    tensors = Gguf().random(64, 96, torch.Generator().manual_seed(0))
    made = Gguf().read(layer_of(tensors, 64, 96)).dequantised()
    assert 0.01 < float(made.std()) < 0.05


def test_another_target_than_gguf_is_refused(small_models: dict[str, Path]) -> None:
    model = ModelConfig(model=str(small_models["llama"]), quantization="gguf", device="cpu")
    with pytest.raises(ConfigError, match=r"--quantization gguf, but .* is not a GGUF file"):
        load_engine_model(EngineConfig(model=model), Phases())
