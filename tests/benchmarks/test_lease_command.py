"""The command: a plan of small jobs runs in time, what fails is told, and what is cut is packed."""

from __future__ import annotations

import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.test_layering import ROOT

PLAN = """
- {name: good, command: "{python} CODE good {out}", cards: 0, seconds: 5}
- {name: bad, command: "{python} CODE bad {out}", cards: 1, seconds: 5}
- {name: pair, command: "{python} CODE cards {out}", cards: 2, seconds: 5}
- {name: peer, command: "{vllm} CODE good {out}", seconds: 5}
- {name: long, command: "{python} CODE good {out}", cards: 0, seconds: 600}
"""
CODE = """
import os, pathlib, sys, threading
kind, folder = sys.argv[1:]
print(os.environ["CUDA_VISIBLE_DEVICES"])
pathlib.Path(folder, "file").write_text(kind)
if kind == "hangs":
    threading.Event().wait()
sys.exit(kind == "bad")
"""


@pytest.fixture
def start(tmp_path: Path) -> list[str]:
    (tmp_path / "code.py").write_text(CODE)
    (tmp_path / "plan.yaml").write_text(PLAN.replace("CODE", str(tmp_path / "code.py")))
    command = [sys.executable, str(ROOT / "benchmarks/lease.py"), str(tmp_path / "plan.yaml")]
    return [*command, "--out", str(tmp_path / "out"), "--cards", "5", "6", "--seconds", "100"]


def packed(tmp_path: Path) -> dict[str, str]:
    with tarfile.open(tmp_path / "out/results.tar.xz") as found:
        members = {one.name: found.extractfile(one) for one in found}
        return {name: file.read().decode() for name, file in members.items() if file}


def test_plan_runs_and_its_files_are_packed(tmp_path: Path, start: list[str]) -> None:
    done = subprocess.run(start, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    files = packed(tmp_path)
    assert {name for name in files if name.endswith("file")} == {
        *("good/file", "bad/file", "pair/file")
    }
    assert files["pair/log.txt"].splitlines()[-1] == "5,6"
    assert files["bad/log.txt"].splitlines()[-1] in ("5", "6")
    assert files["good/log.txt"].splitlines()[-1] == ""
    assert files["lease.txt"] in done.stdout
    assert "peer: left out: no vllm was given" in done.stdout
    assert "long: left out: it takes 600 s" in done.stdout
    assert "2 ok, 2 left out, 0 limit, 1 failed" in done.stdout


def test_only_named_jobs_run_and_status_is_0_if_all_are_good(
    tmp_path: Path, start: list[str]
) -> None:
    done = subprocess.run([*start, "--only", "good", "pair"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "2 ok, 0 left out, 0 limit, 0 failed" in done.stdout


def test_terminated_lease_ends_its_jobs_and_packs_what_they_wrote(
    tmp_path: Path, start: list[str]
) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(plan.read_text().replace("good {out}", "hangs {out}", 1))
    with subprocess.Popen([*start, "--only", "good"], stdout=subprocess.PIPE, text=True) as lease:
        assert lease.stdout is not None
        assert "good: starts" in lease.stdout.readline()
        lease.send_signal(signal.SIGTERM)
        said = lease.stdout.read()
    assert lease.returncode == 1
    assert "the lease was cut" in said
    assert "good/log.txt" in packed(tmp_path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--only", "other"], "--only other: no such job; good, bad"),
        (["--set", "vllm"], "NAME=VALUE"),
    ],
)
def test_wrong_options_are_refused(start: list[str], options: list[str], said: str) -> None:
    done = subprocess.run([*start, *options], capture_output=True, text=True)
    assert done.returncode > 0
    assert said in done.stderr
