"""Thousands of hostile requests against a server of several processes, and what it lost by them.

python -m tests.e2e.hostile.attack --requests 10000 --write
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import chain, islice, repeat
from pathlib import Path
from random import Random
from typing import Any

import httpx

from tests.e2e.hostile.bodies import Hostile, Mutations, known
from tests.e2e.hostile.raw import misuse, statuses
from tests.e2e.hostile.schemas import Drawn
from tests.e2e.hostile.watch import (
    GROWTH,
    KEY,
    SLOWEST,
    Holdings,
    Load,
    Probes,
    flush,
    hold,
    probing,
    settled,
    slots_amid_stream,
    touch_all_memory,
    used_slots,
)
from tests.support.processes import Served, serving

AT_ONCE = 24  # clients
PATIENCE = 5.0  # seconds after which a client goes away
LONGEST = 12.0  # seconds that a connection is left open
SHARES = {"mutated": 0.4, "schemathesis": 0.3, "raw": 0.25}  # the known ones are the rest
FLAGS = (
    *("--api-workers", "2", "--admin-api-key", KEY, "--max-total-tokens", "16384"),
    *("--speculative-algorithm", "EAGLE3", "--no-speculative-adaptive"),
    *("--tool-call-parser", "hermes"),
)


@dataclass
class Outcome:
    """statuses: of each kind of request, how often which came. bad: answers that may not be."""

    statuses: dict[str, Counter[str]] = field(default_factory=dict)
    bad: list[str] = field(default_factory=list)
    before: Holdings | None = None
    after: Holdings | None = None
    probes: Probes = field(default_factory=Probes)
    calm: Probes = field(default_factory=Probes)  # before it began
    seconds: float = 0.0
    load: float = 0.0
    slots_amid_stream: int = 0
    used_slots: int = 0
    restarted: int = 0

    def note(self, kind: str, status: str, problem: str | None = None) -> None:
        self.statuses.setdefault(kind, Counter())[status] += 1
        if problem is not None:
            self.bad.append(f"{kind}: {problem}")

    @property
    def num_sent(self) -> int:
        return sum(counts.total() for counts in self.statuses.values())

    @property
    def growth(self) -> float:
        assert self.before is not None
        assert self.after is not None
        return self.after.total / self.before.total

    def problems(self) -> list[str]:
        """What does not hold of what was promised."""
        found = [*self.bad]
        found += [f"a probe failed: {one}" for one in self.probes.failed]
        found += [f"a probe was slower than {SLOWEST} s: {one}" for one in self.probes.slow]
        if self.growth > GROWTH:
            found.append(f"memory grew to {self.growth:.2f} of before: {self.before} {self.after}")
        if not self.slots_amid_stream:
            found.append("no KV slot was in use amid a stream: a leak would not show")
        if self.used_slots:
            found.append(f"{self.used_slots} KV slots are in use")
        if self.restarted:
            found.append(f"{self.restarted} processes were started again")
        return found


def verdict(status: int, text: str) -> str | None:
    """Why an answer may not be; None where it may. 501 is for what a model cannot do at all."""
    if status == 503:
        is_limit = '"code":"queue_full"' in text or '"code":"overloaded"' in text
        return None if is_limit or "too many" in text else f"503 without a limit: {text[:300]}"
    if status >= 500 and status != 501:
        return f"{status}: {text[:300]}"
    if status >= 400 and '"error"' not in text:
        return f"{status} without an error: {text[:300]}"
    return None


class Attack:
    """count: requests in all. haste: how many times sooner clients go away, and let go of
    connections that they leave open. draws: whether schemathesis draws some, where it is there."""

    def __init__(
        self, served: Served, count: int, seed: int, haste: float = 1.0, draws: bool = True
    ) -> None:
        self.outcome = Outcome()
        self._haste = haste
        self._served = served
        self._count = count
        self._random = Random(seed)
        self._sources: dict[str, Callable[[], Hostile]] = {"mutated": Mutations(seed).next}
        if draws and find_spec("schemathesis") is not None:
            document = httpx.get(f"{served.url}/openapi.json").json()
            drawn = Drawn(document, seed)
            # At once: some take seconds to draw, in which no client would get its turn.
            ready = [drawn.next() for _ in range(int(SHARES["schemathesis"] * count))]
            self._sources["schemathesis"] = ready.pop

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=AT_ONCE)
        queue = iter(self._plan())
        async with httpx.AsyncClient(
            base_url=self._served.url, timeout=PATIENCE / self._haste, limits=limits
        ) as http:
            clients = [self._client(http, queue) for _ in range(AT_ONCE)]
            await asyncio.gather(*clients)

    def _plan(self) -> list[str | Hostile]:
        """What is sent, in random order; a name is a source."""
        kinds = [name for name, share in SHARES.items() for _ in range(int(share * self._count))]
        kinds = ["mutated" if one not in (*self._sources, "raw") else one for one in kinds]
        examples = list(known())
        rest = self._count - len(kinds)
        rounds = chain.from_iterable(repeat(examples))
        plan: list[str | Hostile] = [*kinds, *islice(rounds, rest)]
        self._random.shuffle(plan)
        return plan

    async def _client(self, http: httpx.AsyncClient, queue: Iterator[str | Hostile]) -> None:
        for what in queue:
            if what == "raw":
                await self._misuse()
            elif isinstance(what, Hostile):
                await self._send(http, what.name, what)
            else:
                await self._send(http, what, self._sources[what]())

    async def _send(self, http: httpx.AsyncClient, kind: str, hostile: Hostile) -> None:
        headers = {"Content-Type": hostile.content_type.encode("latin-1", "ignore")}
        try:
            answer = await http.request(
                hostile.method, hostile.path, content=hostile.body, headers=headers
            )
        except httpx.TimeoutException:
            self.outcome.note(kind, "client left")
        except (httpx.TransportError, httpx.InvalidURL) as error:
            # A body too large is refused while it is sent; another early end would be a fault.
            is_large = len(hostile.body) > 8 * 2**20
            problem = None if is_large else f"{error!r} for {hostile}"
            self.outcome.note(kind, type(error).__name__, problem)
        else:
            problem = verdict(answer.status_code, answer.text)
            said = problem and f"{problem} for {hostile.name}: {hostile.body[:500]!r}"
            self.outcome.note(kind, str(answer.status_code), said)

    async def _misuse(self) -> None:
        host, _, port = self._served.url.removeprefix("http://").partition(":")
        name, answer = await misuse(host, int(port), self._random, LONGEST / self._haste)
        if not answer:
            self.outcome.note(name, "no answer")
            return
        found = statuses(answer)
        problem = verdict(max(found, default=0), answer.decode("utf-8", "replace"))
        if name == "bad_framing" and len(found) != 1:
            problem = f"answered {len(found)} times: {answer[:500]!r}"
        self.outcome.note(name, str(found[0] if found else "noise"), problem)


def attack(
    served: Served,
    count: int,
    seed: int = 0,
    warm_up: int = 300,
    haste: float = 1.0,
    draws: bool = True,
) -> Outcome:
    """warm_up: hostile requests before memory is looked at, so that all is loaded. With 0,
    neither memory is measured nor what probes take before. haste, draws: of Attack."""
    one = Attack(served, count, seed, haste, draws)
    outcome = one.outcome
    if warm_up:
        touch_all_memory(served)
        asyncio.run(Attack(served, warm_up, seed + 1).run())
        with probing(served) as outcome.calm:
            time.sleep(2)
    outcome.slots_amid_stream = slots_amid_stream(served)
    outcome.before = hold(served)
    load, began = Load(), time.monotonic()
    with probing(served) as outcome.probes:
        asyncio.run(one.run())
    outcome.seconds, outcome.load = time.monotonic() - began, load.share()
    outcome.after = settled(served, outcome.before) if warm_up else hold(served)
    outcome.restarted = len(set(outcome.before.pids) - set(outcome.after.pids))
    flush(served)
    outcome.used_slots = used_slots(served)
    return outcome


def report(outcome: Outcome) -> dict[str, Any]:
    probes, calm = outcome.probes, outcome.calm
    assert outcome.before is not None
    assert outcome.after is not None
    total: Counter[str] = Counter()
    for counts in outcome.statuses.values():
        total += counts
    return {
        "requests": outcome.num_sent,
        "seconds": round(outcome.seconds, 1),
        "statuses": dict(sorted(total.items())),
        "probes": len(probes.rows),
        "probe p50 / p99 / max, s": [round(probes.percentile(q), 3) for q in (0.5, 0.99, 1)],
        "probe before, p50 / p99 / max, s": [round(calm.percentile(q), 3) for q in (0.5, 0.99, 1)],
        "probes over 0.5 s": probes.num_over,
        "the same without the time in which no core was free": len(probes.slow),
        "share of time in which something waited for a core": round(outcome.load, 2),
        "MiB before": {k: round(v) for k, v in outcome.before.memory.items()},
        "MiB after": {k: round(v) for k, v in outcome.after.memory.items()},
        "memory after / before": round(outcome.growth, 3),
        "KV slots in use amid a stream before": outcome.slots_amid_stream,
        "KV slots in use after": outcome.used_slots,
        "processes started again": outcome.restarted,
        "problems": len(outcome.problems()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where the figures go")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), *FLAGS) as served:
        outcome = attack(served, args.requests, args.seed)
        log = served.log.read_text()
    figures = report(outcome)
    print(json.dumps(figures, indent=1))
    for problem in outcome.problems()[:50]:
        print("PROBLEM", problem)
    if "Traceback" in log:
        print(log[log.index("Traceback") :][:4000])
    if args.json is not None:
        kinds = {name: dict(counts) for name, counts in sorted(outcome.statuses.items())}
        args.json.write_text(json.dumps(figures | {"by kind": kinds}, indent=1))
    return 1 if outcome.problems() else 0


if __name__ == "__main__":
    sys.exit(main())
