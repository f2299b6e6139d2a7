from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from specengine.core.config import ModelConfig
from specengine.core.errors import ModelLoadError
from specengine.core.registry import MODEL_FAMILIES
from specengine.layers.rotary import rope_frequencies, rope_parameters
from specengine.runner.loader.family import GgufFormat, gguf_formats
from specengine.runner.loader.gguf_config import gguf_config_dict, gguf_hf_config
from specengine.runner.loader.gguf_fields import rope_by_type
from specengine.runner.loader.gguf_file import GgufFile
from specengine.runner.loader.gguf_weights import iterate_gguf_weights, unpermute
from specengine.runner.loader.source import resolve_model
from specengine.target.models.llama import LlamaForCausalLM
from tests.support.families import transformers_class

FORMATS = dict(gguf_formats())
HIDDEN, HEADS, KV_HEADS, LAYERS, VOCAB = 64, 4, 2, 2, 40
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_name(name: str, format: GgufFormat | None) -> str:
    """As converters write it: what the family declares stands in place of Llama's names."""
    own = {theirs: ours for ours, theirs in format.tensors.items()} if format else {}
    stem, _, suffix = name.rpartition(".")
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    if layer is None:
        return f"{_NAMES[stem]}.{suffix}"
    return f"blk.{layer[1]}.{(_NAMES | own)[layer[2]]}.{suffix}"


class NewForCausalLM(LlamaForCausalLM):
    """One that is not registered. It computes what transformers' Granite does."""

    extends_config = "granite"
    gguf = GgufFormat(
        ("new",),
        "granite",
        has_rotary_pairs=True,
        tensors={"norm_of_ffn": "post_attention_layernorm"},
        metadata={"residual_scale": "residual_multiplier"},
        optional={"logit_scale": "logits_scaling", "absent": "absent"},
    )
    small_config: ClassVar[dict[str, Any]] = {"residual_multiplier": 0.22, "logits_scaling": 6.0}


def _permute(rows: Tensor, heads: int) -> Tensor:
    """What converters do: the two halves of each head, interleaved."""
    first, second = rows.reshape(heads, 2, -1, *rows.shape[1:]).unbind(1)
    return torch.stack([first, second], dim=2).reshape(rows.shape)


def _small_model(architecture: str, **options: Any) -> Any:
    torch.manual_seed(5)
    model_class = transformers_class(architecture)
    config = model_class.config_class(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        initializer_range=0.1,
        architectures=[architecture],
        **options,
    )
    return model_class(config).eval()


def _write(
    path: Path,
    arch: str,
    model: Any,
    extra: dict[str, Any] | None = None,
    kinds: dict[str, Any] | None = None,
) -> None:
    """The model as converters write it, the head left out where it is tied; `extra` are metadata
    without the architecture's prefix, or tensors. kinds: part of a name -> type of the tensor."""
    writer = gguf.GGUFWriter(path, arch)
    config = model.config
    format = FORMATS.get(config.architectures[0])
    writer.add_block_count(LAYERS)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "head_dim", None) not in (None, HIDDEN // HEADS):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    for key, value in (extra or {}).items():
        _add(writer, arch, key, value)
    for name, tensor in model.state_dict().items():
        if name in _untold(model):
            continue
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        if heads and (format is None or format.has_rotary_pairs):
            tensor = _permute(tensor, heads)
        kind = next((kind for part, kind in (kinds or {}).items() if part in name), None)
        if kind is None:
            writer.add_tensor(_gguf_name(name, format), tensor.numpy())
        else:
            packed = gguf.quants.quantize(tensor.numpy(), kind)
            writer.add_tensor(_gguf_name(name, format), packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: Any, arch: str, key: str, value: Any) -> None:
    if isinstance(value, np.ndarray):
        writer.add_tensor(key, value)
    elif isinstance(value, str):
        writer.add_string(f"{arch}.{key}", value)
    elif isinstance(value, float):
        writer.add_float32(f"{arch}.{key}", value)
    else:
        writer.add_uint32(f"{arch}.{key}", value)


def _written(architecture: str, options: dict[str, Any], folder: Path) -> tuple[Any, GgufFile]:
    model = _small_model(architecture, **options)
    format = FORMATS[architecture]
    keys = {**format.metadata, **format.optional}.items()
    told = {key: getattr(model.config, ours) for key, ours in keys if hasattr(model.config, ours)}
    _write(folder / "m.gguf", format.architectures[0], model, told)
    return model, GgufFile(folder / "m.gguf")


def _assert_same(file: GgufFile, model: Any, fields: Iterable[str]) -> None:
    found = dict(iterate_gguf_weights(file))
    expected = model.state_dict()
    assert found.keys() == expected.keys() - _untold(model)
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
    config = gguf_hf_config(file)
    same = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "rms_norm_eps"]
    same += ["num_key_value_heads", "max_position_embeddings", "rope_parameters", "architectures"]
    for field in [*same, *fields]:
        assert getattr(config, field) == getattr(model.config, field), field


def _untold(model: Any) -> set[str]:
    return {"lm_head.weight"} if model.config.tie_word_embeddings else set()


def test_biases_of_llama_come_back(tmp_path: Path) -> None:
    options = {"attention_bias": True, "mlp_bias": True}
    model, file = _written("LlamaForCausalLM", options, tmp_path)
    _assert_same(file, model, options)


def test_family_without_gguf_is_refused_by_name(tmp_path: Path) -> None:
    """What it extends has a format, which is not its own."""
    assert "MiMoForCausalLM" in MODEL_FAMILIES.keys() - FORMATS.keys()
    _write(tmp_path / "m.gguf", "mimo", _small_model("Qwen2ForCausalLM"))
    with pytest.raises(
        ModelLoadError, match=r"'mimo' is not supported; known: llama.*MiMoForCausalLM.*safetensors"
    ):
        resolve_model(ModelConfig(model=str(tmp_path / "m.gguf")))


def test_family_of_one_file_and_one_line_declares_its_gguf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODEL_FAMILIES, "NewForCausalLM", f"{__name__}:NewForCausalLM")
    monkeypatch.setitem(FORMATS, "NewForCausalLM", NewForCausalLM.gguf)
    model, file = _written("NewForCausalLM", NewForCausalLM.small_config, tmp_path)
    assert "blk.0.norm_of_ffn.weight" in file.tensor_names
    _assert_same(file, model, NewForCausalLM.small_config)
    assert gguf_config_dict(file)["absent"] is None
    _write(tmp_path / "bare.gguf", "new", model)
    with pytest.raises(ModelLoadError, match=r"no metadata '\{arch\}\.residual_scale'"):
        gguf_config_dict(GgufFile(tmp_path / "bare.gguf"))


def test_unpermute_undoes_permute() -> None:
    rows = torch.randn(24, 5)
    assert torch.equal(unpermute(_permute(rows, 3), 3), rows)
    assert torch.equal(unpermute(_permute(rows[:, 0], 3), 3), rows[:, 0])


def test_a_file_without_head_is_tied(tmp_path: Path) -> None:
    model = _small_model("LlamaForCausalLM", tie_word_embeddings=True)
    _write(tmp_path / "m.gguf", "llama", model)
    assert gguf_config_dict(GgufFile(tmp_path / "m.gguf"))["tie_word_embeddings"] is True


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [(Kind.F32, 0), (Kind.F16, 1e-3), (Kind.BF16, 8e-3), (Kind.Q8_0, 0.03), (Kind.Q4_0, 0.6),
     (Kind.Q4_1, 0.4)],
)  # fmt: skip
def test_each_type_comes_back_within_its_precision(
    kind: Any, tolerance: float, tmp_path: Path
) -> None:
    values = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("t", gguf.quants.quantize(values, kind), raw_dtype=kind)
    _finish(writer)
    found = GgufFile(tmp_path / "t.gguf").dequantized("t")
    assert found.dtype == torch.float32
    assert found.shape == (6, 64)
    error = float((found - torch.from_numpy(values)).abs().max())
    assert error <= tolerance
    assert (error > 0) == (kind != Kind.F32)


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K])
def test_k_quants_are_read_block_by_block(kind: Any, tmp_path: Path) -> None:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(0).integers(0, 60, (4, 2 * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("t", data, raw_dtype=kind)
    _finish(writer)
    found = GgufFile(tmp_path / "t.gguf").dequantized("t")
    assert found.shape == (4, 2 * block)
    expected = gguf.quants.dequantize(data[3, size:], kind)
    assert torch.equal(found[3, block:], torch.from_numpy(expected))


def _finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_linear_and_yarn_scaling(tmp_path: Path) -> None:
    model = _small_model("LlamaForCausalLM")
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    _write(tmp_path / "linear.gguf", "llama", model, linear)
    found = gguf_config_dict(GgufFile(tmp_path / "linear.gguf"))["rope_parameters"]
    assert found == {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    yarn = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
        "rope.scaling.yarn_beta_fast": 16.0,
        "rope.scaling.attn_factor": 2.0,
    }
    _write(tmp_path / "yarn.gguf", "llama", model, yarn)
    found = gguf_config_dict(GgufFile(tmp_path / "yarn.gguf"))["rope_parameters"]
    assert found.pop("attention_factor") == pytest.approx(2 * (0.1 * np.log(4.0) + 1))
    assert found == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16.0,
        "rope_theta": 10000.0,
    }


class _Told:
    """A file's metadata alone."""

    tensor_names: ClassVar[list[str]] = []

    def __init__(self, **told: float) -> None:
        self._told = {name.replace("__", "."): value for name, value in told.items()}

    def get(self, key: str, default: Any = None) -> Any:
        return self._told.get(key.removeprefix("{arch}."), default)

    require = get


@pytest.mark.parametrize(
    ("family", "layers", "field", "expected"),
    [
        ("Gemma2", 46, "query_pre_attn_scalar", 144),
        ("Gemma2", 42, "query_pre_attn_scalar", 128),
        ("Gemma3", 62, "query_pre_attn_scalar", 144),
        ("Gemma3", 48, "query_pre_attn_scalar", 128),
        ("GPTNeoX", 44, "hidden_act", "gelu_fast"),
        ("GPTNeoX", 36, "hidden_act", "gelu"),
    ],
)
def test_what_files_do_not_tell_follows_from_the_number_of_layers(
    family: str, layers: int, field: str, expected: object
) -> None:
    """The 27B models of Gemma divide by another number than a head has; GPT-NeoX 20B has an
    activation of its own."""
    sizes = {"embedding_length": 4608, "attention__head_count": 32, "attention__key_length": 128}
    file: Any = _Told(block_count=layers, **sizes)
    assert FORMATS[f"{family}ForCausalLM"].fields(file)[field] == expected


@pytest.mark.parametrize(("told", "expected"), [({"rope__freq_base_swa": 2e4}, 2e4), ({}, 1e4)])
def test_layers_with_a_window_rotate_by_the_base_that_the_file_tells_of_them(
    told: dict[str, float], expected: float
) -> None:
    file: Any = _Told(embedding_length=64, attention__head_count=4, rope__freq_base=1e6, **told)
    found = rope_by_type(file, theta_of_windows=1e4)
    assert found["sliding_attention"]["rope_theta"] == expected
    assert found["full_attention"]["rope_theta"] == 1e6


def test_frequency_factors_give_llama3_scaling(tmp_path: Path) -> None:
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    plain = rope_frequencies(16, 128, {"rope_type": "default", "rope_theta": 10000.0})[0]
    expected, _ = rope_frequencies(16, 128, llama3)
    assert not torch.allclose(plain, expected)
    factors = {"rope_freqs.weight": (plain / expected).numpy()}
    _write(tmp_path / "m.gguf", "llama", _small_model("LlamaForCausalLM"), factors)
    file = GgufFile(tmp_path / "m.gguf")
    found, factor = rope_frequencies(16, 128, rope_parameters(gguf_hf_config(file)))
    torch.testing.assert_close(found, expected)
    assert factor == 1.0
    assert "rope_freqs" not in " ".join(name for name, _ in iterate_gguf_weights(file))


def test_a_sliding_window_makes_it_mistral(tmp_path: Path) -> None:
    window = {"attention.sliding_window": 48}
    _write(tmp_path / "m.gguf", "llama", _small_model("LlamaForCausalLM"), window)
    config = gguf_hf_config(GgufFile(tmp_path / "m.gguf"))
    assert config.architectures == ["MistralForCausalLM"]
    assert config.sliding_window == 48


def test_a_file_or_its_directory_resolves(tmp_path: Path) -> None:
    _write(tmp_path / "small.gguf", "llama", _small_model("LlamaForCausalLM"))
    for given in (tmp_path / "small.gguf", tmp_path):
        source = resolve_model(ModelConfig(model=str(given)))
        assert (source.name, source.gguf_file) == ("small", tmp_path / "small.gguf")
        assert source.architectures == ["LlamaForCausalLM"]


def test_unknown_architectures_and_scalings_are_refused(tmp_path: Path) -> None:
    model = _small_model("LlamaForCausalLM")
    _write(tmp_path / "a.gguf", "mamba", model)
    with pytest.raises(ModelLoadError, match=r"'mamba' is not supported; known: llama"):
        resolve_model(ModelConfig(model=str(tmp_path / "a.gguf")))
    _write(tmp_path / "b.gguf", "llama", model, {"rope.scaling.type": "wavelet"})
    with pytest.raises(ModelLoadError, match="'wavelet'"):
        resolve_model(ModelConfig(model=str(tmp_path / "b.gguf")))


def test_an_unexpected_tensor_is_named(tmp_path: Path) -> None:
    extra = {"blk.0.ffn_gate_exps.weight": np.zeros((2, 3), dtype=np.float32)}
    _write(tmp_path / "m.gguf", "llama", _small_model("LlamaForCausalLM"), extra)
    with pytest.raises(ModelLoadError, match=r"blk\.0\.ffn_gate_exps\.weight"):
        list(iterate_gguf_weights(GgufFile(tmp_path / "m.gguf")))


def test_missing_metadata_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), dtype=np.float32))
    _finish(writer)
    with pytest.raises(ModelLoadError, match=r"no metadata '.*embedding_length"):
        gguf_config_dict(GgufFile(tmp_path / "m.gguf"))


@pytest.mark.parametrize("damage", ["empty", "not gguf", "header", "metadata", "tensors", "length"])
def test_a_damaged_file_is_named(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    _write(path, "llama", _small_model("LlamaForCausalLM"))
    data = path.read_bytes()
    damaged = {
        "empty": b"",
        "not gguf": b"PK" + data[2:],
        "header": data[:12],
        "metadata": data[:200],
        "tensors": data[:-500],
        "length": data[:16] + b"\xff" * 8 + data[24:],
    }
    path.write_bytes(damaged[damage])
    with pytest.raises(ModelLoadError, match=r"m\.gguf is not a readable GGUF file"):
        GgufFile(path)
