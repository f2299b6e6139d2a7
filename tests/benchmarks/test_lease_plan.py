"""Plans of jobs: what is read, what is refused, and why a job is left out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.jobs.plan import (
    Job,
    MissingValueError,
    PlanError,
    filled,
    on_cards,
    read_plan,
    why_not,
)

JOB = "name: a, command: '{python} x.py', seconds: 5"


def plan(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    return path


def test_plan_gives_defaults_and_joins_lines_of_a_command(tmp_path: Path) -> None:
    text = "- name: a\n  command: >\n    {python} x.py\n      --y 3\n  seconds: 5\n  env: {N: 1}\n"
    (job,) = read_plan(plan(tmp_path, text))
    assert job == Job("a", "{python} x.py --y 3", 5, limit=10, env={"N": "1"})
    assert (job.cards, job.beside, job.needs, job.priority) == (1, "machine", (), 0)


def test_all_cards_are_those_of_the_machine_and_one_at_least(tmp_path: Path) -> None:
    text = f"- {{{JOB}, cards: all}}\n- {{name: b, command: x, seconds: 5}}"
    jobs = read_plan(plan(tmp_path, text))
    assert [[one.cards for one in on_cards(jobs, count)] for count in (0, 1, 2)] == [
        [1, 1],
        [1, 1],
        [2, 1],
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1", "list of jobs"),
        ("[]", "list of jobs"),
        ("- 5", "job 1 is no mapping"),
        ("- {name: a, seconds: 5}", "command is missing"),
        (f"- {{{JOB}, card: 1}}", "no such field: card"),
        (f"- {{{JOB}, cards: 3}}", "cards 3"),
        (f"- {{{JOB}, cards: some}}", "cards some"),
        (f"- {{{JOB}, limit: 4}}", "seconds <= limit"),
        (f"- {{{JOB}, beside: all}}", "beside all"),
        (f"- {{{JOB}}}\n- {{{JOB}}}", "two jobs are named a"),
        ("- {name: a/b, command: x, seconds: 5}", "a name has"),
        ("- {name: [", "plan.yaml"),
    ],
)
def test_plan_that_is_wrong_is_refused_by_file_and_job(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(PlanError, match=said) as caught:
        read_plan(plan(tmp_path, text))
    assert "plan.yaml" in str(caught.value)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"no\.yaml"):
        read_plan(tmp_path / "no.yaml")


def test_placeholders_are_replaced_and_unknown_ones_named() -> None:
    assert filled("{python} {out}/a.json", {"python": "p", "out": "o"}) == "p o/a.json"
    with pytest.raises(MissingValueError, match="--set vllm="):
        filled("{vllm} x.py", {})


def test_optional_placeholder_is_empty_without_its_value() -> None:
    assert filled("x.py '{vllm?}'", {}) == "x.py ''"
    assert filled("x.py '{vllm?}'", {"vllm": "v"}) == "x.py 'v'"


def job(**more: object) -> Job:
    given = {"name": "a", "command": "{python} x.py {out}", "seconds": 5, **more}
    return Job(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (job(), None),
        (job(cards=2), "needs 2 cards, and 1 are there"),
        (job(memory=100), "a card of 100 GiB, and one of 80 is there"),
        (job(memory=100, cards=0), None),
        (job(memory=80), None),
        (job(command="{old} x.py"), "no old was given"),
        (job(needs=("json", "yaml")), None),
        (job(needs=("no_such_module",)), "module no_such_module is not installed"),
        (job(needs=("{here}/no/such",)), "does not exist"),
        (job(needs=("{here}/",)), None),
        (job(needs=("{there}/x",)), "no there was given"),
    ],
)
def test_job_is_left_out_where_something_is_missing(
    tmp_path: Path, given: Job, said: str | None
) -> None:
    values = {"python": "p", "here": str(tmp_path)}
    found = why_not(given, values, [80.0], sys.path)
    assert found is None if said is None else found is not None and said in found


def test_module_is_found_in_a_folder_of_packages(tmp_path: Path) -> None:
    (tmp_path / "carried.py").touch()
    needs = job(needs=("carried",))
    assert why_not(needs, {"python": "p"}, [80.0], [*sys.path, str(tmp_path)]) is None
    assert why_not(needs, {"python": "p"}, [80.0], sys.path) is not None
