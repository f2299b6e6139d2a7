"""A client process: reads a job from a file, sends its requests, writes what they saw to another.

    python -m specengine.lab.serving.client JOB RESULT

It says that it is ready, reads from standard input when to start, in seconds of the monotonic
clock, and then says a few times a second how many requests have ended, with how many tokens.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from itertools import pairwise
from pathlib import Path
from time import perf_counter

import msgspec
import uvloop

from specengine.lab.serving.events import Answer
from specengine.lab.serving.records import Ask, ClientJob, ClientReport, Outcome
from specengine.lab.serving.wire import Connections

READY = "ready"
_PROGRESS_SECONDS = 0.2


class Client:
    def __init__(self, job: ClientJob, start: float) -> None:
        self._job = job
        self._start = start
        self._connections = Connections(job.url)
        self._outcomes: list[Outcome] = []
        self._num_events = 0
        self._num_tokens = 0
        self._next = iter(job.asks)
        host = job.url.partition("://")[2].partition("/")[0].encode()
        self._head = b"POST %b HTTP/1.1\r\nHost: %b\r\n%b" % (job.path.encode(), host, job.headers)

    async def run(self) -> ClientReport:
        await asyncio.sleep(self._start - perf_counter())
        used = time.process_time()
        progress = asyncio.create_task(self._tell())
        await (self._paced() if self._job.is_paced else self._closed_loop())
        seconds = perf_counter() - self._start
        progress.cancel()
        self._connections.close()
        return ClientReport(self._outcomes, self._num_events, time.process_time() - used, seconds)

    async def _closed_loop(self) -> None:
        workers = min(self._job.concurrency, len(self._job.asks))
        await asyncio.gather(*(self._one_after_the_other() for _ in range(workers)))

    async def _one_after_the_other(self) -> None:
        for ask in self._next:
            await self._send(ask)

    async def _paced(self) -> None:
        """Each when it is due, or as soon as fewer than `concurrency` run."""
        room = asyncio.Semaphore(self._job.concurrency)

        async def send(ask: Ask) -> None:
            try:
                await self._send(ask)
            finally:
                room.release()

        tasks = []
        for ask in self._job.asks:
            await asyncio.sleep(self._start + ask.due - perf_counter())
            await room.acquire()
            tasks.append(asyncio.create_task(send(ask)))
        await asyncio.gather(*tasks)

    async def _send(self, ask: Ask) -> None:
        answer = Answer()
        due = self._start + ask.due if self._job.is_paced else perf_counter()
        outcome = Outcome(ask.number, due, due)
        try:
            async with asyncio.timeout(self._job.timeout):
                await self._exchange(ask, answer, outcome)
        except TimeoutError:
            outcome.error, outcome.message = "timeout", f"over {self._job.timeout:g} s"
        except (OSError, ValueError) as error:
            outcome.error = "cut off" if answer.status else "connection"
            outcome.message = str(error)
        read_answer(answer, outcome)
        self._num_events += answer.num_events
        self._num_tokens += outcome.output_tokens
        self._outcomes.append(outcome)

    async def _exchange(self, ask: Ask, answer: Answer, outcome: Outcome) -> None:
        """Once more on a new connection, where an idle one was closed by the server meanwhile."""
        request = self._head + b"Content-Length: %d\r\n\r\n" % len(ask.body) + ask.body
        connection = await self._connections.take()
        try:
            outcome.sent = perf_counter()
            await connection.ask(request, answer)
        except ConnectionError:
            if answer.status or not connection.has_served:
                raise
            connection = await self._connections.take(new=True)
            outcome.sent = perf_counter()
            await connection.ask(request, answer)
        finally:
            self._connections.give_back(connection)

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_SECONDS)
            print(len(self._outcomes), self._num_tokens, flush=True)


def read_answer(answer: Answer, outcome: Outcome) -> None:
    """Fill in what the answer reports."""
    times = answer.times
    outcome.last = answer.last
    if times:
        outcome.first = times[0]
        outcome.gaps = [later - sooner for sooner, later in pairwise(times)]
    usage = answer.usage or {}
    outcome.prompt_tokens = int(usage.get("prompt_tokens") or 0)
    told = int(usage.get("completion_tokens") or 0) or answer.num_tokens
    outcome.is_counted, outcome.output_tokens = bool(told), told or len(times)
    spec = (answer.metrics or {}).get("speculative_decoding") or {}
    outcome.rounds = int(spec.get("num_spec_steps") or 0)
    outcome.accepted = int(spec.get("num_accepted_draft_tokens") or 0)
    if outcome.error:
        return
    if answer.status != 200:
        outcome.error, outcome.message = str(answer.status), answer.body()
    elif answer.error:
        outcome.error, outcome.message = "in stream", answer.error
    elif not answer.is_done:
        outcome.error, outcome.message = "cut off", answer.body() or "no [DONE]"
    elif outcome.first is None:
        outcome.error, outcome.message = "empty", "the answer has no token"


def main() -> None:
    job, result = Path(sys.argv[1]), Path(sys.argv[2])
    asked = msgspec.msgpack.decode(job.read_bytes(), type=ClientJob)
    gc.collect()
    gc.freeze()
    gc.disable()  # a pause would be taken for the server's
    print(READY, flush=True)
    report = uvloop.run(Client(asked, float(sys.stdin.readline())).run())
    result.write_bytes(msgspec.msgpack.encode(report))


if __name__ == "__main__":
    main()
