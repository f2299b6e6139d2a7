"""The command `specengine bench accept`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from specengine.cli.bench.accept import plan_of, settings_of
from specengine.cli.main import build_parser, main


def parse(*argv: str) -> argparse.Namespace:
    return build_parser().parse_args(["bench", "accept", *argv])


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "few.jsonl"
    path.write_text("".join(json.dumps({"turns": [f"{i} a b a b"]}) + "\n" for i in range(3)))
    return path


def test_settings_come_from_everywhere(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("suffix: {algorithm: SUFFIX}\n")
    flags = ["--speculative-num-draft-tokens", "5"]
    found = settings_of(parse("--settings", str(file), "--setting", "n: algorithm=NGRAM", *flags))
    assert [one.name for one in found] == ["suffix", "n"]
    assert [one.spec.num_draft_tokens for one in found] == [5, 5]
    [alone] = settings_of(parse("--speculative-algorithm", "NGRAM", *flags))
    assert alone.name == "NGRAM"


def test_a_plan(prompts: Path) -> None:
    plan = plan_of(
        parse(
            *["--prompts", str(prompts), "--limit", "2", "--temperature", "0", "0.5", "0"],
            *["--setting", "n: algorithm=NGRAM", "--batch-size", "2", "--device", "cpu"],
            *["--speed", "--speed-batch-size", "4"],
        )
    )
    assert [len(one.prompts) for one in plan.sets] == [2]
    assert plan.temperatures == (0.0, 0.5)
    assert plan.batch_size == 4  # what timing wants
    assert plan.max_new_tokens == 256


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "nothing to measure: give --setting"),
        (["--limit", "0"], "--limit 0: must be at least 1"),
        (["--max-new-tokens", "1"], "no round is left"),
        (["--temperature", "-1"], "--temperature -1: must not be negative"),
        (["--setting", "n: algorithm=NGRAM", "--prompts", "absent"], "no prompt set 'absent'"),
        (["--setting", "NGRAM"], "give a name and options"),
    ],
)
def test_bad_usage(
    argv: list[str], message: str, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    default = [] if "--prompts" in argv else ["--prompts", str(prompts)]
    assert main(["bench", "accept", *default, *argv]) == 2
    assert message in capsys.readouterr().err


def test_a_bench_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench"])
    assert caught.value.code == 2
    assert "BENCH" in capsys.readouterr().err


def test_from_command_to_table(
    prompts: Path,
    small_models: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = tmp_path / "result.json"
    command = [
        *["bench", "accept", str(small_models["llama"]), "--device", "cpu"],
        *["--prompts", str(prompts), "--max-new-tokens", "6", "--json", str(result)],
        *["--log-level", "error", "--setting", "n-gram: algorithm=NGRAM"],
    ]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "Accepted length τ" in shown
    assert "n-gram" in shown
    [setting] = json.loads(result.read_text())["settings"]
    assert setting["error"] is None
    assert main([*command, "--setting", "absent: algorithm=STANDALONE"]) == 1
    assert "drafts with a model; name it" in capsys.readouterr().out
