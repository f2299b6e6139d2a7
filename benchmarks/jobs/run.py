"""A lease: jobs that run as cards become free, each within its limit, until all have ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from benchmarks.jobs.plan import Job
from benchmarks.jobs.schedule import Placed, Schedule

GRACE = 5.0  # seconds between the request to end and the kill


class Process(Protocol):
    """What a job runs in."""

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""

    def interrupt(self) -> None:
        """Ask it to end, as Ctrl-C does."""

    def kill(self) -> None:
        """End it, and every process that it started and left."""

    def last_line(self) -> str:
        """Of its log."""


@dataclass(frozen=True)
class Outcome:
    """status: "ok", "failed", "limit" (ended by the lease) or "left out". said: the last line of
    the log, or the reason."""

    job: Job
    status: str
    seconds: float = 0.0
    said: str = ""


@dataclass
class _Run:
    """A job that runs. asked: when it was asked to end."""

    placed: Placed
    process: Process
    begun: float
    until: float
    asked: float | None = None


class Lease:
    """launch: starts the process of a job. clock: seconds, on which the schedule's deadline lies.
    say: takes a line. One step does what is due now; nothing waits."""

    def __init__(
        self,
        schedule: Schedule,
        launch: Callable[[Placed], Process],
        clock: Callable[[], float],
        say: Callable[[str], None],
    ) -> None:
        self.schedule, self.outcomes = schedule, list[Outcome]()
        self._launch, self._clock, self._say = launch, clock, say
        self._runs: list[_Run] = []

    def leave_out(self, job: Job, reason: str) -> None:
        self._say(f"{job.name}: left out: {reason}")
        self.outcomes.append(Outcome(job, "left out", said=reason))

    def step(self) -> bool:
        """Whether anything runs or waits afterwards."""
        now = self._clock()
        for one in [*self._runs]:
            self._look_at(one, now)
        left = self.schedule.deadline - now
        for job in self.schedule.take_late(now):
            self.leave_out(job, f"it takes {job.seconds:g} s, and {max(left, 0):.0f} s are left")
        for placed in self.schedule.start(now):
            self._begin(placed, now)
        return bool(self._runs or self.schedule.waiting)

    def cut(self) -> None:
        """End all that runs, now."""
        for one in [*self._runs]:
            self._end(one, "limit", "the lease was cut")
        for job in self.schedule.waiting:
            self.leave_out(job, "the lease was cut")
        self.schedule.waiting.clear()

    def _begin(self, placed: Placed, now: float) -> None:
        job = placed.job
        where = f"card {' '.join(placed.cards)}" if placed.cards else "no card"
        self._say(f"{job.name}: starts, {where}, {job.seconds:g} s expected")
        try:
            process = self._launch(placed)
        except OSError as error:
            self.schedule.end(placed)
            self._say(f"{job.name}: failed: {error}")
            self.outcomes.append(Outcome(job, "failed", said=str(error)))
            return
        until = min(now + job.limit, self.schedule.deadline)
        self._runs.append(_Run(placed, process, now, until))

    def _look_at(self, one: _Run, now: float) -> None:
        status = one.process.poll()
        if status is not None:
            ended = "ok" if status == 0 else "failed"
            self._end(one, "limit" if one.asked else ended, f"rc {status}")
        elif one.asked is None and now >= one.until:
            one.asked = now
            one.process.interrupt()
        elif one.asked is not None and now >= one.asked + GRACE:
            self._end(one, "limit", "killed")

    def _end(self, one: _Run, status: str, how: str) -> None:
        one.process.kill()
        took, said, job = self._clock() - one.begun, one.process.last_line(), one.placed.job
        at_limit = "ended at its limit, " if status == "limit" else ""
        self._say(f"{job.name}: {at_limit}{how}, {took:.0f} s: {said}")
        self.outcomes.append(Outcome(job, status, took, said))
        self._runs.remove(one)
        self.schedule.end(one.placed)


def summary(outcomes: list[Outcome]) -> list[str]:
    """A line a job, failures first."""
    order = ["failed", "limit", "left out", "ok"]
    found = sorted(outcomes, key=lambda one: order.index(one.status))
    counts = [f"{sum(one.status == name for one in found)} {name}" for name in reversed(order)]
    lines = [
        f"{one.status:>8}  {one.job.name:<28} {one.seconds:5.0f} s  {one.said}" for one in found
    ]
    return [*lines, ", ".join(counts)]
