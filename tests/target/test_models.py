from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from specengine.core.batch import ForwardMode
from specengine.core.config import ModelConfig
from specengine.core.errors import ModelLoadError
from specengine.kernels.linear import split_linear
from specengine.layers.self_attention import PACKED_MODULES
from specengine.runner.loader.load import load_model
from specengine.runner.loader.source import resolve_model
from specengine.target.models.llama import LlamaForCausalLM
from specengine.target.registry import find_model_class
from tests.support.families import FAMILIES, reference_model

PROMPT = [(7 * i * i + 3 * i) % 300 for i in range(70)]
OTHER = [(5 * i * i + i + 11) % 300 for i in range(33)]

VARIANTS: dict[str, dict[str, Any]] = {
    "llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "yarn rope": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "linear rope": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
    },
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied, wide heads": {"tie_word_embeddings": True, "head_dim": 48},
}


Model = Callable[[str], Any]  # by family


def _load(directory: Path, **options: Any) -> Any:
    source = resolve_model(ModelConfig(model=str(directory)))
    cpu = torch.device("cpu")
    return load_model(source, find_model_class, torch.float32, cpu, **options)


@pytest.fixture(scope="module")
def loaded(small_models: dict[str, Path]) -> Model:
    """Of each family one model, for all tests that leave it as it is."""
    return cache(lambda family: _load(small_models[family]))


def _reference(directory: Path, *texts: list[int], family: str = "llama") -> Tensor:
    """Logits of all tokens of the texts, one after the other."""
    model = reference_model(directory, family)
    with torch.no_grad():
        return torch.cat([model(torch.tensor([one])).logits[0] for one in texts])


def _assert_near(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == torch.float32
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(
    family: str, loaded: Model, small_models: dict[str, Path], mini_runner: Any
) -> None:
    runner = mini_runner(loaded(family))
    found = runner.logits(ForwardMode.EXTEND, [PROMPT, OTHER])
    expected = _reference(small_models[family], PROMPT, OTHER, family=family)
    for one, other in zip(
        *(x.split([len(PROMPT), len(OTHER)]) for x in (found, expected)), strict=True
    ):
        _assert_near(one, other)


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_and_parted_checkpoints_load_alike(
    family: str, small_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specengine.runner.loader.load.pack_linears", lambda *_: None)
    folder = small_models[family]
    tensors = load_file(folder / "model.safetensors")
    merged = _merged(tensors)
    other = merged if merged.keys() != tensors.keys() else _parted(tensors)
    assert other.keys() != tensors.keys()
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    save_file(other, tmp_path / "model.safetensors")
    expected, found = _load(folder).state_dict(), _load(tmp_path).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def _merged(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    made = dict(tensors)
    for merged, parts in PACKED_MODULES.items():
        for name in tensors:
            whole = name.replace(f".{parts[0]}.", f".{merged}.")
            names = [name.replace(f".{parts[0]}.", f".{part}.") for part in parts]
            if whole != name and all(one in made for one in names):
                made[whole] = torch.cat([made.pop(one) for one in names])
    return made


def _parted(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of small models: 4 heads over 2 KV heads, of those with query_key_value over 4."""
    made = dict(tensors)
    for name, tensor in tensors.items():
        if ".qkv_proj." in name:
            unit = len(tensor) // 8
            parts = dict(
                zip("qkv", torch.split(made.pop(name), [4 * unit, 2 * unit, 2 * unit]), strict=True)
            )
            made |= {name.replace("qkv", one): part.clone() for one, part in parts.items()}
        elif ".query_key_value." in name:
            heads = made.pop(name).view(4, 3, -1, *tensor.shape[1:])
            for part, of_heads in zip("qkv", heads.unbind(1), strict=True):
                rows = of_heads.reshape(-1, *tensor.shape[1:])
                made[name.replace("query_key_value", f"{part}_proj")] = rows.clone()
        elif ".gate_up_proj." in name:
            gate, up = made.pop(name).chunk(2)
            made[name.replace("gate_up", "gate")] = gate.clone()
            made[name.replace("gate_up", "up")] = up.clone()
    return made


@pytest.mark.parametrize("name", VARIANTS)
def test_llama_variants_equal_transformers(name: str, tmp_path: Path, mini_runner: Any) -> None:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.12,
        **VARIANTS[name],
    )
    reference = transformers.LlamaForCausalLM(config)
    for parameter in reference.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    reference.save_pretrained(tmp_path)
    found = mini_runner(_load(tmp_path)).logits(ForwardMode.EXTEND, [PROMPT])
    _assert_near(found, _reference(tmp_path, PROMPT))


@pytest.mark.parametrize("family", FAMILIES)
def test_extend_in_parts_then_decode_equals_one_extend(
    family: str, loaded: Model, mini_runner: Any
) -> None:
    model = loaded(family)
    whole = mini_runner(model).logits(ForwardMode.EXTEND, [PROMPT])
    runner = mini_runner(model)
    parts = [
        runner.logits(ForwardMode.EXTEND, [PROMPT[:40]]),
        runner.logits(ForwardMode.EXTEND, [PROMPT[40:66]]),
        *(runner.logits(ForwardMode.DECODE, [[token]]) for token in PROMPT[66:]),
    ]
    _assert_near(torch.cat(parts), whole)


@pytest.mark.parametrize("ends", [[3], [1, 3], [1, 2, 3]])
def test_split_prefill_equals_extend(ends: list[int], loaded: Model, mini_runner: Any) -> None:
    model = loaded("llama")
    whole = mini_runner(model).logits(ForwardMode.EXTEND, [PROMPT, OTHER])
    batch = mini_runner(model).batch(ForwardMode.SPLIT_PREFILL, [PROMPT, OTHER])
    results = []
    for end in ends:
        results.append(model.forward_split_prefill(batch.input_ids, batch.positions, batch, end))
        assert batch.split_index == end
    assert all(result is None for result in results[:-1])
    assert torch.equal(model.head.logits(results[-1]), whole)


@pytest.fixture
def unpacked(small_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Model:
    """A family's model with its weights as a GPU keeps them."""
    monkeypatch.setattr("specengine.runner.loader.load.pack_linears", lambda *_: None)
    return lambda family: _load(small_models[family])


def test_split_prefill_carries_products_in_parts(
    unpacked: Model, mini_runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As wide layers leave them on a GPU."""
    model = unpacked("llama")
    whole = mini_runner(model).logits(ForwardMode.EXTEND, [PROMPT])
    monkeypatch.setattr(split_linear, "fits", lambda *_: True)
    batch = mini_runner(model).batch(ForwardMode.SPLIT_PREFILL, [PROMPT])
    model.forward_split_prefill(batch.input_ids, batch.positions, batch, 1)
    assert batch.hidden_states.dim() == 3
    last = model.forward_split_prefill(batch.input_ids, batch.positions, batch, 3)
    _assert_near(model.head.logits(last), whole)


def test_idle_runs_on_zero_tokens(loaded: Model, mini_runner: Any) -> None:
    logits = mini_runner(loaded("llama")).logits(ForwardMode.IDLE, [])
    assert logits.shape == (0, 320)


@pytest.mark.parametrize(("quantization", "error"), [(None, 0.03), ("int8", 0.05), ("int4", 0.5)])
def test_bfloat16_and_quantized_models_are_near(
    quantization: str | None, error: float, small_models: dict[str, Path], mini_runner: Any
) -> None:
    source = resolve_model(ModelConfig(model=str(small_models["llama"])))
    cpu = torch.device("cpu")
    model: Any = load_model(source, find_model_class, torch.bfloat16, cpu, quantization)
    assert not any("_proj" in name for name, _ in model.named_parameters())
    found = mini_runner(model).logits(ForwardMode.EXTEND, [PROMPT])
    expected = _reference(small_models["llama"], PROMPT)
    assert 0 < float((found - expected).norm() / expected.norm()) < error


@pytest.mark.parametrize("family", ["gemma2", "olmo2", "cohere2", "nemotron"])
def test_other_norms_and_activations_in_bfloat16_are_near(
    family: str, small_models: dict[str, Path], mini_runner: Any
) -> None:
    source = resolve_model(ModelConfig(model=str(small_models[family])))
    model: Any = load_model(source, find_model_class, torch.bfloat16, torch.device("cpu"))
    runner = mini_runner(model)
    found = runner.logits(ForwardMode.EXTEND, [PROMPT[:60]])
    decoded = [runner.logits(ForwardMode.DECODE, [[token]]) for token in PROMPT[60:]]
    expected = _reference(small_models[family], PROMPT, family=family)
    error = torch.cat([found, *decoded]) - expected
    assert 0 < float(error.norm() / expected.norm()) < 0.05


def test_registry_names_what_it_knows() -> None:
    assert find_model_class(["Unknown", "LlamaForCausalLM"]) is LlamaForCausalLM
    with pytest.raises(ModelLoadError, match=r"OPTForCausalLM is not supported; known: Llama.*Qw"):
        find_model_class(["OPTForCausalLM"])
    with pytest.raises(ModelLoadError, match=r"\(none named\)"):
        find_model_class([])


def test_other_activations_are_refused() -> None:
    config = transformers.LlamaConfig(hidden_act="quick_gelu")
    with pytest.raises(ModelLoadError, match="'quick_gelu' is not supported; known: silu"):
        LlamaForCausalLM(config)
