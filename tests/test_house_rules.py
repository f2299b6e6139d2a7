"""Rules of CONTRIBUTING.md that can be read off the files: a round reads as the algorithm, no code
asks for an algorithm by name, functions and files stay short, filed figures are what pages show."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from specengine.core.registry import DRAFTERS
from specengine.draft.names import ALIASES
from specengine.engine.round.host import HostRound
from tests.test_layering import ROOT, sources

NAMES = {*DRAFTERS, *ALIASES}
MAY_ASK = "specengine/lab/"  # what tells the owner of a draft about it
MOST_FUNCTION_LINES, MOST_FILE_LINES, MOST_ROUND_LINES = 50, 320, 40
RESULT = r"benchmarks/results/([\w-]+\.\w+)"


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


def asked_by_name(tree: ast.AST) -> Iterator[int]:
    """Lines on which something is compared with an algorithm's name, or matched with it."""
    for node in ast.walk(tree):
        parts: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            parts = [node.value]
        for part in parts:
            values = {one.value for one in ast.walk(part) if isinstance(one, ast.Constant)}
            if any(isinstance(value, str) and value.upper() in NAMES for value in values):
                yield getattr(node, "lineno", 0)


def long_functions(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            if node.end_lineno - node.lineno + 1 > MOST_FUNCTION_LINES:
                yield node.name


def test_host_round_is_one_short_function() -> None:
    lines, _ = inspect.getsourcelines(HostRound.run)
    assert len(lines) < MOST_ROUND_LINES
    source = "".join(lines)
    verbs = ["draft", "prepare(", "forward_batch_generation(", "accept(", "compact_kv(", "observe("]
    places = [source.index(verb) for verb in verbs]
    assert places == sorted(places), "draft, prepare, verify, accept, keep, observe"


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.AST]:
    return {short(path): ast.parse(path.read_text()) for path in sources()}


def test_no_code_asks_for_an_algorithm_by_name(trees: dict[str, ast.AST]) -> None:
    asked = {
        path: list(asked_by_name(tree))
        for path, tree in trees.items()
        if not path.startswith(MAY_ASK)
    }
    assert len(asked) > 300
    assert {path: lines for path, lines in asked.items() if lines} == {}


def test_files_and_functions_are_short(trees: dict[str, ast.AST]) -> None:
    """Kernels are not counted: their length is the algorithm's."""
    texts = {short(path): path.read_text() for path in sources()}
    texts = {path: text for path, text in texts.items() if not path.startswith("kernels/")}
    assert len(texts) > 300
    lines = {path: text.count("\n") for path, text in texts.items()}
    assert {path: count for path, count in lines.items() if count > MOST_FILE_LINES} == {}
    functions = {path: list(long_functions(trees[path])) for path in texts}
    assert {path: names for path, names in functions.items() if names} == {}


def test_pages_of_results_show_their_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    report = importlib.import_module("report")
    drawn = report.pages()
    assert len(drawn) > 10
    for path, text in drawn.items():
        assert path.read_text() == text, f"{short(path)}: run `python benchmarks/report.py`"
    assert set((ROOT / "benchmarks/results").glob("*.md")) == set(drawn)


def test_linked_results_exist() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    pages += [path for top in ("docs", "draft", "target") for path in ROOT.glob(f"{top}/**/*.md")]
    named = {name for page in pages for name in re.findall(RESULT, page.read_text())}
    assert len(named) > 3
    assert {name for name in named if not (ROOT / "benchmarks/results" / name).exists()} == set()


def test_breaches_of_the_rules_are_found() -> None:
    for source in (
        'if spec.algorithm == "EAGLE": pass',
        'x = name in ("ngram", "other")',
        'match name:\n    case "NEXTN": pass',
    ):
        assert list(asked_by_name(ast.parse(source))), source
    assert not list(asked_by_name(ast.parse('x = {"EAGLE": 1}; y = x == "other"')))
    body = "\n".join("    x = 1" for _ in range(MOST_FUNCTION_LINES))
    assert list(long_functions(ast.parse(f"def f() -> None:\n{body}"))) == ["f"]
