"""Which job starts when, on which cards. Knows no process and no clock: seconds are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.jobs.plan import Job


@dataclass(frozen=True)
class Placed:
    """A job on its cards. ends: when it will have ended, as expected."""

    job: Job
    cards: tuple[str, ...]
    ends: float


class Schedule:
    """Jobs in order of priority, longer ones first. A job that cannot start yet keeps its place:
    one behind it starts before only where that does not delay it, by the seconds expected.

    without_cards: how many jobs of no card run at a time."""

    def __init__(
        self, jobs: Sequence[Job], cards: Sequence[str], deadline: float, without_cards: int = 2
    ) -> None:
        self.waiting = sorted(jobs, key=lambda one: (one.priority, -one.seconds))
        self.running: list[Placed] = []
        self.deadline = deadline
        self._cards, self._without_cards = [*cards], without_cards

    def take_late(self, now: float) -> list[Job]:
        """Jobs that would not end before the deadline if they started now; they wait no longer."""
        late = [one for one in self.waiting if now + one.seconds > self.deadline]
        self.waiting = [one for one in self.waiting if one not in late]
        return late

    def start(self, now: float) -> list[Placed]:
        """Jobs that start now."""
        started: list[Placed] = []
        first: Job | None = None  # of those that cannot start yet
        for job in [*self.waiting]:
            cards = self._cards_for(job, self.running)
            if cards is None:
                first = first or job
                continue
            placed = Placed(job, cards, now + job.seconds)
            if first is not None and self._delays(placed, first, now):
                continue
            self.running.append(placed)
            self.waiting.remove(job)
            started.append(placed)
        return started

    def end(self, placed: Placed) -> None:
        self.running.remove(placed)

    def _delays(self, placed: Placed, other: Job, now: float) -> bool:
        before = self._earliest(other, self.running, now)
        return self._earliest(other, [*self.running, placed], now) > before

    def _earliest(self, job: Job, running: Sequence[Placed], now: float) -> float:
        """When it can start, if all that runs ends as expected and nothing else starts."""
        left, when = sorted(running, key=lambda one: one.ends), now
        while self._cards_for(job, left) is None:
            when = max(now, left.pop(0).ends)
        return when

    def _cards_for(self, job: Job, running: Sequence[Placed]) -> tuple[str, ...] | None:
        """Those that it may have now; None where it must wait."""
        if running and "nothing" in (job.beside, *(one.job.beside for one in running)):
            return None
        if not job.cards:
            busy = sum(not one.job.cards for one in running)
            return () if busy < self._without_cards else None
        users = {card: [one.job for one in running if card in one.cards] for card in self._cards}
        free = [
            card
            for card, jobs in users.items()
            if all(one.beside == job.beside == "card" for one in jobs)
        ]
        free.sort(key=lambda card: len(users[card]))
        return tuple(free[: job.cards]) if len(free) >= job.cards else None
