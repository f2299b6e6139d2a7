"""Engines that run on one checkpoint, one at a time."""

from __future__ import annotations

import importlib
import json
import runpy
import shlex
import sys
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.jobs.check import problem_of
from benchmarks.jobs.plan import Job, read_plan
from benchmarks.jobs.processes import processes_with
from benchmarks.peers.turns import GO
from tests.support.families import small_config
from tests.test_layering import ROOT

PEER = """#!{python}
import pathlib, sys
words = sys.argv[1:]
folder = pathlib.Path(words[words.index("--model") + 1])
assert len([*folder.glob("*.safetensors")]) == 1 and (folder / "tokenizer.json").is_file()
if "sglang" in words[0]:
    sys.exit(5)
pathlib.Path(words[words.index("--json") + 1]).write_text(" ".join(words))
"""

NO_PROCESS = 1 << 23  # no system has so many
NUMBERS = count()


@pytest.fixture(scope="module")
def script() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks/peers")
        return importlib.import_module("same_weights")


@pytest.fixture
def shape(tmp_path: Path) -> str:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(small_config("qwen3moe").to_dict()))
    return str(path)


@pytest.fixture
def _checkpoint_is_written_here(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its script, of whose imports this process has made most."""

    def finished(command: Sequence[str], limit: float) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [*command[1:]])
            runpy.run_path(command[1], run_name="__main__")

    monkeypatch.setattr(script, "finished", finished)


class Here:
    """A run in this process, of a script whose imports it has made: it is up at once, and has its
    turn when it is asked whether it has ended."""

    def __init__(self, command: Sequence[str], turns: Path) -> None:
        self.command = [*command, "--turns", str(turns)]
        self.turns = turns
        self.pid = NO_PROCESS + next(NUMBERS)
        self.returncode: int | None = None
        (turns / f"{self.pid}.up").touch()

    def poll(self) -> int | None:
        if self.returncode is None and (self.turns / GO).exists():
            self.returncode = status_of(self.command)
        return self.returncode

    def wait(self) -> None:
        if self.returncode is None:
            self.returncode = -9  # it was ended


def status_of(command: Sequence[str]) -> int:
    """Of a script that runs here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [*command[1:]])
        patch.setattr(sys, "path", [*sys.path])
        try:
            runpy.run_path(command[1], run_name="__main__")
        except SystemExit as ended:
            return int(ended.code or 0)
    return 0


@pytest.fixture(params=["here", pytest.param("processes", marks=pytest.mark.slow)])
def _where_this_engine_runs(
    request: pytest.FixtureRequest, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes import for seconds what this one has imported."""
    if request.param == "processes":
        return
    side_by_side = importlib.import_module("side_by_side")
    started = side_by_side._started

    def start(run: Any, turns: Path, out: Path) -> Any:
        is_ours = run.command[0] == sys.executable
        return Here(run.command, turns) if is_ours else started(run, turns, out)

    monkeypatch.setattr(side_by_side, "_started", start)
    monkeypatch.setattr("specengine.lab.card._SECONDS", 0.01)


@pytest.mark.usefixtures("_checkpoint_is_written_here", "_where_this_engine_runs")
def test_engines_run_on_one_checkpoint_and_a_failed_peer_loses_no_other(
    script: ModuleType, shape: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    peer, place, out = tmp_path / "peer", tmp_path / "place", tmp_path / "out"
    peer.write_text(PEER.format(python=sys.executable))
    peer.chmod(0o755)
    place.mkdir()
    options = ["--batch-sizes", "1", "4", "--repeats", "1", "--new-tokens", "6"]
    peers = ["--sglang", str(peer), "--vllm", str(peer), "--eagle3", "vllm"]
    given = [shape, "--out", str(out), "--folder", str(place), *peers, *options, "--at-once", "3"]
    assert script.main(given) == 1
    assert "failed: sglang\n" in capfd.readouterr().out
    assert {one.name for one in out.glob("*.json")} == {
        f"{name}.json" for name in ("specengine", "experts", "vllm", "vllm-eagle3")
    }
    assert not [*place.iterdir()]
    model = str(place / "same-weights-small/small")
    assert f"--model {model} --batch-sizes 1 4" in (out / "vllm.json").read_text()
    assert "--algorithm EAGLE3" in (out / "vllm-eagle3.json").read_text()
    ours = json.loads((out / "specengine.json").read_text())
    assert [setting["name"] for setting in ours["settings"]] == ["no speculation"]
    assert [one["batch_size"] for one in ours["settings"][0]["points"]] == [1, 4]
    _check_experts(json.loads((out / "experts.json").read_text()))


def _check_experts(report: dict[str, Any]) -> None:
    one, four = report["experts"]
    assert (one["read"], one["even"], one["experts"]) == (3, pytest.approx(3), 8)
    assert 3 < four["read"] <= 8
    assert four["even"] == pytest.approx(8 * (1 - (5 / 8) ** 4))
    assert four["limit"] == pytest.approx(4 * report["card"]["copy"] / four["bytes"])
    config = small_config("qwen3moe")
    elements = 3 * config.hidden_size * config.moe_intermediate_size  # of an expert
    layers = len(four["read_by_layer"])
    added = sum(four["read_by_layer"]) - sum(one["read_by_layer"])
    assert layers == 2
    bytes_each = (four["bytes"] - one["bytes"]) / added / elements
    assert bytes_each == pytest.approx(2, rel=1e-6) or bytes_each == pytest.approx(4, rel=1e-6)


def test_mtp_layer_and_random_draft_are_given_to_this_engine(
    script: ModuleType, shape: str, tmp_path: Path
) -> None:
    args = script.parse_args([shape, "--out", str(tmp_path)])
    args.fields, args.draft_vocab = script.fields_of(shape), 320
    drafted, experts = script.own_runs(args, tmp_path / "model", None)
    assert "--random-draft 320 " in " ".join(drafted.command)
    assert experts.name == "experts"
    args.mtp = script.parse_args([shape, "--out", str(tmp_path), "--mtp"]).mtp
    (layered, _) = script.own_runs(args, tmp_path / "model", tmp_path / "mtp")
    assert f"MTP --speculative-draft-model-path {tmp_path}/mtp " in " ".join(layered.command)
    assert "--random-draft" not in layered.command


def test_ranks_and_memory_are_given_to_every_engine_and_eagle3_of_peers_comes_last(
    script: ModuleType, shape: str, tmp_path: Path
) -> None:
    peers = ["--sglang", "/sglang", "--vllm", "/vllm", "--eagle3", "sglang", "vllm"]
    ranks = ["--tp-size", "2", "--at-once", "3", "--tokens", "4096"]
    args = script.parse_args([shape, "--out", str(tmp_path), *peers, *ranks])
    args.fields, args.draft_vocab = script.fields_of(shape), 320
    runs = script.runs(args, tmp_path / "model", None)
    names = ["specengine", "sglang", "vllm", "sglang-eagle3", "vllm-eagle3"]
    assert [one.name for one in runs] == names  # experts of a layer are counted on one card
    own, sglang, vllm, *_ = (" ".join(one.command) for one in runs)
    for command in (own, sglang, vllm):
        assert "--tp-size 2" in command
    assert "--mem-fraction-static 0.98 --max-total-tokens 4096" in own
    assert "max_total_tokens=4096" in sglang
    assert "kv_cache_memory_bytes=" in vllm


def test_mtp_of_peers_comes_last_and_runs_that_are_not_named_are_left_out(
    script: ModuleType, shape: str, tmp_path: Path
) -> None:
    peers = ["--sglang", "/sglang", "--vllm", "/vllm", "--mtp", "specengine", "sglang", "vllm"]
    given = [shape, "--out", str(tmp_path), *peers]
    args = script.parse_args([*given, "--only", "vllm-mtp", "specengine", "sglang", "sglang-mtp"])
    args.fields, args.draft_vocab = script.fields_of(shape), 320
    model = tmp_path / "model"
    runs = script.runs(args, model, model)
    assert [one.name for one in runs] == ["specengine", "sglang", "sglang-mtp", "vllm-mtp"]
    own, plain, *layered = (" ".join(one.command) for one in runs)
    assert f"MTP --speculative-draft-model-path {model} " in own
    assert "--algorithm" not in plain
    for command in layered:
        assert "--algorithm MTP --accept-length 2.5 --num-steps 3 " in command


def test_mtp_of_peers_is_refused_where_they_would_not_find_it(
    script: ModuleType, shape: str, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="--mtp vllm: peers find the MTP layer of Qwen3-Next"):
        script.main([shape, "--out", str(tmp_path), "--mtp", "vllm"])


@pytest.mark.parametrize("at_once", ["1", "2"])
def test_our_commands_are_understood(
    script: ModuleType, shape: str, tmp_path: Path, at_once: str
) -> None:
    args = script.parse_args([shape, "--out", str(tmp_path), "--at-once", at_once])
    args.fields, args.draft_vocab = script.fields_of(shape), 320
    for one in script.own_runs(args, tmp_path / "model", None):
        path = str(Path(one.command[1]).relative_to(ROOT))
        words = ["python", path, *one.command[2:], "--turns", "folder"]
        assert problem_of(Job(one.name, shlex.join(words), 1), ROOT) is None


def test_missing_room_is_refused_before_work(
    script: ModuleType, shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "_free", lambda place: 1000)
    monkeypatch.setattr(script, "finished", lambda *given: pytest.fail("it ran something"))
    with pytest.raises(SystemExit, match=r"checkpoint is .* GB, and .* has room for .*--folder"):
        script.main([shape, "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="does not exist"):
        script.main([shape, "--out", str(tmp_path / "out"), "--folder", str(tmp_path / "none")])


def test_shared_memory_with_too_little_memory_beside_is_not_taken(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(script, "_memory", lambda: script.HEADROOM + 5000)
    assert script._free(tmp_path) == 5000
    assert script.room(1000, None) == tmp_path
    assert script.room(5000, None) != tmp_path


def test_folder_that_is_there_already_is_refused_and_kept(
    script: ModuleType, tmp_path: Path
) -> None:
    there = tmp_path / "same-weights-a"
    there.mkdir()
    with pytest.raises(SystemExit, match="delete it"), script.new_folder(tmp_path, "a"):
        pass
    assert there.is_dir()


def test_run_past_its_limit_ends_with_all_that_it_started(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "SAME_WEIGHTS_TEST"
    monkeypatch.setenv(name, "1")
    program = "import subprocess; subprocess.run(['sleep', '60'])"
    said = script.finished([sys.executable, "-c", program], 1.0)
    assert said == "ended after 1 s, its limit"
    monkeypatch.delenv(name)
    until = time.monotonic() + 10
    while [*processes_with(name, "1")]:
        assert time.monotonic() < until, "a process goes on"
        time.sleep(0.05)
    assert "No such file" in str(script.finished(["/no/interpreter"], 1.0))


def test_plans_run_where_no_peer_was_given() -> None:
    jobs = [
        job
        for plan in ("same-weights", "same-weights-latent")
        for job in read_plan(ROOT / f"benchmarks/plans/{plan}.yaml")
    ]
    assert len(jobs) == 4
    for job in jobs:
        assert job.needs == ()
        assert '--sglang "{sglang?}"' in job.command
        assert '--vllm "{vllm?}"' in job.command
