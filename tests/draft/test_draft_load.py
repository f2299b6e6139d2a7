"""Draft models that do not fit are refused when they are loaded, with the field and the remedy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.errors import ConfigError, ModelLoadError, SpecEngineError
from specengine.draft.eagle.checkpoint import EagleCheckpoint
from tests.draft import eagle_checkpoints as checkpoints

Edit = Callable[[dict[str, Any], dict[str, Tensor]], object]  # changes configuration and tensors


def edited(folder: Path, edit: Edit) -> Path:
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    edit(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def load(algorithm: str, target: Path, draft: Path | None, **flags: Any) -> LLM:
    path = None if draft is None else str(draft)
    spec = SpecConfig(algorithm=algorithm, draft_model_path=path, num_steps=2)
    return LLM(str(target), spec, dtype="float32", max_total_tokens=512, **flags)


def layers(*ids: int) -> Edit:
    return lambda c, t: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=list(ids))


def without(name: str) -> Edit:
    return lambda c, t: t.pop(name)


def of_size(name: str, *shape: int) -> Edit:
    return lambda c, t: t.update({name: torch.zeros(shape)})


REFUSED: dict[str, tuple[Edit, list[str]]] = {
    "too few layers": (layers(0, 2), ["fc.weight", r"\[64, 192\]", r"\[64, 128\]", r"\[0, 2\]"]),
    "a layer past the last": (layers(0, 1, 3), [r"\[0, 1, 3\]", "has 3", "layer_ids"]),
    "layers out of order": (layers(0, 2, 1), ["ascend", "layer_ids in the draft's config.json"]),
    "default layers of a small target": (
        lambda c, t: c.pop("eagle_config"),
        [r"\[1, 0, -1\]", "eagle_aux_hidden_state_layer_ids"],
    ),
    "the last state alone": (
        lambda c, t: c["eagle_config"].update(use_aux_hidden_state=False),
        ["use_aux_hidden_state", r"\[64, 192\] and must be \[64, 64\]"],
    ),
    "a norm before each draft's token": (
        lambda c, t: c["eagle_config"].update(use_mtp_layernorm=True),
        ["eagle_config.use_mtp_layernorm .* True"],
    ),
    "several tokens at once": (
        lambda c, t: c.update(parallel_drafting=True),
        ["parallel_drafting .* true"],
    ),
    "layers of another model": (
        lambda c, t: c["eagle_config"].update(eagle_decoder_type="kimik2"),
        ["eagle_config.eagle_decoder_type .* 'kimik2'"],
    ),
    "attention in chunks": (
        lambda c, t: c.update(layer_types=["chunked_attention"]),
        ["layer type 'chunked_attention' .* known: full_attention"],
    ),
    "a scaled stream": (
        lambda c, t: c.update(residual_multiplier=0.22),
        ["residual_multiplier 0.22 .* not supported"],
    ),
    "capped scores": (
        lambda c, t: c.update(attn_logit_softcapping=50.0),
        ["attn_logit_softcapping 50.0 .* not supported"],
    ),
    "a window without its size": (
        lambda c, t: c.update(layer_types=["sliding_attention"]),
        ["lacks sliding_window"],
    ),
    "a wider target": (of_size("fc.weight", 64, 384), ["fc.weight", "hidden_size 64"]),
    "another hidden size": (
        lambda c, t: c.update(hidden_size=96, num_attention_heads=8),
        ["hidden_size|embed_tokens|lm_head"],
    ),
    "another target's vocabulary": (
        lambda c, t: c.update(vocab_size=400),
        ["vocab_size 400", "320", "the draft of this target"],
    ),
    "d2t too short": (of_size("d2t", 50), ["d2t", r"\[50\]", r"\[100\]"]),
    "t2d of another target": (of_size("t2d", 400), ["t2d", r"\[400\]", r"\[320\]"]),
    "a head of another size": (
        of_size("lm_head.weight", 90, 64),
        ["lm_head.weight", r"\[90, 64\]"],
    ),
    "no d2t": (without("d2t"), ["no tensor d2t"]),
    "ids for offsets": (
        lambda c, t: t.update(d2t=t["d2t"] + torch.arange(100) + 150),
        ["d2t leads to token ids", "vocab_size 320", "offsets"],
    ),
    "two of one id": (
        lambda c, t: t["d2t"].__setitem__(1, t["d2t"][0] - 1),
        ["99 different ones of 100"],
    ),
    "missing": (without("midlayer.mlp.up_proj.weight"), ["missing tensor layers.0.mlp.up_proj"]),
    "unexpected": (of_size("extra.weight", 3), ["unexpected tensor extra.weight"]),
    "a norm that the configuration promises": (
        lambda c, t: c.update(fc_norm=True),
        ["missing tensor fc_norm.0.weight"],
    ),
    "two layers of which one is there": (
        lambda c, t: c.update(num_hidden_layers=2),
        [r"missing tensor layers\.1\."],
    ),
    "a whole model": (
        lambda c, t: (c.update(num_hidden_layers=2), t.pop("midlayer.hidden_norm.weight")),
        ["num_hidden_layers", "STANDALONE"],
    ),
    "activation": (lambda c, t: c.update(hidden_act="gelu"), ["hidden_act 'gelu'"]),
    "a bare configuration": (lambda c, t: c.pop("hidden_size"), ["lacks hidden_size"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_eagle3_drafts_that_do_not_fit(
    name: str, small_models: dict[str, Path], tmp_path: Path
) -> None:
    edit, words = REFUSED[name]
    target = small_models["llama"]
    draft = edited(checkpoints.eagle3(tmp_path / "draft", target), edit)
    with pytest.raises(ModelLoadError) as caught:
        load("EAGLE3", target, draft)
    for word in words:
        assert caught.match(word)


def test_eagle_drafts_that_do_not_fit(small_models: dict[str, Path], tmp_path: Path) -> None:
    target = small_models["llama"]
    wide = edited(checkpoints.eagle(tmp_path / "wide", target), of_size("fc.weight", 64, 192))
    with pytest.raises(ModelLoadError, match=r"fc\.weight .*\[64, 192\] and must be \[64, 128\]"):
        load("EAGLE", target, wide)


def test_a_draft_of_eagle3_is_no_eagle(small_models: dict[str, Path], tmp_path: Path) -> None:
    target = small_models["llama"]
    with pytest.raises(ModelLoadError, match=r"fc\.weight"):
        load("EAGLE", target, checkpoints.eagle3(tmp_path / "draft", target, draft_vocab=320))


@pytest.mark.parametrize("algorithm", ["STANDALONE", "EAGLE", "EAGLE3"])
def test_a_draft_model_must_be_named_and_be_there(
    algorithm: str, small_models: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="--speculative-draft-model-path"):
        load(algorithm, small_models["llama"], None)
    with pytest.raises(SpecEngineError, match="nowhere"):
        load(algorithm, small_models["llama"], tmp_path / "nowhere")


def test_counting_of_layers(small_models: dict[str, Path], tmp_path: Path) -> None:
    """SGLang's ids are outputs; speculators' are inputs; without any, EAGLE-3's own."""
    target = small_models["llama"]
    sglang = EagleCheckpoint.read(str(checkpoints.eagle3(tmp_path / "a", target)))
    assert sglang.feature_layers(3) == checkpoints.FEATURE_LAYERS
    path = checkpoints.eagle3(tmp_path / "b", target, speculators=True)
    assert EagleCheckpoint.read(str(path)).feature_layers(3) == checkpoints.FEATURE_LAYERS
    silent = edited(path, lambda c, t: c.pop("eagle_aux_hidden_state_layer_ids"))
    assert EagleCheckpoint.read(str(silent)).feature_layers(30) == (1, 14, 26)


@pytest.mark.parametrize(
    ("algorithm", "family"),
    [("EAGLE", "llama"), ("EAGLE3", "llama"), ("EAGLE3", "glm4"), ("EAGLE3", "gemma3")],
)
def test_a_dummy_target_gets_a_dummy_draft(
    algorithm: str, family: str, small_models: dict[str, Path], tmp_path: Path
) -> None:
    """Of a target that rotates part of each head, or by tables of its own in some layers, too."""
    for path in small_models[family].glob("*.json"):  # no weights
        shutil.copy(path, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    more = {"num_hidden_layers": 7}
    if types := config.get("layer_types"):
        more["layer_types"] = [types[layer % len(types)] for layer in range(7)]
    config |= more
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = SpecConfig(algorithm=algorithm, adaptive=False, num_steps=2)
    llm = LLM(str(tmp_path), spec, load_format="dummy", max_total_tokens=64, context_length=64)
    out = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True))[0]
    assert out.spec.num_draft_tokens > 0


class TestStandalone:
    def refuse(self, small_models: dict[str, Path], draft: Path, match: str, **flags: Any) -> None:
        with pytest.raises(ModelLoadError, match=match):
            load("STANDALONE", small_models["llama"], draft, **flags)

    def copy(self, small_models: dict[str, Path], tmp_path: Path, **config: Any) -> Path:
        draft = shutil.copytree(small_models["qwen2"], tmp_path / "draft")
        old = json.loads((draft / "config.json").read_text())
        (draft / "config.json").write_text(json.dumps(old | config))
        return Path(draft)

    def test_context(self, small_models: dict[str, Path], tmp_path: Path) -> None:
        draft = self.copy(small_models, tmp_path, max_position_embeddings=128)
        self.refuse(small_models, draft, "max_position_embeddings.*--context-length 128")
        load("STANDALONE", small_models["llama"], draft, context_length=128)

    def test_special_tokens(self, small_models: dict[str, Path], tmp_path: Path) -> None:
        draft = self.copy(small_models, tmp_path)
        self.rename_tokens(draft, {"<eos>": "<bos>", "<bos>": "<eos>"})
        self.refuse(small_models, draft, "special token <(b|e)os> is [01] .* [01] in the target's")

    def test_encoding(self, small_models: dict[str, Path], tmp_path: Path) -> None:
        draft = self.copy(small_models, tmp_path)
        self.rename_tokens(draft, {"e": "l", "l": "e"})
        self.refuse(small_models, draft, "cuts text differently")

    def test_tokens_that_a_sample_does_not_show(
        self, small_models: dict[str, Path], tmp_path: Path
    ) -> None:
        draft = self.copy(small_models, tmp_path)
        self.rename_tokens(draft, {"Q": "Z", "Z": "Q"})
        self.refuse(small_models, draft, "2 tokens have other numbers .* '[QZ]'")

    def rename_tokens(self, draft: Path, names: dict[str, str]) -> None:
        path = draft / "tokenizer.json"
        tokenizer = json.loads(path.read_text())
        vocab = tokenizer["model"]["vocab"]
        tokenizer["model"]["vocab"] = {names.get(name, name): i for name, i in vocab.items()}
        for token in tokenizer["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        path.write_text(json.dumps(tokenizer))
