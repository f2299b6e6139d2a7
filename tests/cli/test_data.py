from __future__ import annotations

import json
from pathlib import Path

import pytest

from specengine.cli.main import main
from specengine.draft.train.data.dataset import TokenDataset
from tests.train.chat_model import save_chat_model

SETTINGS = ["--max-len", "128", "--answer-max-tokens", "16", "--user-max-tokens", "60"]
ENGINE = ["--device", "cpu", "--context-length", "128", "--max-running-requests", "8"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat_model")
    save_chat_model(folder)
    return folder


def test_make_in_shards_merge_and_show(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"Say {i}"]}) + "\n" for i in range(6)))
    for shard in ("0", "1"):
        out = ["--out", str(tmp_path / shard), "--prompts", str(prompts)]
        share = ["--shard-index", shard, "--num-shards", "2", "--temperatures", "0", "1"]
        assert main(["data", "make", str(model), *out, *share, *SETTINGS, *ENGINE]) == 0
    parts = [str(tmp_path / "0"), str(tmp_path / "1")]
    assert main(["data", "merge", str(tmp_path / "all"), *parts]) == 0
    merged = TokenDataset(tmp_path / "all")
    assert len(merged) == sum(len(TokenDataset(part)) for part in parts)
    assert merged.manifest.counts["conversations"] == 6
    capsys.readouterr()
    shown = ["data", "show", str(tmp_path / "all"), "--documents", "1", "--model", str(model)]
    assert main(shown) == 0
    printed = capsys.readouterr().out
    assert merged.manifest.data_sha256 in printed
    assert "<|im_start|>user" in printed


def test_recipes_from_a_file(model: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("max_conversations: 3\nseed: 5\nuser_temperatures: [1.0]\n" + "max_len: 99")
    given = ["--recipe", str(recipe), *SETTINGS, "--seed", "6", "--min-prompt-words", "1"]
    assert main(["data", "make", str(model), "--out", str(tmp_path / "d"), *given, *ENGINE]) == 0
    made = TokenDataset(tmp_path / "d").manifest.made
    assert (made["seed"], made["max_len"], made["user_temperatures"]) == (6, 128, [1.0])


def test_bad_recipes(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    command = ["data", "make", str(model), "--out", str(tmp_path / "d"), "--recipe", str(recipe)]
    recipe.write_text("max_token: 3\n")
    assert main(command) == 2
    assert "'max_token' is not known; did you mean max_tokens" in capsys.readouterr().err
    recipe.write_text("- 3\n")
    assert main(command) == 2
    recipe.write_text("max_tokens: many\n")
    assert main(command) == 2
    assert "max_tokens must be a whole number" in capsys.readouterr().err


def test_what_is_no_data_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "show", str(tmp_path)]) == 1
    assert "is no finished data set" in capsys.readouterr().err
