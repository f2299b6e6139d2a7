"""A plan: the jobs that one lease of a machine is to run, read from a YAML list."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import yaml

BESIDE = ("card", "machine", "nothing")
MOST_CARDS = 2
ALL = -1
_PLACEHOLDER = re.compile(r"\{(\w+)(\??)\}")
_NAME = re.compile(r"[\w.-]+")


class PlanError(ValueError):
    """A plan that cannot be read. The message names the file, the job and what to write."""


class MissingValueError(ValueError):
    """A command names a placeholder that the lease was not given."""


@dataclass(frozen=True)
class Job:
    """name: of its folder. command: words as a shell would split them, without a shell; {out},
    {python} and what the lease was given replace their placeholders; {vllm?} is empty where no vllm
    was given. seconds: how long it takes, as expected. limit: seconds after which it is ended;
    default twice as many. cards: how many GPUs it has; in a plan "all" (here ALL) for every one of
    the lease. beside: what may run at the same time: "machine" other jobs on this machine, but none
    on its cards; "card" on its cards too, jobs that say the same; "nothing" no job at all. memory:
    GiB that a card must have. needs: modules, and paths (with a slash), without which it is left
    out. priority: lower ones start first. env: variables of its environment."""

    name: str
    command: str
    seconds: float
    limit: float = 0.0
    cards: int = 1
    beside: str = "machine"
    memory: float = 0.0
    needs: tuple[str, ...] = ()
    priority: int = 0
    env: Mapping[str, str] = field(default_factory=dict)


def read_plan(path: Path) -> list[Job]:
    """In the order of the file. Raises PlanError."""
    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise PlanError(f"{path}: {error}") from error
    if not isinstance(found, list) or not found:
        raise PlanError(f"{path}: a plan is a list of jobs, and this is {type(found).__name__}")
    jobs = [_job(path, number, one) for number, one in enumerate(found, 1)]
    names = [one.name for one in jobs]
    if twice := {name for name in names if names.count(name) > 1}:
        raise PlanError(f"{path}: two jobs are named {', '.join(sorted(twice))}: rename one")
    return jobs


def _job(path: Path, number: int, given: Any) -> Job:
    if not isinstance(given, dict):
        raise PlanError(f"{path}: job {number} is no mapping of name, command, seconds …")
    where = f"{path}: job {given.get('name', number)}"
    known = {one.name: one for one in fields(Job)}
    needed = {name for name, one in known.items() if _is_needed(one)}
    if unknown := set(given) - set(known):
        raise PlanError(f"{where}: no such field: {', '.join(sorted(unknown))}; {', '.join(known)}")
    if missing := needed - set(given):
        raise PlanError(f"{where}: {', '.join(sorted(missing))} is missing")
    values = dict(given)
    values["command"] = " ".join(str(given["command"]).split())
    values["needs"] = tuple(given.get("needs", ()))
    values["env"] = {name: str(value) for name, value in given.get("env", {}).items()}
    values["cards"] = ALL if given.get("cards") == "all" else given.get("cards", 1)
    values["limit"] = given.get("limit", 2 * given["seconds"])
    job = Job(**values)
    if problem := _problem(job):
        raise PlanError(f"{where}: {problem}")
    return job


def _is_needed(one: Any) -> bool:
    return one.default is MISSING and one.default_factory is MISSING


def _problem(job: Job) -> str | None:
    if not _NAME.fullmatch(str(job.name)):
        return "a name has letters, digits, '.', '_' and '-' alone"
    if not 0 < job.seconds <= job.limit:
        return f"seconds {job.seconds:g}, limit {job.limit:g}: 0 < seconds <= limit"
    if job.cards not in range(ALL, MOST_CARDS + 1):
        return f"cards {job.cards}: 0 to {MOST_CARDS}, or all"
    if job.beside not in BESIDE:
        return f"beside {job.beside}: one of {', '.join(BESIDE)}"
    return None


def on_cards(jobs: Sequence[Job], count: int) -> list[Job]:
    """As they are on a machine of so many cards: those of all cards have these, one at least."""
    return [replace(one, cards=max(count, 1)) if one.cards == ALL else one for one in jobs]


def filled(text: str, values: Mapping[str, str]) -> str:
    """With its placeholders replaced. Raises MissingValueError, but for those with a "?"."""

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name not in values and match[2]:
            return ""
        if name not in values:
            raise MissingValueError(f"no {name} was given: --set {name}=…")
        return values[name]

    return _PLACEHOLDER.sub(value, text)


def why_not(
    job: Job, values: Mapping[str, str], cards: Sequence[float], paths: Sequence[str]
) -> str | None:
    """Why a job cannot run on this machine, whatever its time; None where it can. values: of the
    placeholders. cards: GiB of each. paths: where its modules are looked for."""
    try:
        filled(job.command, values | {"out": ""})
        needs = [filled(one, values) for one in job.needs]
    except MissingValueError as error:
        return str(error)
    if job.cards > len(cards):
        return f"it needs {job.cards} cards, and {len(cards)} are there"
    if job.cards and job.memory > min(cards):
        return f"it needs a card of {job.memory:g} GiB, and one of {min(cards):.0f} is there"
    for one in needs:
        if "/" in one and not Path(one).exists():
            return f"{one} does not exist"
        if "/" not in one and PathFinder.find_spec(one, [*paths]) is None:
            return f"the module {one} is not installed"
    return None
