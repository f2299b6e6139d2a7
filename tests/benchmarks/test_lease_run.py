"""A lease over processes and a clock that the test moves: limits, the deadline, what it says."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.jobs.plan import Job
from benchmarks.jobs.run import GRACE, Lease, Outcome, summary
from benchmarks.jobs.schedule import Placed, Schedule


@dataclass
class FakeProcess:
    """ends: seconds of the clock, by itself. obeys: whether an interrupt ends it."""

    world: World
    ends: float
    status: int = 0
    obeys: bool = True
    calls: list[str] = field(default_factory=list)

    def poll(self) -> int | None:
        if self.obeys and "interrupt" in self.calls:
            return 130
        return self.status if self.world.now >= self.ends else None

    def interrupt(self) -> None:
        self.calls.append("interrupt")

    def kill(self) -> None:
        self.calls.append("kill")

    def last_line(self) -> str:
        return "the last line"


class World:
    """takes: how long each job runs, by its name, and its status."""

    def __init__(
        self,
        jobs: list[Job],
        takes: dict[str, float],
        cards: tuple[str, ...] = ("0",),
        deadline: float = 1000.0,
    ) -> None:
        self.now, self.takes, self.lines = 0.0, takes, list[str]()
        self.statuses, self.obeys = dict[str, int](), True
        self.processes: dict[str, FakeProcess] = {}
        self.lease = Lease(
            Schedule(jobs, cards, deadline), self.launch, lambda: self.now, self.lines.append
        )

    def launch(self, placed: Placed) -> FakeProcess:
        name = placed.job.name
        if name == "no such command":
            raise FileNotFoundError("no such file")
        status = self.statuses.get(name, 0)
        process = FakeProcess(self, self.now + self.takes[name], status, self.obeys)
        self.processes[name] = process
        return process

    def run(self, until: float = 2000.0) -> dict[str, Outcome]:
        while self.now < until and self.lease.step():
            self.now += 1
        return {one.job.name: one for one in self.lease.outcomes}


def job(name: str, seconds: float = 10, limit: float = 0, **more: object) -> Job:
    return Job(name, "x", seconds, limit or 2 * seconds, **more)  # type: ignore[arg-type]


def test_jobs_run_one_after_the_other_on_one_card_and_each_is_told() -> None:
    world = World([job("a", 10), job("b", 5)], {"a": 12, "b": 4})
    found = world.run()
    assert {name: (one.status, one.seconds) for name, one in found.items()} == {
        "a": ("ok", 12),
        "b": ("ok", 4),
    }
    assert world.lines == [
        "a: starts, card 0, 10 s expected",
        "a: rc 0, 12 s: the last line",
        "b: starts, card 0, 5 s expected",
        "b: rc 0, 4 s: the last line",
    ]
    assert world.processes["a"].calls == ["kill"], "what it left behind is ended"


def test_job_that_fails_does_not_stop_the_others() -> None:
    world = World([job("a", 10), job("b", 5)], {"a": 3, "b": 4})
    world.statuses["a"] = 3
    found = world.run()
    assert (found["a"].status, found["b"].status) == ("failed", "ok")
    assert "a: rc 3, 3 s: the last line" in world.lines


def test_job_at_its_limit_is_asked_to_end_first() -> None:
    world = World([job("a", 10, 15), job("b", 5)], {"a": 500, "b": 4})
    found = world.run()
    assert found["a"].status == "limit"
    assert found["a"].seconds == 16
    assert world.processes["a"].calls == ["interrupt", "kill"]
    assert found["b"].status == "ok"


def test_job_that_ignores_the_interrupt_is_killed_after_the_grace() -> None:
    world = World([job("a", 10, 15)], {"a": 500})
    world.obeys = False
    found = world.run()
    assert found["a"].seconds == 15 + GRACE
    assert world.processes["a"].calls == ["interrupt", "kill"]


def test_no_job_starts_that_would_not_end_and_none_runs_past_the_deadline() -> None:
    jobs = [job("a", 40, 500), job("b", 30), job("c", 5)]
    world = World(jobs, {"a": 500, "b": 1, "c": 1}, deadline=60)
    found = world.run()
    assert found["a"].status == "limit"
    assert found["a"].seconds == 61
    assert found["b"].said == "it takes 30 s, and 29 s are left"
    assert {found["b"].status, found["c"].status} == {"left out"}
    assert set(world.processes) == {"a"}


def test_command_that_cannot_be_started_fails_and_frees_its_card() -> None:
    world = World([job("no such command", 10), job("b", 5)], {"b": 4})
    found = world.run()
    assert found["no such command"].status == "failed"
    assert found["b"].status == "ok"


def test_cut_lease_ends_what_runs_and_names_what_did_not() -> None:
    world = World([job("a", 10), job("b", 5)], {"a": 500, "b": 4})
    world.run(until=3)
    world.lease.cut()
    found = {one.job.name: one.status for one in world.lease.outcomes}
    assert found == {"a": "limit", "b": "left out"}
    assert world.processes["a"].calls == ["kill"]
    assert not world.lease.step()


def test_summary_has_failures_first_and_counts() -> None:
    outcomes = [
        Outcome(job("good"), "ok", 3, "done"),
        Outcome(job("gone"), "left out", said="no card"),
        Outcome(job("bad"), "failed", 2, "boom"),
    ]
    lines = summary(outcomes)
    assert [line.split()[0] for line in lines[:3]] == ["failed", "left", "ok"]
    assert lines[-1] == "1 ok, 1 left out, 0 limit, 1 failed"
