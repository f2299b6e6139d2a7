"""Whether a job's command would be understood: the script is there, and its own parser takes the
arguments. Nothing of it runs behind that."""

from __future__ import annotations

import argparse
import io
import os
import runpy
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.jobs.plan import Job, filled

_PLACEHOLDERS = ("old", "vllm", "sglang")  # what leases are given, besides {out} and {python}


class _ParsedError(BaseException):
    """Carries the arguments past the script's own handlers."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__()
        self.arguments = arguments


def problem_of(job: Job, tree: Path) -> str | None:
    """What is wrong with its command; None where nothing is. An interpreter is its first word, or
    bash; what lies behind is a script of the tree, or -m and a module."""
    values = dict.fromkeys(_PLACEHOLDERS, "/given")
    try:
        words = shlex.split(filled(job.command, {**values, "python": "python", "out": "out"}))
    except ValueError as error:
        return str(error)
    if len(words) < 2:
        return "a command is an interpreter and a script"
    interpreter, script, *arguments = words
    if interpreter == "bash":
        return _problem_of_shell(tree / script)
    if script == "-m" and arguments:
        module, *arguments = arguments
        run = lambda: runpy.run_module(module, run_name="__main__", alter_sys=True)  # noqa: E731
        return _problem_of_python(run, [module, *arguments], tree)
    path = tree / script
    if not path.is_file():
        return f"there is no {script}"
    run = lambda: runpy.run_path(str(path), run_name="__main__")  # noqa: E731
    return _problem_of_python(run, [str(path), *arguments], tree)


def _problem_of_shell(path: Path) -> str | None:
    if not path.is_file():
        return f"there is no {path.name}"
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
    return done.stderr.strip() or None


def _problem_of_python(run: Callable[[], Any], argv: list[str], tree: Path) -> str | None:
    said = io.StringIO()
    with _undisturbed(argv, tree), redirect_stderr(said), redirect_stdout(io.StringIO()):
        try:
            run()
        except _ParsedError as found:
            return _problem_of_config(found.arguments)
        except SystemExit as error:
            lines = said.getvalue().strip().splitlines() or [f"status {error.code}"]
            return lines[-1]
        except ImportError as error:
            return f"{type(error).__name__}: {error}"
    return "it ended without reading its arguments"


def _problem_of_config(arguments: argparse.Namespace) -> str | None:
    """Of an engine's options, what their parser does not see."""
    if not hasattr(arguments, "print_config"):
        return None
    from specengine.cli.args import config_of
    from specengine.core.errors import ConfigError
    from specengine.engine.spec_options import resolve_spec
    from specengine.runner.loader.builtin import BUILTIN_MODELS

    try:
        config = config_of(arguments)
        spec = config.spec
        if getattr(arguments, "random_draft", None):
            spec = replace(spec, algorithm="EAGLE3", draft_model_path="random")
        resolve_spec(spec)
    except ConfigError as error:
        return str(error)
    name = config.model.model
    if name.endswith("-shape") and name not in BUILTIN_MODELS:
        return f"{name}: no such shape; {', '.join(BUILTIN_MODELS)}"
    return None


@contextmanager
def _undisturbed(argv: list[str], tree: Path) -> Iterator[None]:
    """The script's parser ends it; modules that it imports from its own folder are forgotten, as
    another script may have others of the same name."""
    parse = argparse.ArgumentParser.parse_known_args
    depth = 0  # a subcommand's parser runs within its command's

    def parse_known_args(self: argparse.ArgumentParser, *given: Any, **more: Any) -> Any:
        nonlocal depth
        depth += 1
        found, rest = parse(self, *given, **more)
        depth -= 1
        if depth:
            return found, rest
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        raise _ParsedError(found)

    path = [str(Path(argv[0]).parent), str(tree), *sys.path]
    before, place = set(sys.modules), Path.cwd()
    os.chdir(tree)
    try:
        with (
            patch.object(argparse.ArgumentParser, "parse_known_args", parse_known_args),
            patch.object(sys, "argv", argv),
            patch.object(sys, "path", path),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        os.chdir(place)
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None) or ""
            if file.startswith(str(tree / "benchmarks")):
                del sys.modules[name]
