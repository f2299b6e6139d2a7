from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specengine.core.config import ModelConfig
from specengine.core.errors import ConfigError, ModelLoadError
from specengine.layers.quantization import linears
from specengine.layers.rotary import RotaryEmbedding
from specengine.runner.loader import hub
from specengine.runner.loader.builtin import BUILTIN_MODELS
from specengine.runner.loader.hf_directory import iterate_safetensors
from specengine.runner.loader.load import load_model
from specengine.runner.loader.source import cache_directory, resolve_model
from specengine.target.registry import find_model_class

CPU = torch.device("cpu")


@pytest.fixture
def directory(small_models: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of a small model, to be damaged."""
    return Path(shutil.copytree(small_models["llama"], tmp_path / "small"))


def _load(model: Path | str, **options: Any) -> Any:
    source = resolve_model(ModelConfig(model=str(model), **options))
    return load_model(source, find_model_class, torch.float32, CPU)


def _edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def _shard(directory: Path, index: bool) -> list[Path]:
    whole = directory / "model.safetensors"
    names = sorted(weights := load_file(whole))
    whole.unlink()
    files = [directory / f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    halves = [names[: len(names) // 2], names[len(names) // 2 :]]
    for path, half in zip(files, halves, strict=True):
        save_file({name: weights[name] for name in half}, path)
    if index:
        placed = zip(files, halves, strict=True)
        weight_map = {name: path.name for path, half in placed for name in half}
        index_file = directory / "model.safetensors.index.json"
        index_file.write_text(json.dumps({"weight_map": weight_map}))
    return files


def test_source_describes_the_directory(directory: Path) -> None:
    source = resolve_model(ModelConfig(model=str(directory)))
    assert source.name == "small"
    assert source.architectures == ["LlamaForCausalLM"]
    assert source.eos_token_ids == {0}
    assert source.context_length == 512


def test_generation_config_decides_what_ends_a_text(directory: Path) -> None:
    _edit(directory / "generation_config.json", eos_token_id=[3, 5])
    assert resolve_model(ModelConfig(model=str(directory))).eos_token_ids == {3, 5}


@pytest.mark.parametrize("differs", [True, False])
def test_head_of_the_files_decides_whether_a_model_is_tied(differs: bool, directory: Path) -> None:
    """As for transformers: configurations of Mistral 3 say nothing, and its default is true."""
    _edit(directory / "config.json", tie_word_embeddings=True)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    head = tensors["lm_head.weight"]
    if not differs:
        tensors["lm_head.weight"] = head = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path)
    source = resolve_model(ModelConfig(model=str(directory)))
    model: Any = load_model(source, find_model_class, torch.float32, CPU, packs=False)
    assert torch.equal(model.lm_head.weight, head)
    assert (model.lm_head.weight is model.embed.weight) is not differs


def test_head_of_the_files_counts_under_the_name_that_its_family_has_for_it(
    small_models: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(small_models["gptneox"], tmp_path / "small"))
    _edit(folder / "config.json", tie_word_embeddings=True)
    head = load_file(folder / "model.safetensors")["embed_out.weight"]
    source = resolve_model(ModelConfig(model=str(folder)))
    model: Any = load_model(source, find_model_class, torch.float32, CPU, packs=False)
    assert torch.equal(model.lm_head.weight, head)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        (YARN | {"original_max_position_embeddings": 512}, 2048),
        (YARN | {"original_max_position_embeddings": 64}, 512),  # fewer than the model has
        ({"rope_type": "default", "rope_theta": 1e4}, 512),
        (YARN, 512),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, 512),
    ],
)
def test_yarn_makes_the_context_longer_as_model_cards_say(
    rope: dict[str, Any], positions: int, directory: Path
) -> None:
    """They leave max_position_embeddings, which is 512 here, as it is."""
    _edit(directory / "config.json", rope_parameters=rope)
    source = resolve_model(ModelConfig(model=str(directory)))
    assert source.context_length == positions
    model: Any = load_model(source, find_model_class, torch.float32, CPU)
    tables = [one for one in model.modules() if isinstance(one, RotaryEmbedding)]
    assert [len(one.cos_sin_cache) for one in tables] == [positions]


def test_yarn_is_found_beside_what_transformers_saves(directory: Path) -> None:
    """Which is rope_parameters, of types of layers in some families."""
    path = directory / "config.json"
    yarn = YARN | {"original_max_position_embeddings": 512}
    _edit(path, rope_parameters={"rope_type": "default", "rope_theta": 1e4}, rope_scaling=yarn)
    assert resolve_model(ModelConfig(model=str(directory))).context_length == 2048
    by_type = {"full_attention": yarn, "sliding_attention": {"rope_type": "default"}}
    _edit(path, rope_parameters=by_type, rope_scaling=None)
    assert resolve_model(ModelConfig(model=str(directory))).context_length == 2048


def test_a_configuration_whose_fields_do_not_fit_each_other_is_named(
    small_models: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(small_models["smollm3"], tmp_path / "small"))
    _edit(folder / "config.json", no_rope_layers=[])
    with pytest.raises(
        ModelLoadError, match=r"config\.json of small does not fit SmolLM3ForCausal"
    ):
        _load(folder)


@pytest.mark.parametrize("index", [True, False])
def test_shards_are_all_read(index: bool, directory: Path) -> None:
    expected = dict(iterate_safetensors(directory))
    _shard(directory, index)
    found = dict(iterate_safetensors(directory))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    _load(directory)


def test_a_shard_that_the_index_names_must_be_there(directory: Path) -> None:
    missing = _shard(directory, index=True)[1]
    missing.unlink()
    with pytest.raises(ModelLoadError, match=rf"{missing.name} is missing"):
        _load(directory)


def test_a_missing_shard_without_index_is_missing_tensors(directory: Path) -> None:
    _shard(directory, index=False)[1].unlink()
    with pytest.raises(ModelLoadError, match="missing tensor model"):
        _load(directory)


@pytest.mark.parametrize("damage", ["truncated", "noise", "empty"])
def test_a_corrupt_file_is_named(damage: str, directory: Path) -> None:
    path = directory / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes({"truncated": data[:-99], "noise": b"\xff" * 5000, "empty": b""}[damage])
    with pytest.raises(ModelLoadError, match=r"small/model\.safetensors is not a readable"):
        _load(directory)


def test_pickled_weights_are_refused(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"pickled weights only \(pytorch_model\.bin\)"):
        _load(directory)


def test_a_directory_without_weights_is_named(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"has no \*\.safetensors file"):
        _load(directory)


def test_weights_of_another_shape_are_named(directory: Path) -> None:
    _edit(directory / "config.json", intermediate_size=128)
    with pytest.raises(ModelLoadError, match=r"down_proj\.weight has shape \[64, 112\]"):
        _load(directory)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["OPTForCausalLM"]}, "OPTForCausalLM is not supported"),
        ({"model_type": "no-such-model"}, "cannot be used"),
        ({"quantization_config": {"quant_method": "gguf"}}, "quantised by gguf are not supported"),
        ({"quantization_config": {"bits": 4}}, "quantised by a method unnamed"),
        ({"compression_config": {"quant_method": "sparseml"}}, "quantised by sparseml"),
        ({"model_type": "no-such-model"}, "known: LlamaForCausalLM, MistralForCausalLM"),
        ({"architectures": None}, "architecture of model_type 'llama' is not supported; known: Ll"),
    ],
)
def test_configurations_that_cannot_be_served(
    change: dict[str, Any], message: str, directory: Path
) -> None:
    _edit(directory / "config.json", **change)
    with pytest.raises(ModelLoadError, match=message):
        _load(directory)


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_broken_config_is_named(text: str, directory: Path) -> None:
    (directory / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        _load(directory)


def test_code_that_comes_with_a_model_never_runs(directory: Path) -> None:
    proof = directory / "it-ran"
    (directory / "evil.py").write_text(f"open({str(proof)!r}, 'w')\nclass EvilConfig: ...")
    auto_map = {"AutoConfig": "evil.EvilConfig"}
    _edit(directory / "config.json", model_type="evil", auto_map=auto_map)
    with pytest.raises(ModelLoadError, match="cannot be used"):
        _load(directory)
    assert not proof.exists()


def test_a_directory_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no config\.json"):
        _load(tmp_path)


@pytest.mark.parametrize("name", ["no-such-model", "/no/such/directory", "missing.gguf"])
def test_unknown_models_list_the_built_in_names(name: str) -> None:
    with pytest.raises(ModelLoadError, match="built-in names smollm2, "):
        _load(name)


def test_a_name_that_is_no_path_is_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"name too long.*; see to its files"):
        resolve_model(ModelConfig(model="a" * 300))


def test_a_directory_of_an_unknown_user_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="there is no model '~no-such-user/model'"):
        resolve_model(ModelConfig(model="~no-such-user/model"))


def test_an_unreachable_hub_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(ModelLoadError, match=r"no route to host\. Download the model elsewhere"):
        _load("someone/some-model")


def test_a_hub_id_brings_safetensors_only(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def snapshot(name: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(directory)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert resolve_model(ModelConfig(model="someone/some-model")).name == "someone/some-model"
    resolve_model(ModelConfig(model="someone/some-model", load_format="dummy"))
    assert ["*.safetensors" in patterns for patterns in asked] == [True, False]
    assert not any(pattern.endswith((".bin", ".py")) for pattern in asked[0])


@pytest.mark.parametrize(
    ("name", "expected"),
    [("a/b", True), ("a-b/c.d_e-7B", True), ("a", False), ("/a/b", False), ("../a", False),
     ("a/b/c", False), ("~/a", False)],
)  # fmt: skip
def test_what_looks_like_a_hub_id(name: str, expected: bool) -> None:
    assert hub.is_hub_id(name) is expected


def test_load_format_must_fit(directory: Path) -> None:
    with pytest.raises(ConfigError, match="is not a GGUF file"):
        _load(directory, load_format="gguf")
    with pytest.raises(ConfigError, match="add --load-format dummy"):
        _load("smollm2-shape")


def test_dummy_weights_need_no_files_and_follow_the_seed(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    source = resolve_model(ModelConfig(model=str(directory), load_format="dummy"))
    assert source.is_dummy
    states = []
    for seed in (0, 0, 1):
        model: Any = load_model(source, find_model_class, torch.bfloat16, CPU, None, seed)
        states.append(model.model.embed_tokens.weight)
        assert torch.equal(model.model.norm.weight, torch.ones(64))
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])
    assert 0.015 < float(states[0].std()) < 0.025


def test_dummy_weights_are_plain_where_the_quantisation_left_a_layer_out(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linears, "wants_dense", lambda device: False)  # as on a GPU
    left_out = "model.layers.1.self_attn.qkv_proj"
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    _edit(
        directory / "config.json",
        quantization_config=fp8 | {"modules_to_not_convert": ["lm_head", left_out]},
    )
    source = resolve_model(ModelConfig(model=str(directory), load_format="dummy"))
    model = load_model(source, find_model_class, torch.float32, CPU, packs=False)
    products = {name: one for name, one in model.named_modules() if name.endswith("qkv_proj")}
    assert [name for name, one in products.items() if one.is_plain] == [left_out]


@pytest.mark.parametrize("name", [m.name for m in BUILTIN_MODELS.values() if m.is_shape])
def test_built_in_shapes_build(name: str) -> None:
    source = resolve_model(ModelConfig(model=name, load_format="dummy"))
    model_class = find_model_class(source.architectures)
    source.hf_config.max_position_embeddings = 16
    with torch.device("meta"):
        model = model_class(source.hf_config)
    billions = sum(p.numel() for p in model.parameters()) / 1e9
    given = BUILTIN_MODELS[name].parameters
    stated = float(given[:-1]) / (1000 if given.endswith("M") else 1)
    assert billions == pytest.approx(stated, rel=0.04)


def test_cache_directory_by_flag_then_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPECENGINE_CACHE_DIR", raising=False)
    assert cache_directory(ModelConfig()) == Path.home() / ".cache" / "specengine"
    monkeypatch.setenv("SPECENGINE_CACHE_DIR", str(tmp_path / "env"))
    assert cache_directory(ModelConfig()) == tmp_path / "env"
    assert cache_directory(ModelConfig(cache_dir=str(tmp_path / "flag"))) == tmp_path / "flag"


def test_default_dtype_is_left_alone(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError):
        _load(directory)
    assert torch.get_default_dtype() is torch.float32
