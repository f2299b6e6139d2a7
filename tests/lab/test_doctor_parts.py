"""What the doctor goes by: acceptance as the engine has it, features as transformers has them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specengine.cli.main import main
from specengine.core.errors import ConfigError
from specengine.engine.build import load
from specengine.engine.phases import Phases
from specengine.lab.doctor.checks import check_coverage, check_features, check_tokenizer
from specengine.lab.doctor.diagnose import Examination, diagnose
from specengine.lab.doctor.draft_rows import Judgement
from specengine.lab.doctor.examined_drafter import find_algorithm, read_drafter
from specengine.lab.doctor.features import compare_features
from specengine.lab.doctor.prompts import MOST, prompts_of
from specengine.lab.doctor.report import Diagnosis
from specengine.lab.doctor.scores import gain, score
from specengine.lab.doctor.target_rows import TargetForward
from specengine.lab.doctor.texts import write_texts
from tests.draft import eagle_checkpoints as checkpoints
from tests.draft.mtp_reading import add_mtp
from tests.lab import doctor_world as world
from tests.lab.doctor_rounds import compared_rounds

PROMPTS = ["abcabcab", "the end", "0123", "x y z"]


@pytest.fixture(scope="module")
def target(small_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter that knows bigrams is right about half of the time."""
    folder = tmp_path_factory.mktemp("parts") / "target"
    return checkpoints.almost_bigram(folder, small_models["llama"], 0.03)


@pytest.mark.parametrize("algorithm", ["EAGLE3", "EAGLE", "MTP", "STANDALONE"])
def test_acceptance_is_the_engines(algorithm: str, target: Path, tmp_path: Path) -> None:
    """Round by round: what a chain has accepted after a root is what its row says."""
    draft = {
        "EAGLE3": lambda: checkpoints.oracle_eagle3(tmp_path / "draft", target, 250, focus=20.0),
        "EAGLE": lambda: checkpoints.oracle_eagle(tmp_path / "draft", target, noise=0.3),
        "MTP": lambda: mtp(tmp_path / "draft", target),
        "STANDALONE": lambda: target,
    }[algorithm]()
    compared = compared_rounds(target, draft, algorithm, PROMPTS)
    assert len(compared) > 20
    assert [ours for ours, _ in compared] == [theirs for _, theirs in compared]
    assert algorithm == "MTP" or sum(ours for ours, _ in compared) > 10


def mtp(folder: Path, target: Path) -> Path:
    return add_mtp(target, folder, "deepseek")


def test_features_agree_with_transformers(target: Path) -> None:
    loaded, texts = load(world.config_of(target), Phases()), world.texts_of(target)
    found = compare_features(loaded, texts[:2])
    assert isinstance(found, list)
    assert [match.layer for match in found] == [0, 1, None]
    assert min(match.lowest for match in found) > 0.9999
    assert check_features(found).holds


def test_features_that_differ_are_named(target: Path) -> None:
    """From the layer on at which the engine computes something else."""
    loaded = load(world.config_of(target), Phases())
    weights = dict(loaded.model.named_parameters())  # type: ignore[attr-defined]
    for name, weight in weights.items():
        if name.endswith("layers.1.post_attention_layernorm.weight"):
            weight.data.mul_(-100)
    forward = TargetForward(loaded, 100)
    texts = [forward.rows(text) for text in write_texts(loaded, [[5, 6, 7], [9, 8]], 20)]
    found = compare_features(loaded, texts)
    assert isinstance(found, list)
    check = check_features(found)
    assert not check.holds
    assert "from layer 1 on" in check.remedy


def test_features_without_a_reference(target: Path) -> None:
    loaded = load(world.config_of(target), Phases())
    lost = replace(loaded, source=replace(loaded.source, directory=None))
    check = check_features(compare_features(lost, []))
    assert check.holds
    assert "not compared" in check.measured


def test_features_are_not_compared_with_a_pickled_reference(target: Path, tmp_path: Path) -> None:
    """Which transformers would read where there are no safetensors."""
    folder = tmp_path / "target"
    shutil.copytree(target, folder)
    loaded, texts = load(world.config_of(folder), Phases()), world.texts_of(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    found = compare_features(loaded, texts[:1])
    assert isinstance(found, str)
    assert "no file named model.safetensors" in found


def test_vocabularies_that_cover_little(target: Path, tmp_path: Path) -> None:
    draft = checkpoints.oracle_eagle3(tmp_path / "draft", target, 3)
    drafter = read_drafter("EAGLE3", load(world.config_of(target), Phases()), str(draft))
    texts = world.texts_of(target)
    check = check_coverage(drafter.files, texts, 0.2)
    assert check is not None
    assert (check.holds, check.explains) == (False, True)
    beside = check_coverage(drafter.files, texts, 0.0)
    assert beside is not None
    assert (beside.holds, beside.explains) == (False, False), "it is not what is wrong"
    assert check_coverage(drafter.files.without("d2t"), [], 0.0) is None


def test_another_tokenizer_beside_the_draft(target: Path, tmp_path: Path) -> None:
    tokenizer = world.tokenizer_of(target)
    assert check_tokenizer(tmp_path, tokenizer) is None
    same = check_tokenizer(target, tokenizer)
    assert same is not None
    assert same.holds
    other = json.loads((target / "tokenizer.json").read_text())
    vocab = other["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(other))
    found = check_tokenizer(tmp_path, tokenizer)
    assert found is not None
    assert not found.holds
    assert found.measured == "2 of 320 tokens differ: 'a', 'b'"


def test_algorithms_are_told_by_their_tensors(target: Path, tmp_path: Path) -> None:
    drafts = {
        "EAGLE3": checkpoints.eagle3(tmp_path / "eagle3", target),
        "EAGLE": checkpoints.eagle(tmp_path / "eagle", target),
        "MTP": mtp(tmp_path / "mtp", target),
        "STANDALONE": target,
    }
    assert {name: find_algorithm(str(one), None) for name, one in drafts.items()} == {
        name: name for name in drafts
    }
    assert find_algorithm("anywhere", "nextn") == "MTP"
    with pytest.raises(ConfigError, match="drafts without a model"):
        find_algorithm("anywhere", "NGRAM")


def examine(target: Path, draft: Path) -> Diagnosis:
    examination = Examination(world.config_of(target, draft), PROMPTS, 40, with_reference=False)
    return diagnose(examination, lambda what: None)


def edited(folder: Path, edit: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def swap_columns(name: str) -> Any:
    def edit(tensors: Any) -> None:
        tensors[name] = torch.cat(tensors[name].chunk(2, 1)[::-1], dim=1)

    return edit


def test_eagle(target: Path, tmp_path: Path) -> None:
    draft = checkpoints.oracle_eagle(tmp_path / "draft", target)
    assert examine(target, draft).status == "healthy"
    edited(draft, swap_columns("fc.weight"))
    [cause] = examine(target, draft).causes
    assert cause.suspect == "concatenation"


def test_mtp(small_models: dict[str, Path], tmp_path: Path) -> None:
    """A layer that passes on the embedding, where the target does no more than that."""
    target = checkpoints.almost_bigram(tmp_path / "target", small_models["llama"], 0.0)
    draft = mtp(tmp_path / "draft", target)
    root, size = "model.layers.3.", 64

    def passes_on(tensors: Any) -> None:
        for name in tensors:
            if name.startswith(root) and ("o_proj" in name or "down_proj" in name):
                tensors[name] = torch.zeros_like(tensors[name])
            if name.startswith(root) and "norm" in name:
                tensors[name] = torch.ones_like(tensors[name])
        eye = torch.eye(size)
        tensors[root + "eh_proj.weight"] = torch.cat([eye, torch.zeros(size, size)], dim=1)

    edited(draft, passes_on)
    found = examine(target, draft)
    assert found.status == "healthy"
    assert found.form[0] == "MTP in the form of DeepSeek-V3, 1 layer"
    edited(draft, swap_columns(root + "eh_proj.weight"))
    [cause] = examine(target, draft).causes
    assert cause.suspect == "concatenation"
    assert "eh_proj" not in cause.claim


def test_standalone(small_models: dict[str, Path], tmp_path: Path) -> None:
    """A copy of the target, whose rows of q and k lie as GGUF files keep them."""
    target = small_models["llama"]
    draft = checkpoints.almost_bigram(tmp_path / "draft", target, 1.0)
    found = examine(target, draft)
    assert found.status == "healthy"
    [form] = found.form
    assert form.startswith("a whole model: LlamaForCausalLM, layers 3, hidden_size 64")

    def in_pairs(tensors: Any) -> None:
        for name, rows in tensors.items():
            if "q_proj" in name or "k_proj" in name:
                halves = rows.view(-1, 2, 8, rows.shape[1])
                tensors[name] = halves.transpose(1, 2).reshape(rows.shape)

    edited(draft, in_pairs)
    [cause] = examine(target, draft).causes
    assert cause.suspect == "q/k rows"


def judgement(hits: list[list[bool]], prompts: list[int]) -> Judgement:
    rows = np.array(hits), np.zeros(len(hits)), np.array(prompts)
    return Judgement(*rows)


def test_scores() -> None:
    """By hand: of each row, what stands up to the first miss."""
    yes, no = True, False
    before = judgement([[no, yes, yes], [yes, no, yes], [yes, yes, yes]], [0, 0, 2])
    found = score(before)
    assert found.first.value == pytest.approx(2 / 3)
    assert found.tau.value == pytest.approx(7 / 3)
    after = judgement([[yes, yes, yes], [yes, no, no]], [0, 1])
    assert gain(after, before).tau.value == pytest.approx(3 - 7 / 3)


def test_prompts(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text("".join(json.dumps({"turns": [f"say {n}", "more"]}) + "\n" for n in range(50)))
    assert prompts_of(str(path))[:2] == ["say 0", "say 1"]
    assert len(prompts_of(str(path))) == MOST
    path.write_text(json.dumps({"turns": ["one"]}))
    with pytest.raises(ConfigError, match="one prompt"):
        prompts_of(str(path))


@pytest.fixture
def command(target: Path, tmp_path: Path) -> list[str]:
    draft = checkpoints.oracle_eagle3(tmp_path / "draft", target)
    return ["doctor", str(target), str(draft), *flags_of(tmp_path)]


def flags_of(folder: Path) -> list[str]:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [one]}) + "\n" for one in PROMPTS))
    return ["--dtype", "float32", "--new-tokens", "24", "--prompts", str(prompts)]


def test_command(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "healthy: the first drafted token is accepted" in shown
    assert "training-side and serving-side features agree" in shown
    edited(tmp_path / "draft", swap_columns("midlayer.self_attn.v_proj.weight"))
    for name in "qk":  # of zeros
        edited(tmp_path / "draft", swap_columns(f"midlayer.self_attn.{name}_proj.weight"))
    fixed = tmp_path / "fixed"
    assert main([*command, "--no-reference", "--json", "--write-fixed", str(fixed)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["status"] == "cause found"
    assert [cause["suspect"] for cause in found["causes"]] == ["concatenation"]
    assert found["written"] == str(fixed)
    assert main([command[0], command[1], str(fixed), *command[3:], "--no-reference"]) == 0


def test_command_without_hope(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = checkpoints.eagle3(tmp_path / "draft", target, draft_vocab=320)
    assert main(["doctor", str(target), str(draft), *flags_of(tmp_path), "--no-reference"]) == 2
    assert "nothing that was tried raises it" in capsys.readouterr().out


def test_a_directory_in_use_is_not_written_to(
    command: list[str], target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--no-reference", "--write-fixed", str(target)]) == 2
    assert "is not empty" in capsys.readouterr().err
