"""Engines that start together are measured one at a time."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.peer_scripts import peer_script
from tests.test_layering import ROOT

PEER = """
log = out.parent / "all.txt"
if "sglang" in words[0] and "EAGLE3" not in words:
    sys.exit(5)
def note(what):
    with log.open("a") as file:
        file.write(f"{what} {out.stem}\\n")
note("up")
with turn(turns):
    note("begin")
    time.sleep(0.1)
    note("end")
out.write_text(" ".join(words))
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks/peers")
    return importlib.import_module("side_by_side")


@pytest.fixture
def peer(tmp_path: Path) -> str:
    return peer_script(tmp_path, PEER)


def test_all_are_up_before_one_is_measured_and_one_that_failed_holds_up_none(
    script: ModuleType, peer: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    given = ["--model", "m", "--sglang", peer, "--vllm", peer, "--eagle3", "--out", str(out)]
    assert script.main([*given, "--at-once", "4", "--new-tokens", "6"]) == 1
    assert "failed: sglang\n" in capfd.readouterr().out
    lines = (out / "all.txt").read_text().splitlines()
    three = {"vllm", "sglang-eagle3", "vllm-eagle3"}
    assert set(lines[:3]) == {f"up {name}" for name in three}
    measured = lines[3:]
    for begin, end in zip(measured[::2], measured[1::2], strict=True):
        assert begin.replace("begin", "end") == end  # none begins amid another's turn
    assert {line.split()[1] for line in measured} == three
    assert "--new-tokens 6" in (out / "vllm.json").read_text()
    assert "kv_cache_memory_bytes" not in (out / "sglang-eagle3.json").read_text()


def test_waves_follow_each_other_and_plain_runs_come_first(
    script: ModuleType, peer: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    given = ["--model", "m", "--vllm", peer, "--eagle3", "--out", str(out), "--at-once", "1"]
    assert script.main([*given, "--option-of", "vllm:seed=3", "--option-of", "sglang:x=1"]) == 0
    lines = (out / "all.txt").read_text().splitlines()
    assert lines == [
        f"{what} {name}" for name in ("vllm", "vllm-eagle3") for what in ("up", "begin", "end")
    ]
    words = (out / "vllm.json").read_text()
    assert "--option seed=3" in words
    assert "x=1" not in words
    assert "EAGLE3" not in words
    assert "EAGLE3" in (out / "vllm-eagle3.json").read_text()


def test_one_that_is_late_is_ended_before_others_are_measured(
    script: ModuleType, tmp_path: Path, peer: str
) -> None:
    never = script.Run("never", ["sleep", "60"])
    wrapped = [
        "sh",
        "-c",
        f'"{peer}" "$@"; exit $?',
        "peer",
        "vllm",
    ]  # no exec: a child of the shell
    named = script.Run("vllm", [*wrapped, "--json", str(tmp_path / "vllm.json")])
    assert script.run_together([never, named], tmp_path, 2, 60) == ["never"]
    assert (tmp_path / "vllm.json").exists()


def test_one_that_does_not_end_is_ended_at_the_limit(
    script: ModuleType, tmp_path: Path, peer: str
) -> None:
    program = f"import sys, time; sys.path.insert(0, {str(ROOT / 'benchmarks/peers')!r})\n"
    program += "from pathlib import Path; from turns import turn\n"
    program += "with turn(Path(sys.argv[-1])): time.sleep(60)"
    stuck = script.Run("stuck", [sys.executable, "-c", program])
    assert script.run_together([stuck], tmp_path, 60, 1.5) == ["stuck"]
