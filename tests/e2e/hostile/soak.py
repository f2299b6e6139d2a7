"""Thousands of mixed requests against a server of several processes that drafts, a fifth of them
cancelled: grammars, tools, streams, logprobs, several choices. What was lost, and what was answered
otherwise than without drafts.

    python -m tests.e2e.hostile.soak --requests 10000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx

from tests.e2e.hostile.watch import (
    GROWTH,
    KEY,
    Holdings,
    flush,
    hold,
    settled,
    slots_amid_stream,
    touch_all_memory,
    used_slots,
)
from tests.protocol.answers import answer_to, assert_same, flags_of, num_accepted
from tests.protocol.answers import settled as comparable
from tests.protocol.table import CHAT, PROMPT, RESPONSES, TEXT, cases
from tests.support.processes import Served, serving

AT_ONCE = 24  # clients
CANCELLED = 0.2
SHARED = "Once upon a time there was a small house by the sea. " * 12  # a prefix of several pages
SLOTS = 6144
SERVER = ("--api-workers", "2", "--admin-api-key", KEY, "--max-total-tokens", str(SLOTS))
DRAFTS = ("--speculative-algorithm", "EAGLE3", "--no-speculative-adaptive")


@dataclass(frozen=True)
class Body:
    name: str
    path: str
    fields: dict[str, Any]


def long_bodies() -> Iterator[Body]:
    """Longer answers than the table asks for, in a memory that holds few of them at once."""
    text = {"model": "tiny", "prompt": PROMPT, "temperature": 0}
    yield Body("long", TEXT, text | {"max_tokens": 400, "ignore_eos": True})
    yield Body("long stream", TEXT, text | {"max_tokens": 300, "ignore_eos": True, "stream": True})
    choices = {"n": 4, "temperature": 0.9, "seed": 5, "max_tokens": 80}
    yield Body("four choices", TEXT, text | choices)
    for number in range(6):
        prompt = SHARED + f"Chapter {number}."
        yield Body(f"shared prefix {number}", TEXT, text | {"prompt": prompt, "max_tokens": 60})
    message = [{"role": "user", "content": SHARED}]
    items = {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 4}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": items}}
    chat = {"model": "tiny", "messages": message, "temperature": 0, "max_tokens": 120}
    yield Body("long schema", CHAT, chat | {"response_format": form})
    yield Body("long chat stream", CHAT, chat | {"stream": True})
    asked = {"model": "tiny", "input": SHARED, "temperature": 0, "max_output_tokens": 90}
    yield Body("long response", RESPONSES, asked | {"stream": True})


def bodies_of_table() -> list[Body]:
    return [Body(one.name, one.path, one.body) for one in cases()]


def bodies() -> list[Body]:
    return [*bodies_of_table(), *long_bodies()]


@dataclass
class Outcome:
    num_sent: int = 0
    num_cancelled: int = 0
    num_accepted: int = 0  # draft tokens
    num_drafted_for: int = 0  # answers with any
    wrong: list[str] = field(default_factory=list)
    before: Holdings | None = None
    after: Holdings | None = None
    slots_amid_stream: int = 0
    used_slots: int = 0
    aborts: int = 0
    retractions: int = 0
    seconds: float = 0.0

    @property
    def growth(self) -> float:
        assert self.before is not None
        assert self.after is not None
        return self.after.total / self.before.total

    def problems(self) -> list[str]:
        assert self.before is not None
        assert self.after is not None
        found = [*self.wrong]
        if not self.slots_amid_stream:
            found.append("no KV slot was in use amid a stream: a leak would not show")
        if self.used_slots:
            found.append(f"{self.used_slots} KV slots are in use")
        if any(self.after.in_use.values()):
            found.append(f"still in use: {self.after.in_use}")
        if self.before.pids != self.after.pids:
            found.append("a process was started again")
        if self.after.descriptors > self.before.descriptors + 8:
            found.append(f"descriptors: {self.before.descriptors} {self.after.descriptors}")
        if not self.num_accepted:
            found.append("no draft stood")
        return found


class Soak:
    """expected: answers by name, without drafts."""

    def __init__(self, url: str, expected: dict[str, Any], seed: int) -> None:
        self._url = url
        self._expected = expected
        self._bodies = [one for one in bodies() if one.name in expected]
        self._random = Random(seed)
        self.outcome = Outcome()

    async def run(self, count: int) -> None:
        numbers = iter(range(count))
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=120, limits=limits) as http:
            await asyncio.gather(*(self._client(http, numbers) for _ in range(AT_ONCE)))

    async def _client(self, http: httpx.AsyncClient, numbers: Iterator[int]) -> None:
        for _ in numbers:
            body = self._random.choice(self._bodies)
            self.outcome.num_sent += 1
            if self._random.random() < CANCELLED:
                await self._cancel(http, body)
            else:
                await self._compare(http, body)

    async def _cancel(self, http: httpx.AsyncClient, body: Body) -> None:
        """Leave before the answer, or in the middle of it."""
        self.outcome.num_cancelled += 1
        with suppress(TimeoutError):
            async with asyncio.timeout(self._random.uniform(0, 0.3)):
                async with http.stream("POST", body.path, json=body.fields) as answer:
                    async for _ in answer.aiter_raw():
                        if self._random.random() < 0.3:
                            return

    async def _compare(self, http: httpx.AsyncClient, body: Body) -> None:
        outcome = self.outcome
        try:
            answer = await answer_to(http, body.path, body.fields)
            accepted = num_accepted(answer)
            outcome.num_accepted += accepted
            outcome.num_drafted_for += accepted > 0
            assert_same(comparable(self._expected[body.name]), comparable(answer), body.name)
        except (AssertionError, httpx.HTTPError) as error:
            outcome.wrong.append(f"{body.name}: {error!r}"[:1000])


async def answers(url: str, asked: list[Body], changed: dict[str, Any]) -> dict[str, Any]:
    """A few at once. changed: fields of every body."""
    turn = asyncio.Semaphore(16)
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:

        async def answer(one: Body) -> Any:
            async with turn:
                return await answer_to(http, one.path, one.fields | changed)

        found = await asyncio.gather(*map(answer, asked))
    return {one.name: answer for one, answer in zip(asked, found, strict=True)}


def flags(folder: Path) -> tuple[str, ...]:
    given = flags_of(folder)
    parsers = ("--tool-call-parser", given["tool_call_parser"])
    return (*SERVER, "--chat-template", given["chat_template"], *parsers)


def plain_answers(folder: Path) -> dict[str, Any]:
    with serving(folder, *flags(folder)) as served:
        return asyncio.run(answers(served.url, bodies(), {}))


def answers_without_drafts(served: Served, asked: list[Body]) -> dict[str, Any]:
    """By the same server, which drafts for other requests."""
    return asyncio.run(answers(served.url, asked, {"speculative": {"enabled": False}}))


def soak(
    served: Served, expected: dict[str, Any], count: int, seed: int = 0, warm_up: int = 300
) -> Outcome:
    """warm_up: requests before memory is looked at, so that all is loaded; with none it is not."""
    if warm_up:
        touch_all_memory(served)
    asyncio.run(Soak(served.url, expected, seed + 1).run(warm_up))
    one = Soak(served.url, expected, seed)
    outcome = one.outcome
    outcome.slots_amid_stream = slots_amid_stream(served)
    outcome.before = hold(served)
    aborts, retractions = (served.metric(f"request_{name}_total") for name in COUNTERS)
    began = time.monotonic()
    asyncio.run(one.run(count))
    outcome.seconds = time.monotonic() - began
    outcome.after = settled(served, outcome.before) if warm_up else hold(served)
    outcome.aborts = int(served.metric("request_aborts_total") - aborts)
    outcome.retractions = int(served.metric("request_retractions_total") - retractions)
    flush(served)
    outcome.used_slots = used_slots(served)
    return outcome


COUNTERS = ("aborts", "retractions")


def report(outcome: Outcome) -> dict[str, Any]:
    assert outcome.before is not None
    assert outcome.after is not None
    return {
        "requests": outcome.num_sent,
        "cancelled": outcome.num_cancelled,
        "seconds": round(outcome.seconds, 1),
        "accepted draft tokens": outcome.num_accepted,
        "answers with accepted drafts": outcome.num_drafted_for,
        "answers that are not those without drafts": len(outcome.wrong),
        "choices aborted": outcome.aborts,
        "retractions": outcome.retractions,
        "MiB before": {k: round(v) for k, v in outcome.before.memory.items()},
        "MiB after": {k: round(v) for k, v in outcome.after.memory.items()},
        "memory after / before": round(outcome.growth, 3),
        "descriptors before / after": [outcome.before.descriptors, outcome.after.descriptors],
        "KV slots in use amid a stream before": outcome.slots_amid_stream,
        "KV slots in use after": outcome.used_slots,
        "problems": len(outcome.problems()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where the figures go")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        expected = plain_answers(folder)
        with serving(folder, *flags(folder), *DRAFTS) as served:
            outcome = soak(served, expected, args.requests, args.seed)
    print(json.dumps(report(outcome), indent=1))
    for problem in outcome.problems()[:50]:
        print("PROBLEM", problem)
    if args.json is not None:
        args.json.write_text(json.dumps(report(outcome), indent=1))
    return 1 if outcome.problems() or outcome.growth > GROWTH else 0


if __name__ == "__main__":
    sys.exit(main())
