"""EAGLE-3 drafts in another layout draft the same, and what cannot be told is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specengine.cli.main import main
from specengine.core.errors import ConfigError, ModelLoadError
from specengine.draft.eagle.convert import Conversion, convert
from tests.draft import eagle_checkpoints as checkpoints
from tests.draft.eagle_reading import EagleReading

FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fc_norm": {"fc_norm": True},
    "norm_before_fc": {"norm_before_fc": True},
    "norm_output": {"norm_output": True, "embed": True},
}
TO_SPECULATORS = Conversion("speculators", "org/target", ("LlamaForCausalLM",))


@pytest.fixture(scope="module")
def target(small_models: dict[str, Path]) -> Path:
    return small_models["llama"]


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def edited(
    folder: Path,
    config: Callable[[dict[str, Any]], Any] = lambda raw: None,
    tensors: Callable[[dict[str, Tensor]], Any] = lambda named: None,
) -> str:
    raw, named = read(folder)
    config(raw)
    tensors(named)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(named, folder / "model.safetensors")
    return str(folder)


@pytest.mark.parametrize("form", FORMS)
def test_there_and_back(form: str, target: Path, tmp_path: Path) -> None:
    """Every tensor and every key that says anything, bit by bit; and an independent reading gives
    the same logits for both. Nearly: on some processors the order of sums in a product hangs on
    where in memory a file's tensors begin."""
    source = checkpoints.eagle3(tmp_path / "a", target, **FORMS[form])
    there, back = tmp_path / "b", tmp_path / "c"
    done = convert(str(source), there, TO_SPECULATORS)
    assert done.proof.largest == 0.0
    assert done.proof.largest_logit > 0.1
    assert done.proof.feature_layers == checkpoints.FEATURE_LAYERS
    convert(str(there), back, Conversion())
    raw, tensors = read(source)
    raw_back, tensors_back = read(back)
    assert tensors.keys() == tensors_back.keys()
    assert all(torch.equal(tensors[name], tensors_back[name]) for name in tensors)
    assert raw.items() <= (raw_back | {"eagle_config": raw["eagle_config"]}).items()
    ids = "eagle_aux_hidden_state_layer_ids"
    assert raw_back["eagle_config"][ids] == raw["eagle_config"][ids]
    assert raw_back[ids] == read(there)[0][ids] == [layer + 1 for layer in raw["eagle_config"][ids]]
    again = convert(str(back), tmp_path / "d", TO_SPECULATORS)
    assert again.proof.feature_layers == checkpoints.FEATURE_LAYERS
    text, drafted = [5, 9, 4, 77, 31, 8], [12, 60]
    first = EagleReading(source, target).logits(text, drafted)
    for other in (there, back):
        found = EagleReading(other, target).logits(text, drafted)
        torch.testing.assert_close(found, first, rtol=1e-5, atol=1e-6)


def test_speculators_layout_is_what_its_readers_want(target: Path, tmp_path: Path) -> None:
    source = checkpoints.eagle3(tmp_path / "a", target)
    convert(str(source), tmp_path / "b", TO_SPECULATORS)
    raw, tensors = read(tmp_path / "b")
    assert raw["speculators_model_type"] == "eagle3"
    assert raw["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3], "what each reads, not leaves"
    assert raw["norm_before_residual"] is False, "vLLM takes true where it is missing"
    assert raw["transformer_layer_config"]["model_type"] == "llama"
    assert raw["transformer_layer_config"]["vocab_size"] == len(tensors["t2d"])
    methods = raw["speculators_config"]["proposal_methods"]
    assert methods == [{"proposal_type": "greedy", "speculative_tokens": 3}]
    assert raw["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    assert not any(name.startswith("midlayer") for name in tensors)
    assert "layers.0.hidden_norm.weight" in tensors


def test_a_mask_that_is_missing_is_made(target: Path, tmp_path: Path) -> None:
    source = checkpoints.eagle3(tmp_path / "a", target)
    _, tensors = read(source)
    mask = tensors["t2d"]
    convert(edited(source, tensors=lambda named: named.pop("t2d")), tmp_path / "b", TO_SPECULATORS)
    assert torch.equal(read(tmp_path / "b")[1]["t2d"], mask)


def test_default_layers_stay_the_engines_choice(target: Path, tmp_path: Path) -> None:
    source = checkpoints.eagle3(tmp_path / "a", target)
    convert(edited(source, lambda raw: raw.pop("eagle_config")), tmp_path / "b", TO_SPECULATORS)
    assert read(tmp_path / "b")[0]["eagle_aux_hidden_state_layer_ids"] is None


EditConfig = Callable[[dict[str, Any]], Any]
FLAT_REFUSALS: dict[str, EditConfig] = {
    "shrink_factor": lambda raw: raw.update(shrink_factor=2),
    "eagle_config.mystery": lambda raw: raw["eagle_config"].update(mystery=1),
    "eagle_config.use_aux_hidden_state": lambda raw: raw["eagle_config"].update(
        use_aux_hidden_state=False
    ),
    r"\[0, 1, 2\] beside eagle_config": lambda raw: raw.update(
        eagle_aux_hidden_state_layer_ids=[0, 1, 2]
    ),
    "tie_word_embeddings": lambda raw: raw.update(tie_word_embeddings=True),
    "model_type": lambda raw: raw.update(model_type="llama4_text"),
    "num_hidden_layers": lambda raw: raw.update(num_hidden_layers=2),
    "num_aux_hidden_states": lambda raw: raw.update(num_aux_hidden_states=4),
    "fc_norm": lambda raw: raw.update(fc_norm=True),
    "sliding window": lambda raw: raw.update(layer_types=["sliding_attention"]),
    "lacks vocab_size": lambda raw: raw.pop("vocab_size"),
    "attention_bias": lambda raw: raw.update(attention_bias=True),
}


@pytest.mark.parametrize("named", FLAT_REFUSALS)
def test_what_is_not_known_is_refused(named: str, target: Path, tmp_path: Path) -> None:
    source = edited(checkpoints.eagle3(tmp_path / "a", target), FLAT_REFUSALS[named])
    with pytest.raises(ModelLoadError, match=named):
        convert(source, tmp_path / "b", TO_SPECULATORS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


NESTED_REFUSALS: dict[str, EditConfig] = {
    "norm_before_residual .* is true": lambda raw: raw.update(norm_before_residual=True),
    "lacks norm_before_residual": lambda raw: raw.pop("norm_before_residual"),
    "speculators_model_type": lambda raw: raw.update(speculators_model_type="peagle"),
    "transformer_layer_config.model_type": lambda raw: raw["transformer_layer_config"].update(
        model_type="qwen3"
    ),
    "input of layer 0": lambda raw: raw.update(eagle_aux_hidden_state_layer_ids=[0, 1, 2]),
    "mask_token_id": lambda raw: raw.update(mask_token_id=7),
}


@pytest.mark.parametrize("named", NESTED_REFUSALS)
def test_what_sglang_lacks_is_refused(named: str, target: Path, tmp_path: Path) -> None:
    draft = checkpoints.eagle3(tmp_path / "a", target, speculators=True, norm_before_residual=False)
    with pytest.raises(ModelLoadError, match=named):
        convert(edited(draft, NESTED_REFUSALS[named]), tmp_path / "b", Conversion())


EditTensors = Callable[[dict[str, Tensor]], Any]
TENSOR_REFUSALS: dict[str, EditTensors] = {
    "midlayer.self_attn.q_norm.weight": lambda named: named.update(
        {"midlayer.self_attn.q_norm.weight": torch.ones(16)}
    ),
    "fc.bias": lambda named: named.update({"fc.bias": torch.ones(64)}),
    "self_attn.q_proj.bias": lambda named: named.update(
        {"midlayer.self_attn.q_proj.bias": torch.ones(128)}
    ),
    "d2t": lambda named: named.update(d2t=torch.arange(100) * 5),
    "no d2t": lambda named: named.pop("d2t"),
    "t2d and d2t": lambda named: named.update(t2d=~named["t2d"]),
    "no lm_head.weight": lambda named: named.pop("lm_head.weight"),
}


@pytest.mark.parametrize("named", TENSOR_REFUSALS)
def test_tensors_that_do_not_fit_are_refused(named: str, target: Path, tmp_path: Path) -> None:
    draft = checkpoints.eagle3(tmp_path / "a", target)
    with pytest.raises(ModelLoadError, match=named):
        convert(edited(draft, tensors=TENSOR_REFUSALS[named]), tmp_path / "b", TO_SPECULATORS)
    assert not (tmp_path / "b").exists()


def test_biases_go_one_way(target: Path, tmp_path: Path) -> None:
    """All of them: speculators has a name for it, SGLang's layer has none."""
    names = {"q": 128, "k": 64, "v": 64, "o": 64}
    biases = {f"midlayer.self_attn.{k}_proj.bias": torch.randn(n) for k, n in names.items()}
    draft = edited(
        checkpoints.eagle3(tmp_path / "a", target),
        lambda raw: raw.update(attention_bias=True),
        lambda named: named.update(biases),
    )
    convert(draft, tmp_path / "b", TO_SPECULATORS)
    with pytest.raises(ModelLoadError, match=r"k_proj\.bias"):
        convert(str(tmp_path / "b"), tmp_path / "c", Conversion())


def test_rows_of_the_targets_head_become_its_own(target: Path, tmp_path: Path) -> None:
    draft = checkpoints.eagle3(tmp_path / "a", target)
    edited(draft, tensors=lambda named: named.pop("lm_head.weight"))
    args = [str(draft), str(tmp_path / "b"), "--target", "org/target", "--head-from", str(target)]
    assert main(["convert", *args]) == 0
    tensors, of_target = read(tmp_path / "b")[1], load_file(target / "model.safetensors")
    ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    assert torch.equal(tensors["lm_head.weight"], of_target["lm_head.weight"][ids])


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("lm_head.weight", "language_model.lm_head.weight"),
        ("model.embed_tokens.weight", "language_model.model.embed_tokens.weight"),
        ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight"),
    ],
)
def test_rows_of_a_language_part_s_head_become_a_draft_s_own(
    name: str, published: str, target: Path, tmp_path: Path
) -> None:
    """Of a multimodal target, whose head may be its embedding."""
    draft, whole = checkpoints.eagle3(tmp_path / "a", target), tmp_path / "whole"
    edited(draft, tensors=lambda named: named.pop("lm_head.weight"))
    head = load_file(target / "model.safetensors")[name]
    whole.mkdir()
    sees = {"vision_tower.embed_tokens.weight": torch.zeros_like(head)}
    save_file({published: head} | sees, whole / "model.safetensors")
    (whole / "config.json").write_text((target / "config.json").read_text())
    args = [str(draft), str(tmp_path / "b"), "--target", "org/target", "--head-from", str(whole)]
    assert main(["convert", *args]) == 0
    tensors = read(tmp_path / "b")[1]
    ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    assert torch.equal(tensors["lm_head.weight"], head[ids])


def test_the_destination_is_not_overwritten(target: Path, tmp_path: Path) -> None:
    source = str(checkpoints.eagle3(tmp_path / "a", target))
    there = tmp_path / "b"
    there.mkdir()
    convert(source, there, TO_SPECULATORS)  # an empty directory is free
    before = read(there)[0]
    with pytest.raises(ConfigError, match="--force"):
        convert(source, there, TO_SPECULATORS)
    convert(source, there, Conversion("speculators", "another", force=True))
    assert before["speculators_config"] != read(there)[0]["speculators_config"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_layouts_and_targets_must_be_named_right(target: Path, tmp_path: Path) -> None:
    source = str(checkpoints.eagle3(tmp_path / "a", target))
    with pytest.raises(ConfigError, match="sglang already"):
        convert(source, tmp_path / "b", Conversion("sglang"))
    with pytest.raises(ConfigError, match="--target"):
        convert(source, tmp_path / "b", Conversion("speculators"))
    assert main(["convert", source, str(tmp_path / "b"), "--to", "gguf"]) == 2


def test_the_command_prints_the_proof(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(checkpoints.eagle3(tmp_path / "a", target))
    there = tmp_path / "b"
    assert main(["convert", source, str(there), "--target", str(target)]) == 0
    printed = capsys.readouterr().out
    assert "layout of speculators" in printed
    assert "largest difference 0;" in printed
    verifier = read(there)[0]["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": str(target), "architectures": ["LlamaForCausalLM"]}
