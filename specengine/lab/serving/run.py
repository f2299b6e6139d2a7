"""Points of load on a server, one after the other."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from time import monotonic
from typing import Any

from specengine.core.errors import SpecEngineError
from specengine.lab.environment import environment
from specengine.lab.serving.fleet import Tell, run_clients
from specengine.lab.serving.loads import Load, deal
from specengine.lab.serving.measures import Point, measure
from specengine.lab.serving.prompts import PATHS, Requests
from specengine.lab.serving.records import ClientJob, ClientReport, Outcome
from specengine.lab.serving.report import Report
from specengine.lab.serving.told import Server

logger = logging.getLogger(__name__)
Keep = Callable[[Report], object]  # gets all that is there so far


@dataclass(frozen=True)
class Plan:
    """num_requests: of each load, or one number for all; none leaves it to the loads. num_warmup,
    num_clients: of each point; None leaves it to the load. timeout: seconds a request may take."""

    server: Server
    loads: tuple[Load, ...]
    requests: Requests
    model: str | None = None
    label: str = "a server"
    num_requests: tuple[int, ...] = ()
    num_warmup: int | None = None
    num_clients: int | None = None
    slo: dict[str, float] | None = None
    percentiles: tuple[float, ...] = (50, 90, 99)
    timeout: float = 600.0
    has_details: bool = False

    def requests_of(self, place: int) -> int:
        """Of the load at this place of `loads`."""
        if not self.num_requests:
            return self.loads[place].default_requests
        return self.num_requests[place if len(self.num_requests) > 1 else 0]


class ServingBench:
    """Raises SpecEngineError where the server is not there, or refuses what is asked for."""

    def __init__(self, plan: Plan, keep: Keep) -> None:
        self.plan = plan
        self.keep = keep
        self._model = plan.model or plan.server.model()

    def run(self) -> Report:
        report = self._report()
        for place, load in enumerate(self.plan.loads):
            point, outcomes = self._measure(load, self.plan.requests_of(place))
            report.points.append(point)
            if self.plan.has_details:
                report.details.append([_detail(one) for one in outcomes])
            self.keep(report)
        return report

    def _measure(self, load: Load, count: int) -> tuple[Point, list[Outcome]]:
        self._warm_up(load)
        before = self.plan.server.spec_counts()
        with progress(load.name, count) as tell:
            reports = self._send(load, load.name, count, tell)
        point = measure(load, reports, self.plan.slo or {}, self.plan.percentiles)
        after = self.plan.server.spec_counts()
        if point.tau is None and after is not None:
            point = replace(point, tau=after.tau_since(before))
        outcomes = [one for report in reports for one in report.outcomes]
        return point, sorted(outcomes, key=lambda one: one.number)

    def _warm_up(self, load: Load) -> None:
        """Raises SpecEngineError where none of its requests is answered."""
        count = load.default_warmup if self.plan.num_warmup is None else self.plan.num_warmup
        if not count:
            return
        closed = Load(min(count, load.concurrency or count))
        reports = self._send(closed, f"warm-up of {load.name}", count, lambda *_: None)
        outcomes = [one for report in reports for one in report.outcomes]
        if all(one.error for one in outcomes):
            first = outcomes[0]
            raise SpecEngineError(
                f"{self.plan.server.root} answers none of {count} requests that warm up: "
                f"{first.error}: {first.message[:500]}"
            )

    def _send(self, load: Load, name: str, count: int, tell: Tell) -> list[ClientReport]:
        plan = self.plan
        asks = load.asks(plan.requests.source(self._model, name), count, plan.requests.seed)
        clients = load.num_clients(plan.num_clients, count)
        shares = [load.share(number, clients, count) for number in range(clients)]
        jobs = [
            ClientJob(
                url=plan.server.root,
                path=plan.server.base + PATHS[plan.requests.send],
                headers=plan.server.headers(),
                asks=hand,
                concurrency=share,
                is_paced=load.rate is not None,
                timeout=plan.timeout,
            )
            for hand, share in zip(deal(asks, shares), shares, strict=True)
        ]
        return run_clients(jobs, tell)

    def _report(self) -> Report:
        asked: dict[str, Any] = asdict(replace(self.plan.requests, sets=(), lines=()))
        asked["sets"] = [f"{one.name} ({one.source})" for one in self.plan.requests.sets]
        asked["lines"] = len(self.plan.requests.lines)
        return Report(
            date=datetime.date.today().isoformat(),
            environment=environment("specengine"),
            label=self.plan.label,
            url=self.plan.server.root + self.plan.server.base,
            model=self._model,
            requests=asked,
            slo=self.plan.slo or {},
        )


def _detail(one: Outcome) -> dict[str, Any]:
    first, last = one.first, one.last
    return {
        "number": one.number,
        "due": one.due,
        "sent": one.sent,
        "ttft": None if first is None else first - one.sent,
        "e2e": None if last is None else last - one.sent,
        "prompt_tokens": one.prompt_tokens,
        "output_tokens": one.output_tokens,
        "error": one.error,
    }


@contextmanager
def progress(name: str, total: int) -> Iterator[Tell]:
    """A bar at a terminal; a line at the end elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console, start = Console(stderr=True), monotonic()
    columns = (
        TextColumn(name),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total, rate="")

        def tell(ended: int, tokens: int) -> None:
            rate = f"{tokens / max(monotonic() - start, 1e-9):,.0f} tok/s"
            bar.update(task, completed=ended, rate=rate)

        yield tell
    logger.info("%s: %d requests in %.1f s", name, total, monotonic() - start)
