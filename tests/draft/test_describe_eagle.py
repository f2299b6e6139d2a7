"""What is said of each form of EAGLE drafts, and of what they lack."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from specengine.draft.eagle.checkpoint import EagleCheckpoint
from specengine.draft.eagle.describe import describe
from tests.draft import eagle_checkpoints as checkpoints


@pytest.fixture(scope="module")
def target(small_models: dict[str, Path]) -> Path:
    return small_models["llama"]


def lines(draft: Path) -> list[str]:
    return describe(EagleCheckpoint.read(str(draft)))


def test_sglang_draft(target: Path, tmp_path: Path) -> None:
    assert lines(checkpoints.eagle3(tmp_path / "a", target, fc_norm=True)) == [
        "EAGLE-3 in the layout of SGLang, 1 layer",
        "embedding: the target's, head: its own",
        "vocabulary: 100 of the target's 320 tokens, by d2t",
        "reads the outputs of layers [0, 1, 2] of the target, counted from 0",
        "options: fc_norm",
    ]


def test_speculators_drafts(target: Path, tmp_path: Path) -> None:
    layers = {"layer": {"num_hidden_layers": 2}}
    draft = checkpoints.eagle3(tmp_path / "a", target, speculators=True, **layers)
    assert lines(draft)[0] == "EAGLE-3 in the layout of speculators, 2 layers"
    draft = checkpoints.speculators_eagle(tmp_path / "b", target, layernorms=True, bias=True)
    assert lines(draft) == [
        "EAGLE in the layout of speculators, 1 layer",
        "embedding: the target's, head: the target's",
        "vocabulary: the target's, 320 tokens",
        "options: layernorms",
    ]


def test_draft_of_the_last_state(target: Path, tmp_path: Path) -> None:
    draft = checkpoints.eagle3_of_last_state(tmp_path / "a", target)
    assert "reads the target's last state, after its final norm" in lines(draft)


def test_missing_tensors_are_named(target: Path, tmp_path: Path) -> None:
    layers = {"layer": {"num_hidden_layers": 2}}
    draft = checkpoints.eagle3(tmp_path / "a", target, speculators=True, **layers)
    tensors = load_file(draft / "model.safetensors")
    raw = json.loads((draft / "config.json").read_text())
    for name in ("d2t", "layers.1.mlp.up_proj.weight", "layers.1.input_layernorm.weight"):
        del tensors[name]
    assert lines(checkpoints.save(draft, tensors, raw))[-1] == (
        "missing tensors: layers.1.mlp.up_proj.weight, layers.1.input_layernorm.weight, d2t"
    )
