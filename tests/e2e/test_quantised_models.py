"""Whole models from quantised checkpoints say what the dense models say that they stand for. On a
GPU that is with inputs rounded to FP8 where the checkpoint asks for it, which a CPU does not."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specengine import LLM, SamplingParams
from specengine.core.batch import ForwardMode
from specengine.core.config import ModelConfig
from specengine.core.errors import ConfigError, ModelLoadError
from specengine.core.request import TokenLogprob
from specengine.engine.llm import Generation
from specengine.layers.experts import Experts
from specengine.layers.linear import Linear
from specengine.layers.quantization import linears
from specengine.layers.quantization.linears import QuantisedLinear
from specengine.runner.loader.load import load_model
from specengine.runner.loader.source import resolve_model
from specengine.target.registry import find_model_class
from tests.e2e.near_ties import assert_same_but_for_ties
from tests.halves import slow_but
from tests.support.drafting import DRAFTS, NGRAM, drafting
from tests.support.families import reference_model, save_small_model
from tests.support.quantised import FORMATS, Pair, edit_config, quantise_model
from tests.support.quantised_models import PROMPT
from tests.target.conftest import MiniRunner

PROMPTS = ["abcabcabcabcabc", "x", "0123456789" * 9]
# One of each kind of weight goes through drafts of text and of a model in make test.
DRAFTED = ("fp8 blocks", "gptq act-order")
MORE_DRAFTED = (
    *("fp8 tensor", "compressed fp8 rows", "modelopt", "awq", "gptq"),
    *("compressed w4a16", "compressed w4a16 act-order"),
)
ON_LOAD = ("fp8", "int8", "int4")
STATIC = 0.7  # the scale of inputs that checkpoints publish
# Inputs that are rounded to FP8, and the columns that have a scale of their own; 0 is a whole row.
ROUNDED: dict[str, int | float] = {
    "fp8 tensor": 0,
    "fp8 static": STATIC,
    "fp8 blocks": 32,
    "fp8 blocks of 128": 0,
    "compressed fp8 static": STATIC,
    "compressed fp8 rows": 0,
    "compressed fp8 blocks": 32,
    "modelopt": STATIC,
    "modelopt in its own file": STATIC,
    "modelopt rows": 0,
    "modelopt rows in its own file": 0,
}


@pytest.fixture(scope="module")
def source(small_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of sizes that all formats pack."""
    folder = tmp_path_factory.mktemp("quantised") / "source"
    save_small_model("llama", folder, 5, intermediate_size=128)
    for path in small_models["llama"].glob("*token*"):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture(scope="module")
def pairs(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    root = tmp_path_factory.mktemp("pairs")
    return {
        name: quantise_model(source, root / str(index), form)
        for index, (name, form) in enumerate(FORMATS.items())
    }


def answers(folder: Path, logprobs: int | None = None, **flags: Any) -> list[Generation]:
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True, logprobs=logprobs)
    llm = LLM(str(folder), **{"dtype": "float32", "max_total_tokens": 2048, **flags})
    return llm.generate(PROMPTS, params)


def greedy(folder: Path, **flags: Any) -> list[list[int]]:
    return [one.token_ids for one in answers(folder, **flags)]


def load(folder: Path, quantization: str | None = None, **options: Any) -> Any:
    found = resolve_model(ModelConfig(model=str(folder), **options))
    cpu = torch.device("cpu")
    return load_model(found, find_model_class, torch.float32, cpu, quantization)


def rounded(x: torch.Tensor, form: float) -> torch.Tensor:
    """As inputs are rounded to FP8. form: of ROUNDED."""
    groups = x.reshape(-1, x.shape[-1] if form in (0, STATIC) else int(form))
    scale = groups.abs().amax(1, keepdim=True) / 448
    if form == STATIC:
        scale = torch.full_like(scale, STATIC)
    codes = (groups / scale.clamp_min(1e-12)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.float() * scale).view(x.shape)


def reference_logprobs(
    folder: Path, form: float | None, tokens: list[list[int]]
) -> list[torch.Tensor]:
    """float32 [V] at each place of each text, of transformers' dense model, whose layers read
    inputs rounded as `form` says; None is not at all."""
    model = reference_model(folder, "llama")
    for name, module in model.named_modules():
        if form is not None and name.endswith("_proj") and not name.endswith("0.mlp.down_proj"):
            module.register_forward_pre_hook(lambda _, given: (rounded(given[0], form),))
    with torch.no_grad():
        return [model(torch.tensor([one])).logits[0].log_softmax(-1) for one in tokens]


@pytest.mark.parametrize("name", list(FORMATS))
def test_greedy_tokens_on_a_cpu_equal_those_of_the_dense_model(
    name: str, pairs: dict[str, Pair]
) -> None:
    pair = pairs[name]
    assert greedy(pair.quantised, device="cpu") == greedy(pair.dense, device="cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ROUNDED])
def test_greedy_tokens_on_a_gpu_equal_those_of_the_dense_model_where_inputs_are_not_rounded(
    name: str, pairs: dict[str, Pair]
) -> None:
    assert greedy(pairs[name].quantised) == greedy(pairs[name].dense)


@pytest.mark.parametrize("name", list(ROUNDED))
def test_logprobs_are_those_of_a_dense_model_with_rounded_inputs(
    name: str, pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU with the products of a GPU, in PyTorch. Where a value lies between two codes, either
    may be taken: a small part of what rounding changes altogether."""
    monkeypatch.setattr(linears, "wants_dense", lambda device: False)
    pair = pairs[name]
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True, logprobs=3)
    llm = LLM(str(pair.quantised), dtype="float32", max_total_tokens=2048)
    made = [one.completions[0] for one in llm.generate(PROMPTS, params)]
    prompts = [llm.tokenizer(one)["input_ids"] for one in PROMPTS]
    texts = [given + one.token_ids for given, one in zip(prompts, made, strict=True)]

    def distance(form: float | None) -> float:
        expected = reference_logprobs(pair.dense, form, texts)
        return sum(
            abs(value - float(row[token]))
            for given, one, rows in zip(prompts, made, expected, strict=True)
            for place, row in zip(one.logprobs, rows[len(given) - 1 :], strict=False)
            for token, value in alternatives(place)
        )

    assert distance(ROUNDED[name]) < 0.05 * distance(None)


@pytest.mark.parametrize("name", ["modelopt blocks", "modelopt blocks in its own file"])
def test_blocks_of_modelopt_have_a_scale_each_and_round_no_input(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of 2 x 2, 3 x 2 and 2 x 3 blocks, as on a GPU, in PyTorch."""
    monkeypatch.setattr(linears, "wants_dense", lambda device: False)
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2}
    plain = save_small_model("llama", tmp_path / "plain", 5, **sizes)
    pair = quantise_model(plain, tmp_path, FORMATS[name])
    model = load(pair.quantised)
    scales = {
        path: one.kernel.parts[0].scale for path, one in model.named_modules() if is_kernel(one)
    }
    assert scales["model.layers.1.mlp.down_proj"].shape == (2, 3)
    assert len(scales["model.layers.1.mlp.down_proj"].unique()) == 6
    found, expected = (
        MiniRunner(one).logits(ForwardMode.EXTEND, [PROMPT]) for one in (model, load(pair.dense))
    )
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5


def alternatives(place: TokenLogprob) -> list[tuple[int, float]]:
    return [(place.token, place.logprob), *place.top]


SPARSE: dict[str, dict[str, Any]] = {
    "deepseekv3": {"q_lora_rank": 32, "v_head_dim": 16},  # sizes that 4 bits pack
    "qwen3moe": {},
}


@pytest.fixture(scope="module", params=list(SPARSE))
def sparse(
    request: pytest.FixtureRequest, source: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A small model with experts."""
    folder = tmp_path_factory.mktemp("sparse") / request.param
    sizes = {"moe_intermediate_size": 64, "intermediate_size": 128, **SPARSE[request.param]}
    save_small_model(request.param, folder, 5, **sizes)
    for path in source.glob("*token*"):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.mark.parametrize("name", ["fp8 blocks of 128", "gptq"])
def test_experts_are_dequantised(name: str, sparse: Path, tmp_path: Path) -> None:
    """DeepSeek-V3 and Qwen3-MoE publish the former; rows of k and v of its heads begin inside a
    block here."""
    pair = quantise_model(sparse, tmp_path / "made", FORMATS[name])
    tokens = [[5, 9, 301, 17, 4]]
    found, expected = (
        MiniRunner(load(folder)).logits(ForwardMode.EXTEND, tokens)
        for folder in (pair.quantised, pair.dense)
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["compressed w4a16", "gptq act-order"])
def test_experts_in_their_format_say_what_dense_ones_say(
    name: str, sparse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, with the reference's products."""
    monkeypatch.setattr(linears, "wants_dense", lambda device: False)
    pair = quantise_model(sparse, tmp_path / "made", FORMATS[name])
    model = load(pair.quantised)
    packed = [one.packed for one in model.modules() if isinstance(one, Experts)]
    assert packed
    assert None not in packed
    tokens = [[5, 9, 301, 17, 4]]
    found = MiniRunner(model).logits(ForwardMode.EXTEND, tokens)
    expected = MiniRunner(load(pair.dense)).logits(ForwardMode.EXTEND, tokens)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["fp8 blocks of 128", "compressed fp8 rows", "awq"])
def test_rounds_in_graphs_with_quantised_experts_change_no_token(
    name: str, sparse: Path, tmp_path: Path
) -> None:
    pair = quantise_model(sparse, tmp_path / "made", FORMATS[name])
    expected = greedy(pair.quantised, disable_cuda_graph=True)
    assert greedy(pair.quantised, spec=NGRAM, cuda_graph_bs=(1, 2, 4)) == expected


@pytest.mark.slow
def test_drafts_change_no_token_of_quantised_experts(sparse: Path, tmp_path: Path) -> None:
    pair = quantise_model(sparse, tmp_path / "made", FORMATS["fp8 blocks of 128"])
    expected = greedy(pair.dense)
    assert greedy(pair.quantised) == expected
    assert greedy(pair.quantised, spec=NGRAM) == expected


def test_expert_in_fp8_without_its_scale_is_refused(sparse: Path, tmp_path: Path) -> None:
    pair = quantise_model(sparse, tmp_path / "made", FORMATS["fp8 blocks of 128"])
    tensors = load_file(pair.quantised / "model.safetensors")
    del tensors["model.layers.2.mlp.experts.2.up_proj.weight_scale_inv"]
    save_file(tensors, pair.quantised / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelLoadError, match=r"experts\.2\.up_proj is FP8, and its scale is missing"
    ):
        load(pair.quantised)


@pytest.mark.parametrize(
    ("name", "drafts"),
    slow_but(product(DRAFTED, ["NGRAM", "EAGLE3"]), product(DRAFTED + MORE_DRAFTED, DRAFTS)),
)
def test_drafts_change_no_token(
    name: str, drafts: str, pairs: dict[str, Pair], tmp_path: Path
) -> None:
    pair = pairs[name]
    spec = drafting(drafts, pair.quantised, pair.dense, tmp_path)
    assert greedy(pair.quantised, spec=spec) == greedy(pair.quantised)


@pytest.mark.slow
@pytest.mark.parametrize(("quantization", "drafts"), [*product(ON_LOAD, DRAFTS)])
def test_drafts_change_no_token_of_what_is_quantised_while_loading(
    quantization: str, drafts: str, source: Path, tmp_path: Path
) -> None:
    """But for ties of bfloat16, in which int8 and int4 multiply."""
    is_half = quantization != "fp8"
    flags: dict[str, Any] = {"quantization": quantization, "device": "cpu"}
    flags["dtype"] = "bfloat16" if is_half else "float32"
    spec = drafting(drafts, source, source, tmp_path)
    found, expected = answers(source, spec=spec, **flags), answers(source, logprobs=3, **flags)
    num_apart = assert_same_but_for_ties(found, expected)
    assert num_apart < (len(PROMPTS) if is_half else 1)


@pytest.mark.parametrize("name", DRAFTED)
def test_products_as_on_a_gpu_give_the_dense_model_s_tokens(
    name: str, pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the rounding of inputs, which the dense model has not."""
    monkeypatch.setattr(linears, "wants_dense", lambda device: False)
    pair = pairs[name]
    fields = FORMATS[name].config
    if fields["quant_method"] == "fp8":
        group = {"targets": ["Linear"], "weights": {
            "num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 32]
        }}  # fmt: skip
        edit_config(
            pair.quantised,
            quantization_config={
                "quant_method": "compressed-tensors",
                "format": "naive-quantized",
                "config_groups": {"group_0": group},
            },
        )
    model = load(pair.quantised)
    kinds = {
        path: isinstance(module.kernel, QuantisedLinear)
        for path, module in model.named_modules()
        if isinstance(module, Linear)
    }
    assert {path for path, is_quantised in kinds.items() if not is_quantised} == {
        "model.layers.0.mlp.down_proj",
        "lm_head",
    }
    assert all(len(module.kernel.parts) == 1 for module in model.modules() if is_kernel(module))
    assert greedy(pair.quantised, spec=NGRAM) == greedy(pair.dense)
    edit_config(pair.quantised, quantization_config=fields)


def is_kernel(module: Any) -> bool:
    return isinstance(module, Linear) and isinstance(module.kernel, QuantisedLinear)


def test_bfloat16_models_are_quantised_while_they_are_loaded(source: Path) -> None:
    made, plain = load(source, "fp8"), load(source)
    layer, other = made.model.layers[1].mlp.down_proj, plain.model.layers[1].mlp.down_proj
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(0))
    found, expected = layer(x), other(x)
    assert not torch.equal(found, expected)
    assert float((found - expected).norm() / expected.norm()) < 0.05
    hidden = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(made.lm_head(hidden), plain.lm_head(hidden))


def test_a_second_quantisation_is_refused(pairs: dict[str, Pair]) -> None:
    with pytest.raises(ConfigError, match="quantised already, by awq; leave it out"):
        load(pairs["awq"].quantised, "fp8")


@pytest.mark.parametrize("name", ["fp8 blocks of 128", "awq", "compressed w4a16 asymmetric"])
def test_dummy_weights_are_quantised_too(
    name: str, pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linears, "wants_dense", lambda device: False)
    model = load(pairs[name].quantised, load_format="dummy")
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    assert sum(is_kernel(layer) for layer in layers) == len(layers) - 1
    weights = [layer.kernel.parts[0].dequantised() for layer in layers if is_kernel(layer)]
    assert all(0.01 < float(one.std()) < 0.05 for one in weights)
    assert not torch.equal(weights[0], weights[4])  # of two layers


def test_an_fp8_tensor_that_no_configuration_names_is_refused(source: Path, tmp_path: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=rf"{name} has type torch\.float8_e4m3fn"):
        load(tmp_path)
    edit_config(tmp_path, quantization_config=FORMATS["fp8 tensor"].config)
    with pytest.raises(ModelLoadError, match="k_proj is FP8, and its scale is missing"):
        load(tmp_path)


def test_a_layer_without_tensors_is_named(pairs: dict[str, Pair], tmp_path: Path) -> None:
    for path in pairs["gptq"].quantised.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    held = load_file(tmp_path / "model.safetensors")
    rest = {name: tensor for name, tensor in held.items() if "1.self_attn.v_proj" not in name}
    save_file(rest, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"missing tensor model\.layers\.1\.self_attn\.v_proj"):
        load(tmp_path)


@pytest.mark.parametrize("name", [name for name in FORMATS if name.endswith("its own file")])
def test_the_configuration_may_stand_in_a_file_of_its_own(
    name: str, pairs: dict[str, Pair]
) -> None:
    folder = pairs[name].quantised
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    source = resolve_model(ModelConfig(model=str(folder)))
    assert source.quantization["quant_method"] == "modelopt"
