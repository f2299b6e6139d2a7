"""Commands of plans are read by their scripts' own parsers, and what is wrong is named."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from benchmarks.jobs.check import problem_of
from benchmarks.jobs.plan import Job
from tests.test_layering import ROOT

SCRIPT = """
import argparse, sys
import neighbour
parser = argparse.ArgumentParser()
parser.add_argument("--size", type=int, choices=[1, 2], required=True)
parser.add_argument("--old")
commands = parser.add_subparsers(required=True)
commands.add_parser("go").add_argument("place")
try:
    parser.parse_args()
except Exception:
    pass
raise AssertionError("it runs")
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/script.py").write_text(SCRIPT)
    (tmp_path / "benchmarks/neighbour.py").touch()
    (tmp_path / "benchmarks/silent.py").write_text("print(5)")
    (tmp_path / "good.sh").write_text("echo 5")
    (tmp_path / "bad.sh").write_text("if")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("{python} benchmarks/script.py --size 2 --old {old} go {out}/x", None),
        ("{vllm} benchmarks/script.py --size 2 go x", None),
        ("{python} benchmarks/script.py --size 3 go x", "invalid choice: 3"),
        ("{python} benchmarks/script.py --size 2 --more go x", "unrecognized arguments: --more"),
        ("{python} benchmarks/script.py --size 2 go x y", "unrecognized arguments: y"),
        ("{python} benchmarks/script.py go x", "required"),
        ("{python} benchmarks/none.py", "there is no benchmarks/none.py"),
        ("{python} benchmarks/silent.py", "without reading its arguments"),
        ("{python} -m no_such_module", "no_such_module"),
        ("{python}", "an interpreter and a script"),
        ("{other} benchmarks/script.py", "no other was given"),
        ("bash good.sh {out}", None),
        ("bash bad.sh", "syntax error"),
        ("bash none.sh", "there is no none.sh"),
    ],
)
def test_command_is_read_as_its_script_reads_it(tree: Path, command: str, said: str | None) -> None:
    parse, path, modules = argparse.ArgumentParser.parse_known_args, [*sys.path], set(sys.modules)
    found = problem_of(Job("a", command, 5), tree)
    assert found is None if said is None else found is not None and said in found, found
    assert argparse.ArgumentParser.parse_known_args is parse
    assert sys.path == path
    assert "neighbour" not in set(sys.modules) - modules


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("tiny --batch-sizes 1 8", None),
        ("tiny --random-draft 300 --speculative-num-steps 2", None),
        ("tiny --speculative-algorithm NO", "NO"),
        ("tiny --speculative-algorithm NGRAM --speculative-num-steps 2", "num-steps"),
        ("tiny --batch-size 1", "--batch-size"),
        ("tiny-shape --load-format dummy", "no such shape"),
    ],
)
def test_options_of_an_engine_are_checked_as_well(options: str, said: str | None) -> None:
    command = f"{{python}} -m specengine bench throughput {options}"
    found = problem_of(Job("a", command, 5), ROOT)
    assert found is None if said is None else found is not None and said in found, found
