"""One generation request, whatever its endpoint: run its prompts, answer whole or in events."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from specengine.core.spec_stats import SpecStats
from specengine.engine.outputs import RequestOutput, add_stats, speculative_metrics
from specengine.server.errors import ApiError
from specengine.server.job import Job, checked
from specengine.server.json_bytes import Json, dumps, encoded
from specengine.server.request_log import record_of
from specengine.server.service import Service
from specengine.server.streaming import (
    DONE,
    EventStream,
    EventWriter,
    Streaming,
    closing,
    until_disconnect,
)


class Shape(Protocol):
    """How one endpoint writes choices down."""

    id_prefix: str
    object: str
    chunk_object: str

    def about_prompt(self, output: RequestOutput) -> Json:
        """Fields of the whole answer, and of a choice's first chunk, beside its choices."""
        ...

    def opening(self, choice: int, output: RequestOutput) -> Json | None:
        """The choice's first chunk, before any generated text."""
        ...

    def silent(self, choice: int) -> Json:
        """A chunk of no text."""
        ...

    def deltas(self, choice: int, output: RequestOutput) -> list[Json]:
        """The chunks for new text or logprobs, if there are any."""
        ...

    def closing(self, choice: int, output: RequestOutput) -> Json:
        """The chunk with the finish reason."""
        ...

    def whole(self, choice: int, output: RequestOutput) -> Json:
        """The finished choice, when nothing is streamed."""
        ...


class Run:
    """A job on its way: what its choices gave, counted for metrics and log."""

    def __init__(self, job: Job, service: Service, request: Request) -> None:
        self.job = job
        self.fingerprint = service.fingerprint(job.engine.config)
        self.finished: dict[int, RequestOutput] = {}  # in the order in which they finished
        self._metrics = service.metrics
        self._record = record_of(request.scope)
        self._record.prompt_tokens = job.num_prompt_tokens

    async def outputs(self, stream: bool) -> AsyncIterator[tuple[int, RequestOutput]]:
        """As those of the job. The log also counts what choices made that did not finish."""
        last: dict[int, RequestOutput] = {}
        try:
            async with closing(self.job.outputs(stream)) as outputs:
                async for choice, output in outputs:
                    last[choice] = output
                    if output.finish_reason is not None:
                        self.finished[choice] = output
                        self._metrics.observe(output)
                    yield choice, output
        finally:
            for output in last.values():
                self._record.count(output)

    async def finish(self) -> None:
        """Wait for all choices. Raises ApiError where one was given up."""
        async with closing(self.outputs(stream=False)) as outputs:
            async for _, output in outputs:
                checked(output)

    def note_error(self, error: ApiError) -> None:
        """Have the log tell an error that the answer tells in its own way."""
        self._record.error = error.body()["error"]

    @property
    def is_complete(self) -> bool:
        return len(self.finished) == self.job.num_choices

    @property
    def num_made(self) -> int:
        """Tokens of the finished choices."""
        return sum(len(output.token_ids) for output in self.finished.values())

    @property
    def num_cached(self) -> int:
        """Prompt tokens found in the cache, by the first choice of each prompt."""
        firsts = range(0, self.job.num_choices, self.job.n)
        return sum(self.finished[choice].num_cached_tokens for choice in firsts)

    def usage(self) -> Json:
        """A prompt counts once, whatever its n."""
        details = {"prompt_tokens_details": {"cached_tokens": self.num_cached}}
        return self.usage_so_far(self.num_made) | details

    def usage_so_far(self, made: int) -> Json:
        prompts = self.job.num_prompt_tokens
        counts = {"prompt_tokens": prompts, "completion_tokens": made}
        return counts | {"total_tokens": prompts + made}

    def metrics(self) -> Json:
        spec = SpecStats()
        for output in self.finished.values():
            add_stats(spec, output.spec)
        return {"speculative_decoding": speculative_metrics(spec)}


class Answer(Protocol):
    """What an endpoint answers with: whole, or in events."""

    async def whole(self) -> Any: ...

    def events(self) -> AsyncIterator[bytes]:
        """What comes together is one piece; the last ends with the stream's last event."""
        ...


class ChoicesAnswer:
    """Writes a job's outputs down as choices, in the shape of their endpoint. token_ids: those of
    the choices as well."""

    def __init__(
        self, run: Run, shape: Shape, streaming: Streaming | None, token_ids: bool = False
    ) -> None:
        self.run = run
        self.shape = shape
        self.streaming = streaming
        self.token_ids = token_ids
        engine = run.job.engine
        self._head: Json = {
            "id": shape.id_prefix + run.job.id,
            "object": shape.object,
            "created": int(time.time()),
            "model": engine.model_name,
            "system_fingerprint": run.fingerprint,
        }

    async def whole(self) -> Json:
        await self.run.finish()
        told = self.run.job.kept(self.run.finished)
        choices = await encoded(self._whole(*one) for one in told)
        results = {"usage": self.run.usage(), "metrics": self.run.metrics()}
        return self._head | {"choices": choices} | results | self.shape.about_prompt(told[0][1])

    def _whole(self, choice: int, output: RequestOutput) -> Json:
        found = self.shape.whole(choice, output)
        return found | {"token_ids": output.token_ids} if self.token_ids else found

    async def events(self) -> AsyncIterator[bytes]:
        streaming, run = self.streaming, self.run
        assert streaming is not None
        writer = EventWriter(self._head | {"object": self.shape.chunk_object})
        opened: set[int] = set()
        made = 0
        usage: Json = {"usage": None} if streaming.has_usage else {}
        async with closing(run.outputs(stream=True)) as outputs:
            async for choice, output in outputs:
                checked(output)
                made += len(output.new_token_ids)
                if streaming.has_usage_in_chunks:
                    usage = {"usage": run.usage_so_far(made)}
                is_last = output.finish_reason is not None and run.is_complete
                tells_last = is_last and not streaming.has_usage
                last = {"metrics": run.metrics()} if tells_last else {}
                first = {} if choice in opened else self.shape.about_prompt(output)
                events = []
                for chunk in self._chunks(choice, output, choice not in opened):
                    closes = chunk["finish_reason"] is not None
                    events.append(writer.event(chunk, usage | first | (last if closes else {})))
                    first = {}
                    opened.add(choice)
                if is_last and streaming.has_usage:
                    more = {"usage": run.usage(), "metrics": run.metrics()}
                    events.append(writer.event(None, more))
                if is_last:
                    events.append(DONE)
                if events:
                    yield b"".join(events)

    def _chunks(self, choice: int, output: RequestOutput, is_first: bool) -> list[Json]:
        opening = self.shape.opening(choice, output) if is_first else None
        chunks = self.shape.deltas(choice, output)
        if output.finish_reason is not None:
            chunks.append(self.shape.closing(choice, output))
        if self.token_ids and output.new_token_ids:
            chunks = chunks or [self.shape.silent(choice)]
            chunks[0]["token_ids"] = output.new_token_ids
        return chunks if opening is None else [opening, *chunks]


async def respond(
    request: Request, answer: Answer, streams: bool, last_event: bytes = DONE
) -> Response:
    """The HTTP answer; work stops as soon as the client goes away."""
    if streams:
        return EventStream(answer.events(), last_event)
    body = await until_disconnect(request.receive, answer.whole())
    if body is None:
        return Response(status_code=499)  # nobody reads it
    return Response(dumps(body), media_type="application/json")
