"""Runs of first_tokens.py: peers by shape and this engine, side by side."""

from __future__ import annotations

import importlib
import json
import shlex
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.jobs.check import problem_of
from benchmarks.jobs.plan import Job
from tests.support.peer_scripts import peer_script
from tests.test_layering import ROOT

PEER = """
with turn(turns):
    out.write_text(" ".join(words))
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks/peers")
    return importlib.import_module("first_tokens")


@pytest.fixture
def peer(tmp_path: Path) -> str:
    return peer_script(tmp_path, PEER)


def test_each_peer_runs_each_shape_with_graphs_of_the_measured_lengths(
    script: ModuleType, peer: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    given = ["smollm2-shape", "llama-3.1-8b-shape", "--sglang", peer, "--vllm", peer]
    assert script.main([*given, "--lengths", "32", "1024", "--out", str(out)]) == 0
    names = {f"{one}-{shape}" for one in ("sglang", "vllm") for shape in given[:2]}
    assert {one.stem for one in out.glob("*.json")} == names
    vllm = (out / "vllm-llama-3.1-8b-shape.json").read_text()
    assert "--model llama-3.1-8b-shape --first-token 32 1024 " in vllm
    graphs = json.dumps({"cudagraph_capture_sizes": [1, 2, 32]})  # 512 tokens at most by default
    assert f"--option compilation_config={graphs}" in vllm
    assert f"kv_cache_memory_bytes={8192 * 128 * 1024} " in vllm
    sglang = (out / "sglang-smollm2-shape.json").read_text()
    assert "cuda_graph_bs_prefill=[32, 1024]" in sglang
    assert "compilation_config" not in sglang


def test_our_run_is_understood_and_waits_for_its_turn(script: ModuleType, tmp_path: Path) -> None:
    ours = ["--ours", "qwen3-30b-a3b-shape", "smollm2-shape"]
    args = script.parse_args(["smollm2-shape", *ours, "--out", str(tmp_path)])
    (run,) = script.runs(args)
    command = ["python", str(Path(run.command[1]).relative_to(ROOT)), *run.command[2:]]
    job = Job("ours", shlex.join([*command, "--turns", "folder"]), 1)
    assert problem_of(job, ROOT) is None
