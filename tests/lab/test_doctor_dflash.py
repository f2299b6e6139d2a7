"""The doctor on drafts of DFlash: told by their files, judged by blocks as serving runs them."""

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
from specengine.engine.proof.tiny_model import TinyModels, save_tiny_models
from specengine.lab.doctor.block_rows import unjudged_drafts
from specengine.lab.doctor.diagnose import Examination, diagnose
from specengine.lab.doctor.draft_rows import LEVELS
from specengine.lab.doctor.examined_drafter import find_algorithm
from specengine.lab.doctor.files import DraftFiles
from specengine.lab.doctor.hypotheses.layer_fields import DFlashFields
from specengine.lab.doctor.report import Diagnosis
from tests.draft.test_dflash import as_speculators
from tests.lab import doctor_world as world
from tests.lab.doctor_rounds import compared_rounds

PROMPTS = ["abcabcab", "the end", "0123", "x y z"]
SIZE = 64
Tensors = dict[str, Tensor]
Config = dict[str, Any]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return save_tiny_models(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def target(tiny: TinyModels) -> Path:
    """Says its last token again, for ever: without attention, its last state is a function of that
    token, and the head's row of a token is the very state. Each layer adds ten times as much as the
    one before, so that their outputs differ."""
    path = tiny.target / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if "o_proj" in name:
            tensors[name] = torch.zeros_like(tensors[name])
        if "down_proj" in name:
            tensors[name] = 10 ** (1 + int(name.split(".")[2])) * tensors[name]
        if "norm" in name:
            tensors[name] = torch.ones_like(tensors[name])
    state = tensors["model.embed_tokens.weight"]
    for layer in range(3):
        name = f"model.layers.{layer}.mlp."
        read = normed(state)
        gate, up = (read @ tensors[f"{name}{one}_proj.weight"].T for one in ("gate", "up"))
        inner = torch.nn.functional.silu(gate) * up
        state = state + inner @ tensors[f"{name}down_proj.weight"].T
    tensors["lm_head.weight"] = normed(state)
    save_file(tensors, path, metadata={"format": "pt"})
    return tiny.target


def normed(x: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()


@pytest.fixture(scope="module")
def draft(target: Path, tiny: TinyModels) -> Path:
    """It takes the first layer's output from the last one's, by less than hides the latter, and
    says the token that most of its context has."""
    path, eye = tiny.dflash / "model.safetensors", torch.eye(SIZE)
    tensors = load_file(path)
    for name, tensor in tensors.items():
        is_norm = tensor.dim() == 1 and "input_layernorm" not in name
        tensors[name] = torch.ones_like(tensor) if is_norm else torch.zeros_like(tensor)
    tensors["fc.weight"] = torch.cat([-40 * eye, eye], dim=1)
    tensors["layers.0.self_attn.v_proj.weight"] = eye[: SIZE // 2]
    tensors["layers.1.self_attn.v_proj.weight"] = eye[SIZE // 2 :]
    head_dim = SIZE // 4
    for layer in range(2):
        out = torch.zeros(SIZE, 4, head_dim)
        for kv_head in range(2):
            first = layer * SIZE // 2 + kv_head * head_dim
            out[first : first + head_dim, 2 * kv_head] = 100 * torch.eye(head_dim)
        tensors[f"layers.{layer}.self_attn.o_proj.weight"] = out.view(SIZE, SIZE)
    save_file(tensors, path)
    raw = json.loads((tiny.dflash / "config.json").read_text())
    raw["dflash_config"]["target_layer_ids"] = [0, 2]
    (tiny.dflash / "config.json").write_text(json.dumps(raw))
    return tiny.dflash


def examine(target: Path, draft: Path, new_tokens: int = 32) -> Diagnosis:
    config = world.config_of(target, draft)
    return diagnose(
        Examination(config, PROMPTS, new_tokens, with_reference=False), lambda what: None
    )


def planted(draft: Path, to: Path, plant: Callable[[Tensors, Config], object]) -> Path:
    tensors = load_file(draft / "model.safetensors")
    raw = json.loads((draft / "config.json").read_text())
    plant(tensors, raw)
    to.mkdir()
    save_file(tensors, to / "model.safetensors")
    (to / "config.json").write_text(json.dumps(raw))
    return to


def far_layer(tensors: Tensors, raw: Config) -> None:
    raw["dflash_config"]["target_layer_ids"] = [0, 1]


def speculators_counting(tensors: Tensors, raw: Config) -> None:
    """Refused: the target has no such layer."""
    raw["dflash_config"]["target_layer_ids"] = [1, 3]


def other_order(tensors: Tensors, raw: Config) -> None:
    tensors["fc.weight"] = torch.cat(tensors["fc.weight"].chunk(2, 1)[::-1], dim=1)


def other_vocabulary(tensors: Tensors, raw: Config) -> None:
    raw["vocab_size"] = 400


def noise(tensors: Tensors, raw: Config) -> None:
    """Every row depends on its position, and on all rows that it sees."""
    torch.manual_seed(3)
    for name, tensor in tensors.items():
        if "q_proj" in name or "k_proj" in name or "mlp" in name:
            tensors[name] = 0.15 * torch.randn(tensor.shape)
        if "input_layernorm" in name:
            tensors[name] = torch.full_like(tensor, 0.5)


@pytest.mark.parametrize("layout", ["z-lab", "speculators"])
def test_draft_is_told_by_its_files(layout: str, tiny: TinyModels, tmp_path: Path) -> None:
    folder = tiny.dflash if layout == "z-lab" else as_speculators(tiny.dflash, tmp_path / "draft")
    assert find_algorithm(str(folder), None) == "DFLASH"


@pytest.mark.parametrize("name", ["hidden_norm.weight", "fc.weight"])
def test_draft_without_a_tensor_is_told_by_its_configuration(
    name: str, draft: Path, target: Path, tmp_path: Path
) -> None:
    folder = planted(draft, tmp_path / "draft", lambda t, c: t.pop(name))
    found = examine(target, folder)
    assert found.algorithm == "DFLASH"
    assert found.form[-1] == f"missing tensors: {name}"
    assert f"missing tensor {name}" in found.refusal


def test_good_draft_is_healthy_and_its_form_is_said(draft: Path, target: Path) -> None:
    found = examine(target, draft)
    assert (found.algorithm, found.status, found.causes) == ("DFLASH", "healthy", [])
    assert found.form == [
        "DFlash in the layout of z-lab, 2 layers",
        "blocks of 4 tokens, the root included; mask token 299",
        "embedding: the target's, head: the target's",
        "vocabulary: the target's, 300 tokens",
        "reads the outputs of layers [0, 2] of the target, counted from 0",
    ]
    assert found.not_judged == []


@pytest.mark.parametrize("plant", [far_layer, speculators_counting, other_order])
def test_planted_mistake_is_the_one_cause(
    plant: Callable[[Tensors, Config], object], draft: Path, target: Path, tmp_path: Path
) -> None:
    found = examine(target, planted(draft, tmp_path / "draft", plant))
    [cause] = found.causes
    expected = {
        far_layer: ("layer ids", "config.json: set dflash_config.target_layer_ids to [0, 2]"),
        speculators_counting: (
            "layer ids",
            "config.json: set dflash_config.target_layer_ids to [0, 2]",
        ),
        other_order: ("feature order", cause.remedy),
    }[plant]
    assert (cause.suspect, cause.remedy) == expected
    assert found.after is not None
    assert found.after.first.value > 0.6


def test_draft_of_another_vocabulary_is_refused_for_it(
    draft: Path, target: Path, tmp_path: Path
) -> None:
    found = examine(target, planted(draft, tmp_path / "draft", other_vocabulary))
    assert (found.status, found.causes) == ("cause found", [])
    assert "target of vocab_size 400, and this one's is 300" in found.refusal
    assert not any("one layer" in line for line in found.verdict)


def test_acceptance_is_the_engines(draft: Path, target: Path, tmp_path: Path) -> None:
    """Round by round: what a block has accepted after a root is what its row says."""
    compared = compared_rounds(target, planted(draft, tmp_path / "draft", noise), "DFLASH", PROMPTS)
    assert len(compared) > 20
    assert [ours for ours, _ in compared] == [theirs for _, theirs in compared]
    assert len({ours for ours, _ in compared}) > 2


def test_drafts_past_those_that_are_judged_are_said(
    draft: Path, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = planted(draft, tmp_path / "draft", lambda t, c: c.update(block_size=8))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [one]}) + "\n" for one in PROMPTS))
    flags = ["--dtype", "float32", "--device", "cpu", "--new-tokens", "24", "--no-reference"]
    flags += ["--speculative-num-steps", "6", "--prompts", str(prompts)]
    assert main(["doctor", str(target), str(folder), *flags]) == 0
    shown = capsys.readouterr().out
    assert "blocks of 8 tokens" in shown
    assert "not judged: drafts 4 to 6 of each block" in shown
    assert unjudged_drafts(LEVELS) == []
    assert unjudged_drafts(2) == ["blocks of 2 masks: those that are judged have 3"]


def test_layers_of_the_layout_of_speculators_are_written_as_it_counts(
    draft: Path, tmp_path: Path
) -> None:
    files = DraftFiles.read(as_speculators(draft, tmp_path / "draft"), str, lambda name: True)
    fields = DFlashFields()
    assert fields.stated(files, 3) == (0, 2)
    moved = fields.with_layers(files, (1, 2))
    assert moved.raw["aux_hidden_state_layer_ids"] == [2, 3]
    assert fields.stated(moved, 3) == (1, 2)
    assert fields.remedy(files, (1, 2)).endswith("to [2, 3]")
