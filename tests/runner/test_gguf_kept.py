"""GGUF's blocks that are kept stand for what they are dequantised to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from specengine.core.batch import ForwardMode
from specengine.core.config import EngineConfig, ModelConfig
from specengine.core.errors import ConfigError, ModelLoadError
from specengine.engine.build import load as load_engine_model
from specengine.engine.phases import Phases
from specengine.kernels.linear.quantised import IntWeight
from specengine.layers.experts import Experts
from specengine.layers.linear import Linear
from specengine.layers.quantization import linears
from specengine.layers.quantization.gguf import KEPT, KEPT_OF_EXPERTS, Gguf
from specengine.layers.quantization.linears import QuantisedLinear
from specengine.layers.sparse_mlp import SparseMLP
from specengine.runner.loader.load import load_model
from specengine.runner.loader.source import resolve_model
from specengine.target.registry import find_model_class
from tests.halves import each_value, slow_but
from tests.layers.test_quantization import layer_of
from tests.runner.test_loader_gguf import _small_model, _write
from tests.support.families import save_small_model
from tests.support.gguf_files import CONVERSIONS, convert, forms
from tests.support.quantised_models import PROMPT
from tests.target.conftest import MiniRunner
from tests.target.test_quantised_families import sizes_of_four_bits

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


# Type -> where the float16 of its blocks begin, and whether it has a least value.
HALVES = {
    "q4_0": [0],
    "q4_1": [0, 2],
    "q5_0": [0],
    "q5_1": [0, 2],
    "q8_0": [0],
    "q4_k": [0, 2],
    "q5_k": [0, 2],
    "q6_k": [208],
    "mxfp4": [],
}


def _random_blocks(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Six rows of three blocks, uint8 [6, bytes], and what the library dequantises them to. Random
    bytes, with scales of both signs; in the second row blocks without one, whose weights are all
    the least value."""
    size = gguf.GGML_QUANT_SIZES[Kind[kind.upper()]][1]
    generator = np.random.default_rng(0)
    packed = generator.integers(0, 256, (6, 3 * size), dtype=np.uint8)
    blocks = packed.reshape(6, 3, size)
    for at in HALVES[kind]:
        scales = generator.standard_normal((6, 3)).astype(np.float16)
        scales[1] *= at != HALVES[kind][0]
        blocks[:, :, at : at + 2] = scales[..., None].view(np.uint8)
    if kind == "mxfp4":
        blocks[:, :, 0] = generator.integers(120, 132, (6, 3))
    expected = gguf.quants.dequantize(packed, Kind[kind.upper()])
    return torch.from_numpy(packed), torch.from_numpy(expected)


@pytest.mark.parametrize("kind", HALVES)
def test_blocks_are_what_the_library_dequantises(kind: str) -> None:
    packed, expected = _random_blocks(kind)
    layer = layer_of({kind: packed}, *expected.shape)
    made = Gguf().read(layer)
    layer.finish()
    torch.testing.assert_close(made.dequantised(), expected, rtol=1e-6, atol=1e-5)
    assert made.num_bytes * 8 <= 10 * expected.numel()


@pytest.mark.parametrize("together", [32, 1])
@pytest.mark.parametrize("kind", sorted(KEPT))
def test_columns_come_in_the_order_that_is_told(kind: str, together: int) -> None:
    """Codes are moved where groups of 32 or fewer stay together, else inputs are."""
    packed, expected = _random_blocks(kind)
    first = torch.randperm(expected.shape[1] // together, generator=torch.manual_seed(1))
    order = (first[:, None] * together + torch.arange(together)).view(-1)
    layer = layer_of({kind: packed, "column_order": order}, *expected.shape)
    made = Gguf().read(layer)
    layer.finish()
    assert isinstance(made, IntWeight)
    assert (made.order is None) == (together == 32)
    torch.testing.assert_close(made.dequantised(), expected[:, order], rtol=1e-6, atol=1e-5)


def test_all_types_that_are_kept_are_tested() -> None:
    assert set(HALVES) == KEPT_OF_EXPERTS
    assert {"mxfp4"} == KEPT_OF_EXPERTS - KEPT


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


# Family -> fields of its small model whose sizes are whole blocks.
EXPERTS = {
    "qwen3moe": {"moe_intermediate_size": 64},
    "qwen2moe": {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 96},
    "mixtral": {"intermediate_size": 64},
    "gptoss": {"intermediate_size": 64},
    "deepseekv3": {"moe_intermediate_size": 64},
    "ernie4_5_moe": {"moe_intermediate_size": 64},
    "llama4": {"intermediate_size_mlp": 64},
    "qwen3_5moe": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96},
}
TYPES = {
    "as the file": {"ffn_gate_exps.weight": "Q4_0", "ffn_up_exps.weight": "Q4_0",
                    "ffn_down_exps.weight": "Q5_1", "attn_q.weight": "Q8_0"},
    "mxfp4": {"_exps.weight": "MXFP4"},
}  # fmt: skip


@pytest.mark.parametrize(("family", "types"), each_value(1, EXPERTS, TYPES))
def test_experts_stay_in_their_blocks(
    family: str, types: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense, kept = _both(family, TYPES[types], tmp_path, monkeypatch)
    for layer, expected in zip(kept.model.layers, dense.model.layers, strict=True):
        if not isinstance(expected.mlp, SparseMLP):
            continue  # DeepSeek's first
        experts, wide = layer.mlp.experts, expected.mlp.experts
        assert experts.packed is not None
        x = torch.randn(5, 64)
        chosen = expected.mlp.gate.choose(x)
        torch.testing.assert_close(experts(x, chosen), wide(x, chosen), rtol=1e-4, atol=1e-4)
        bits = experts.packed.gate_up.num_bytes * 8 / wide.gate_up.numel()
        filled = 128 / 64  # columns of MXFP4, to a whole chunk
        assert bits == (4.25 * filled if types == "mxfp4" else 4.5)


@pytest.mark.parametrize("kind", ["Q4_0", "MXFP4"])
def test_experts_whose_gate_and_up_are_one_tensor_stay_in_their_blocks(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense, kept = _both("qwen3_5moe", {"_exps.weight": kind}, tmp_path, monkeypatch, form=1)
    for layer, expected in zip(kept.model.layers, dense.model.layers, strict=True):
        experts, wide = layer.mlp.experts, expected.mlp.experts
        assert experts.packed is not None
        x = torch.randn(5, 64)
        chosen = expected.mlp.gate.choose(x)
        torch.testing.assert_close(experts(x, chosen), wide(x, chosen), rtol=1e-4, atol=1e-4)


def test_experts_in_two_types_become_dense_and_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """gate and up are one product. The first layer's differ; the second's down is not quantised."""
    types = {
        "blk.0.ffn_gate_exps.weight": "Q4_0",
        "blk.0.ffn_up_exps.weight": "Q4_1",
        "blk.0.ffn_down_exps.weight": "Q4_0",
        "blk.1.ffn_gate_exps.weight": "Q4_0",
        "blk.1.ffn_up_exps.weight": "Q4_0",
    }
    types |= {f"blk.2.ffn_{one}_exps.weight": "Q4_0" for one in ("gate", "up", "down")}
    dense, kept = _both("qwen3moe", types, tmp_path, monkeypatch)
    packed = [layer.mlp.experts.packed is not None for layer in kept.model.layers]
    assert packed == [False, False, True]
    assert "experts of 2 of 3 layers become dense" in caplog.text
    for layer, expected in zip(kept.model.layers[:2], dense.model.layers, strict=False):
        torch.testing.assert_close(layer.mlp.experts.gate_up, expected.mlp.experts.gate_up)
        torch.testing.assert_close(layer.mlp.experts.down, expected.mlp.experts.down)


# Family, form, types of q and k, which the family reorders; v is in floating point in one.
PAIRED = {
    "apart": ("cohere2", 0, {"attn_q": "Q4_0", "attn_k": "Q8_0", "attn_v": "Q4_0"}),
    "pairs of all heads": ("ernie4_5_moe", 0, {"attn_q": "Q8_0", "attn_k": "Q8_0"}),
    "a part rotated": ("glm", 0, {"attn_q.weight": "Q4_0", "attn_k.weight": "Q4_0"}),
    "merged": ("glm", 1, {"attn_qkv.weight": "Q4_0"}),
    "merged, in floating point": ("glm", 1, {"attn_qkv.weight": "F16"}),
}


@pytest.mark.parametrize("form", PAIRED)
def test_rows_in_rotary_pairs_are_reordered_in_their_blocks(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    family, number, types = PAIRED[form]
    dense, kept = _both(family, types, tmp_path, monkeypatch, number)
    assert "tensors become dense" not in caplog.text
    x = torch.randn(3, 64)
    for layer, expected in zip(kept.model.layers, dense.model.layers, strict=True):
        found = layer.self_attn.qkv_proj
        assert isinstance(found.kernel, QuantisedLinear) == ("floating" not in form)
        expected = expected.self_attn.qkv_proj(x)
        torch.testing.assert_close(found(x), expected, rtol=1e-4, atol=1e-4)


def test_types_that_no_product_multiplies_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dense, kept = _both("cohere2", {"attn_q": "Q4_0", "attn_v": "MXFP4", "ffn_up": "MXFP4"},
                        tmp_path, monkeypatch)  # fmt: skip
    layers = len(kept.model.layers)
    assert f"multiplies their blocks: {2 * layers} in mxfp4" in caplog.text
    x = torch.randn(3, 64)
    for layer, expected in zip(kept.model.layers, dense.model.layers, strict=True):
        found = layer.self_attn.qkv_proj(x)
        torch.testing.assert_close(found, expected.self_attn.qkv_proj(x), rtol=1e-4, atol=1e-4)


# Family -> types of a gated delta layer's matrices.
DELTA = {
    "qwen3next": {"attn_qkv": "Q4_0", "attn_gate": "Q4_0", "ssm_ba": "Q8_0", "ssm_out": "Q4_1"},
    "qwen3_5": {
        "attn_qkv": "Q4_0",
        "attn_gate": "Q8_0",
        "ssm_beta": "Q8_0",
        "ssm_alpha": "Q8_0",
        "ssm_out": "Q8_0",
    },
}


@pytest.mark.parametrize("family", DELTA)
def test_gated_delta_layers_stay_in_their_blocks(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dense, kept = _both(family, DELTA[family], tmp_path, monkeypatch)
    assert "tensors become dense" not in caplog.text
    pairs = [
        (layer.linear_attn, expected.linear_attn)
        for layer, expected in zip(kept.model.layers, dense.model.layers, strict=True)
        if expected.spec.gated_delta is not None
    ]
    assert len(pairs) == 2
    for layer, expected in pairs:
        for name in ("in_proj_qkvz", "in_proj_ba", "out_proj"):
            linear, wide = getattr(layer, name), getattr(expected, name)
            assert isinstance(linear.kernel, QuantisedLinear)
            assert all(part.order is None for part in linear.kernel.parts)
            x = torch.randn(3, wide.in_features)
            torch.testing.assert_close(linear(x), wide(x), rtol=1e-4, atol=1e-4)


# Matrices of layers by their type in a whole model.
WHOLE = {
    "Q8_0": (
        *("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output", "attn_gate"),
        *("attn_q_a", "attn_q_b", "attn_kv_a_mqa"),
        *("ssm_in", "ssm_ba", "ssm_beta", "ssm_alpha", "ssm_out"),
    ),
    "Q4_0": (
        *("ffn_gate", "ffn_up", "ffn_down"),
        *("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"),
        *("ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps", "ffn_down_exps"),
    ),
}
# Routers and gates are not quantised, and what latents become is read by attention.
FLOATING = {"lm_head", "gate", "shared_expert_gate", "kv_b_proj"}
# But for a form with a layer for MTP, which is no whole one there.
WHOLE_MODELS = [one for one in forms() if one != ("qwen3_5", 1)]


@pytest.mark.parametrize(("family", "form"), slow_but([("glm4moe", 0), ("phi3", 0)], WHOLE_MODELS))
def test_model_whose_matrices_all_stay_in_their_blocks_gives_the_dequantised_logits(
    family: str,
    form: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    types = {f"{name}.weight": kind for kind, names in WHOLE.items() for name in names}
    dense, kept = _both(family, types, tmp_path, monkeypatch, form)
    assert "become dense" not in caplog.text
    experts = [one.packed for one in kept.modules() if isinstance(one, Experts)]
    assert None not in experts
    floating = {
        name.rpartition(".")[2]
        for name, one in kept.named_modules()
        if isinstance(one, Linear) and not isinstance(one.kernel, QuantisedLinear)
    }
    assert floating <= FLOATING
    found, expected = (
        MiniRunner(one).logits(ForwardMode.EXTEND, [PROMPT]) for one in (kept, dense)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def _both(
    family: str,
    types: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    form: int = 0,
) -> tuple[Any, Any]:
    """The same file dequantised, and kept as on a GPU."""
    conversion = CONVERSIONS[family][form]
    sizes = sizes_of_four_bits(family) | {"intermediate_size": 64}
    fields = {**conversion.small, **sizes, **EXPERTS.get(family, {})}
    folder = save_small_model(family, tmp_path / "small", 3, **fields)
    kinds = {name: Kind[kind] for name, kind in types.items()}
    path = convert(folder, tmp_path / "m.gguf", conversion, kinds)
    monkeypatch.setattr("specengine.runner.loader.load.pack_linears", lambda *_: None)
    dense = load(path, None)
    monkeypatch.setattr(linears, "wants_dense", lambda device: False)
    return dense, load(path, "gguf")


def test_another_target_than_gguf_is_refused(small_models: dict[str, Path]) -> None:
    model = ModelConfig(model=str(small_models["llama"]), quantization="gguf", device="cpu")
    with pytest.raises(ConfigError, match=r"--quantization gguf, but .* is not a GGUF file"):
        load_engine_model(EngineConfig(model=model), Phases())
