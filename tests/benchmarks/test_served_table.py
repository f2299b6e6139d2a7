"""Servers of several engines that start at once and are measured in turns."""

from __future__ import annotations

import importlib
import json
import shlex
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.jobs.check import problem_of
from benchmarks.jobs.plan import Job
from benchmarks.jobs.processes import processes_with
from tests.support.processes import connects
from tests.test_layering import ROOT

MARK = "SERVED_TABLE_TEST"
# Answers once the file of the other server is there, which that one writes when it starts.
FAKE = """
import json, pathlib, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
port, own, other = int(sys.argv[1]), pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
own.touch()
class Handler(BaseHTTPRequestHandler):
    def answer(self):
        self.send_response(200 if other.exists() else 503)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": "m"}]}).encode())
    do_GET = do_POST = answer
HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
ENDS = "raise SystemExit(7)"
LENGTH_FLAGS = {
    "specengine": "--context-length",
    "vllm": "--max-model-len",
    "sglang": "--context-length",
}
FOLLOWS = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1]) - 1))"


@pytest.fixture(scope="module", autouse=True)
def folder() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks/serving")
        servers = importlib.import_module("servers")
        patch.setattr(servers, "ASKED_EACH", 0.05)
        patch.setattr(servers, "GIVEN_BACK", 0.0)  # there is no card
        yield


@pytest.fixture(scope="module")
def table(folder: None) -> ModuleType:
    return importlib.import_module("served_table")


@pytest.fixture
def eagle3(table: ModuleType, tmp_path: Path) -> Any:
    layers = 33 * 4 * 8 * 128
    return table.Shape("llama-3.1-8b-shape", tmp_path / "model", tmp_path / "draft", layers)


def free_ports(count: int) -> int:
    """The first of so many in a row."""
    while True:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
        if port + count < 65536 and not any(connects(port + place) for place in range(count)):
            return port


def set_argv(monkeypatch: pytest.MonkeyPatch, out: Path, *more: str) -> None:
    monkeypatch.setattr(sys, "argv", ["served_table.py", "--out", str(out), *more])


def fake_commands(*programs: str) -> dict[str, Any]:
    """Of engines one, two and so on; the first two answer once both have started."""

    def command(place: int, shape: Any, port: int, share: float | None) -> list[str]:
        files = [str(shape.folder.parent / f"{MARK}-{one}") for one in (place, 1 - place)]
        return ["-c", programs[place], str(port), *files]

    names = ("one", "two", "three")
    return {
        name: lambda *given, place=place: command(place, *given)
        for place, name in enumerate(names[: len(programs)])
    }


def test_servers_start_at_once_and_are_measured_in_turns_without_the_one_that_died(
    table: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(MARK, "1")
    monkeypatch.setattr(table, "COMMANDS", fake_commands(FAKE, FAKE, ENDS))
    first, seen = free_ports(3), []

    def measure(args: Any, server: Any, works: Sequence[Any]) -> int:
        up = [connects(first + place) for place in range(2)]
        seen.append((server.name, server.is_ready, up))
        return 0 if server.is_ready else len(works)

    monkeypatch.setattr(table, "measure", measure)
    engines = ["--engines", "one", "two", "three", "--together", "--port", str(first)]
    set_argv(monkeypatch, tmp_path, *engines, "--small", "--only", "tiny")
    assert table.main() == 1
    assert seen == [
        ("one-tiny", True, [True, True]),
        ("two-tiny", True, [False, True]),
        ("three-tiny", False, [False, False]),
    ]
    assert "three-tiny: ended with status 7" in capsys.readouterr().err
    monkeypatch.delenv(MARK)
    assert not [*processes_with(MARK, "1")]


def test_server_with_a_head_start_is_ready_before_the_next_one_starts(
    table: ModuleType, tmp_path: Path
) -> None:
    port, file = free_ports(2), str(tmp_path / "up")
    programs = [FAKE, FOLLOWS + FAKE]
    first, second = (
        table.Server(
            f"server-{place}",
            [sys.executable, "-c", program, str(port + place), file, file],
            port + place,
            tmp_path / f"{place}.log",
            30.0,
            60.0 * (1 - place),
        )
        for place, program in enumerate(programs)
    )
    with table.running([first, second]):
        assert (first.is_ready, second.is_ready) == (True, True)


def test_server_that_is_late_is_ended(
    table: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MARK, "2")
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    server = table.Server("late", command, free_ports(1), tmp_path / "late.log", 0.5)
    with table.running([server]):
        assert not server.is_ready
        assert not [*processes_with(MARK, "2")]


def test_shared_card_gives_each_server_memory_for_all_requests_of_a_point(
    table: ModuleType, eagle3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = ["specengine", "vllm", "sglang"]
    set_argv(monkeypatch, tmp_path, "--together", "--engines", *engines)
    setting = next(one for one in table.SETTINGS if one.name == "8b-eagle3")
    (group,) = table.groups(table.parsed(), setting, eagle3)
    assert [one.port for one in group] == [8917, 8918, 8919]
    assert [one.head_start > 0 for one in group] == [True, False, False]
    ours, vllm, sglang = (options(one.command) for one in group)
    slots = int(ours["--max-total-tokens"])
    assert slots == int(sglang["--max-total-tokens"])
    assert int(vllm["--kv-cache-memory-bytes"]) == slots * 132 * 1024
    assert 3 * float(ours["--mem-fraction-static"]) <= 1
    assert 3 * float(vllm["--gpu-memory-utilization"]) <= 1
    for work in setting.works:
        asked = options(shlex.split(work.options))
        tokens = int(asked["--prompt-len"]) + int(asked["--output-len"]) + 16
        assert max(map(int, asked.get("--concurrency", "0").split())) * tokens <= slots
    assert 4 * 1.1 * slots * eagle3.slot_bytes < 140 << 30


def options(words: Sequence[str]) -> dict[str, str]:
    """Their values, several of one joined."""
    found: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word
            found[name] = ""
        elif name:
            found[name] = f"{found[name]} {word}".strip()
    return found


def test_servers_that_are_not_together_have_the_whole_card(
    table: ModuleType, eagle3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = ["--python-of", "vllm=/peer", "sglang="]
    engines = ["--engines", "specengine", "vllm", "sglang", "specengine"]
    set_argv(monkeypatch, tmp_path, *engines, *peers)
    found = table.groups(table.parsed(), table.SETTINGS[-1], eagle3)
    names = [[one.name for one in group] for group in found]
    assert names == [["specengine-8b-eagle3"], ["vllm-8b-eagle3"], ["specengine-2-8b-eagle3"]]
    assert found[1][0].command[0] == "/peer"
    for (one,) in found:
        assert not {"--mem-fraction-static", "--gpu-memory-utilization"} & {*one.command}


@pytest.mark.parametrize("name", ["smollm2-shape", "llama-3.1-8b-shape"])
def test_no_server_is_asked_for_more_positions_than_its_model_has(
    name: str, table: ModuleType
) -> None:
    with table.shape_of(name, None) as shape:
        commands = {engine: make(shape, 1, None) for engine, make in table.COMMANDS.items()}
        config = json.loads((shape.folder / "config.json").read_text())
    for engine, flag in LENGTH_FLAGS.items():
        words = commands[engine]
        given = int(words[words.index(flag) + 1])
        assert given == min(8448, config["max_position_embeddings"])


@pytest.mark.parametrize("share", [None, 1 / 3])
def test_our_server_understands_its_command(
    table: ModuleType, eagle3: Any, share: float | None
) -> None:
    command = ["python", *table.COMMANDS["specengine"](eagle3, 8917, share)]
    assert problem_of(Job("served", shlex.join(command), 1), ROOT) is None
