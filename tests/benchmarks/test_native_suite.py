"""The suite's runner: which cards workers see, what is written of each test, and the table."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.halves import each_value
from tests.test_layering import ROOT

TESTS = """
import os
import pytest

def test_passes(): pass
def test_fails(): assert 1 == 2, "the reason"
@pytest.mark.skip(reason="no")
def test_is_skipped(): pass
@pytest.fixture
def bad():
    yield
    raise RuntimeError("at the end")
def test_fails_at_its_end(bad): pass
class TestClass:
    @pytest.mark.parametrize("text", ["a::b", "c.d[e]"])
    def test_named(self, text): pass
"""
JUNIT = """<testsuites><testsuite>
<testcase classname="tests.engine.test_a" name="test_x[1]"/>
<testcase classname="tests.engine.test_a.TestB" name="test_y"><failure/></testcase>
<testcase classname="tests.test_top" name="test_z"><skipped/></testcase>
<testcase classname="" name="tests.kernels.test_c"><error/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("native_suite")


def run_pytest(folder: Path, *arguments: str) -> list[dict[str, str]]:
    file = folder / "out.jsonl"
    command = [sys.executable, "-m", "pytest", str(folder), "-q", "-p", "no:schemathesis"]
    command += ["-p", "no:cacheprovider", "-p", "benchmarks.jobs.outcomes", "--outcomes", str(file)]
    done = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    return [json.loads(line) for line in file.read_text().splitlines()]


def outcomes_in_lines(suite: ModuleType, folder: Path, *arguments: str) -> None:
    """Checked with the lines of TESTS and of a file that cannot be read."""
    (folder / "test_some.py").write_text(TESTS)
    (folder / "test_broken.py").write_text("import no_such_module_at_all")
    lines = run_pytest(folder, "--continue-on-collection-errors", *arguments)
    failed = {line["id"].rpartition("::")[2].rpartition("/")[2] for line in lines if "text" in line}
    assert failed == {"test_fails", "test_fails_at_its_end", "test_broken.py"}
    assert any("the reason" in line.get("text", "") for line in lines)
    found = suite.outcomes_of(folder / "out.jsonl")
    assert sorted(found.values()) == ["failed"] * 3 + ["passed"] * 3 + ["skipped"]
    assert {name for _, name in found} >= {"test_named[a::b]", "test_named[c.d[e]]"}


def test_each_test_that_ended_has_a_line(suite: ModuleType, tmp_path: Path) -> None:
    outcomes_in_lines(suite, tmp_path)


def test_workers_see_their_cards_before_a_conftest_is_read_and_each_test_has_a_line(
    tmp_path: Path, suite: ModuleType
) -> None:
    (tmp_path / "conftest.py").write_text(
        "import os, pathlib\n"
        f"path = pathlib.Path({str(tmp_path)!r}, 'seen-' + os.environ['CUDA_VISIBLE_DEVICES'])\n"
        "path.touch()"
    )
    args = suite.parse_args(["run", "tests/cli", "--out", str(tmp_path), "--workers", "1"])
    command = suite.command_of(args, ["4", "7"])
    workers = command[command.index("--tx") :]
    assert workers == [
        *("--tx", "1*popen//env:CUDA_VISIBLE_DEVICES=4"),
        *("--tx", "1*popen//env:CUDA_VISIBLE_DEVICES=7"),
        *("--dist", "worksteal"),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
        outcomes_in_lines(suite, tmp_path, *workers)
    seen = {path.name for path in tmp_path.glob("seen-*")}
    assert seen == {"seen-4", "seen-7", "seen-4,7"}, "the last is the process that starts them"


def test_workers_see_all_cards_where_that_is_asked(suite: ModuleType, tmp_path: Path) -> None:
    argv = ["run", "tests/cli", "--out", str(tmp_path), "--workers", "3", "--all-cards"]
    command = suite.command_of(suite.parse_args(argv), ["0", "1"])
    assert command[-4:] == ["--tx", "3*popen", "--dist", "worksteal"]
    assert suite.cards_of(None) == suite.cards_of("") == []
    alone = suite.parse_args([*argv[:-2], "0", "--deselect", "tests/cli/test_main.py"])
    command = suite.command_of(alone, ["0"])
    assert "--dist" not in command
    assert [*map(str, command[-2:])] == ["--deselect", "tests/cli/test_main.py"]


@pytest.mark.parametrize(("is_installed", "workers"), each_value(1, [True, False], ["1", "0"]))
def test_plugin_that_warns_of_workers_is_left_out(
    is_installed: bool, workers: str, suite: ModuleType, tmp_path: Path
) -> None:
    """As pytest-benchmark does, by the name under which it is installed."""
    facts = tmp_path / "site" / "some-1.0.dist-info"
    facts.mkdir(parents=True)
    if is_installed:
        (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: some\nVersion: 1.0\n")
        (facts / "entry_points.txt").write_text("[pytest11]\nbenchmark = warns_of_workers\n")
        (facts.parent / "warns_of_workers.py").write_text("raise UserWarning('there are workers')")
    (tmp_path / "test_some.py").write_text("def test_passes(): pass")
    argv = ["run", "tests/cli", "--out", str(tmp_path / "out"), "--workers", workers]
    args = suite.parse_args(argv)
    args.paths = [tmp_path / "test_some.py"]
    path = os.pathsep.join([str(facts.parent), str(ROOT)])
    command = [*suite.command_of(args, []), "-p", "no:schemathesis", "-p", "no:cacheprovider"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_path_that_is_not_there_is_refused(suite: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        suite.parse_args(["run", "tests/no_such_room", "--out", str(tmp_path)])


def test_rows_are_rooms_of_both_kinds_of_file(suite: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_text(JUNIT)
    lines = [
        {"id": "tests/engine/test_a.py::test_x[1]", "outcome": "failed"},
        {"id": "tests/engine/test_a.py::test_new", "outcome": "passed"},
        {"id": "tests/engine/test_a.py::test_new", "outcome": "failed"},
        {"id": "tests/core/test_gone.py", "outcome": "failed"},
    ]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    found = suite.outcomes_of(tmp_path / "a.xml") | suite.outcomes_of(tmp_path / "b.jsonl")
    rows = {row["room"]: tuple(row[one] for one in suite.OUTCOMES) for row in suite.rows_of(found)}
    assert rows == {
        "core": (0, 1, 0),
        "engine": (0, 3, 0),
        "kernels": (0, 1, 0),
        suite.TOP: (0, 0, 1),
        "together": (0, 5, 1),
    }
    assert [*rows][-1] == "together"
