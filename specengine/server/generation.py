"""One generation request, whatever its endpoint: run its prompts, answer whole or in events."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from uuid import uuid4

import orjson
from starlette.requests import Request
from starlette.responses import Response

from specengine.core.request import FinishReason
from specengine.core.sampling import SamplingParams
from specengine.core.spec_stats import SpecStats
from specengine.engine.outputs import RequestOutput, add_stats, speculative_metrics
from specengine.server.errors import ApiError
from specengine.server.metrics import ServerMetrics
from specengine.server.request_log import RequestRecord, record_of
from specengine.server.service import ServedEngine, Service, system_fingerprint
from specengine.server.streaming import (
    EventStream,
    Streaming,
    closing,
    event,
    merge,
    until_disconnect,
)

Json = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """Prompts to complete, n choices each; choice numbers run over all of them."""

    engine: ServedEngine
    id: str
    prompts: list[list[int]]
    sampling: SamplingParams
    is_prompt_only: bool = False  # one token is generated, and not told

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.sampling.n

    async def outputs(self, stream: bool) -> AsyncIterator[tuple[int, RequestOutput]]:
        """(choice, output) as they come, or a finished choice at a time. Closing it early aborts
        every prompt."""
        sources = [
            self.engine.generate(prompt, self.sampling, f"{self.id}-{number}", stream)
            for number, prompt in enumerate(self.prompts)
        ]
        if len(sources) == 1:
            async with closing(sources[0]) as outputs:
                async for output in outputs:
                    yield output.index, self._shown(output)
            return
        async with closing(merge(sources)) as merged:
            async for number, output in merged:
                yield number * self.sampling.n + output.index, self._shown(output)

    def _shown(self, output: RequestOutput) -> RequestOutput:
        """ApiError where the engine gave the request up."""
        return _without_text(_checked(output)) if self.is_prompt_only else _checked(output)


def _checked(output: RequestOutput) -> RequestOutput:
    finish = output.finish_reason
    if finish is not None and finish.kind not in ("stop", "length"):
        status = 503 if finish.kind == "abort" else 400
        raise ApiError(status, finish.message or "the engine gave this request up", code="aborted")
    return output


def _without_text(output: RequestOutput) -> RequestOutput:
    finish = None if output.finish_reason is None else FinishReason("length")
    return replace(
        output,
        new_token_ids=[],
        token_ids=[],
        text_delta="",
        text="",
        logprobs=[],
        all_logprobs=[],
        finish_reason=finish,
    )


def make_job(
    engine: ServedEngine,
    prompts: list[list[int]],
    sampling: SamplingParams,
    is_prompt_only: bool = False,
) -> Job:
    return Job(engine, uuid4().hex, prompts, sampling, is_prompt_only)


def check_context(engine: ServedEngine, prompts: list[list[int]], param: str) -> None:
    """Refuse a prompt that leaves no room. (max_tokens beyond the context is cut to what fits.)"""
    longest = max(len(prompt) for prompt in prompts)
    if longest >= engine.context_length:
        message = (
            f"the prompt has {longest} tokens, and the context length of this model is "
            f"{engine.context_length}: no token can follow; shorten the prompt"
        )
        raise ApiError(400, message, param, "context_length_exceeded")


class Shape(Protocol):
    """How one endpoint writes choices down."""

    id_prefix: str
    object: str
    chunk_object: str

    def opening(self, choice: int, output: RequestOutput) -> Json | None:
        """The choice's first chunk, before any generated text."""
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


@dataclass
class Tally:
    """The finished choices of a job, in the order in which they finished."""

    job: Job
    finished: dict[int, RequestOutput] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return len(self.finished) == self.job.num_choices

    def usage(self) -> Json:
        """A prompt counts once, whatever its n; hits are those of its first choice."""
        made = sum(len(output.token_ids) for output in self.finished.values())
        firsts = range(0, self.job.num_choices, self.job.sampling.n)
        cached = sum(self.finished[choice].num_cached_tokens for choice in firsts)
        return self.usage_so_far(made) | {"prompt_tokens_details": {"cached_tokens": cached}}

    def usage_so_far(self, made: int) -> Json:
        prompts = sum(len(prompt) for prompt in self.job.prompts)
        counts = {"prompt_tokens": prompts, "completion_tokens": made}
        return counts | {"total_tokens": prompts + made}

    def metrics(self) -> Json:
        spec = SpecStats()
        for output in self.finished.values():
            add_stats(spec, output.spec)
        return {"speculative_decoding": speculative_metrics(spec)}


class Answer:
    """Writes a job's outputs down in the shape of its endpoint."""

    def __init__(
        self, job: Job, shape: Shape, metrics: ServerMetrics, record: RequestRecord
    ) -> None:
        self.job = job
        self.shape = shape
        self.metrics = metrics
        self.record = record
        self._head: Json = {
            "id": shape.id_prefix + job.id,
            "object": shape.object,
            "created": int(time.time()),
            "model": job.engine.model_name,
            "system_fingerprint": system_fingerprint(job.engine.config),
        }

    async def whole(self) -> Json:
        tally = Tally(self.job)
        async with closing(self.job.outputs(stream=False)) as outputs:
            async for choice, output in outputs:
                self._count(tally, choice, output)
        ordered = sorted(tally.finished.items())
        choices = [self.shape.whole(choice, output) for choice, output in ordered]
        results = {"choices": choices, "usage": tally.usage(), "metrics": tally.metrics()}
        return self._head | results

    async def events(self, streaming: Streaming) -> AsyncIterator[bytes]:
        tally = Tally(self.job)
        opened: set[int] = set()
        made = 0
        usage: Json = {"usage": None} if streaming.has_usage else {}
        async with closing(self.job.outputs(stream=True)) as outputs:
            async for choice, output in outputs:
                self._count(tally, choice, output)
                made += len(output.new_token_ids)
                if streaming.has_usage_in_chunks:
                    usage = {"usage": tally.usage_so_far(made)}
                is_last = tally.is_complete and not streaming.has_usage
                last = {"metrics": tally.metrics()} if is_last else {}
                for chunk in self._chunks(choice, output, choice not in opened):
                    closes = chunk["finish_reason"] is not None
                    yield event(self._chunk([chunk]) | usage | (last if closes else {}))
                opened.add(choice)
        if streaming.has_usage:
            totals = {"usage": tally.usage(), "metrics": tally.metrics()}
            yield event(self._chunk([]) | totals)

    def _chunks(self, choice: int, output: RequestOutput, is_first: bool) -> list[Json]:
        chunks = []
        opening = self.shape.opening(choice, output) if is_first else None
        if opening is not None:
            chunks.append(opening)
        chunks += self.shape.deltas(choice, output)
        if output.finish_reason is not None:
            chunks.append(self.shape.closing(choice, output))
        return chunks

    def _count(self, tally: Tally, choice: int, output: RequestOutput) -> None:
        if output.finish_reason is not None:
            tally.finished[choice] = output
            self.metrics.observe(output)
            self.record.count(output)

    def _chunk(self, choices: list[Json]) -> Json:
        return self._head | {"object": self.shape.chunk_object, "choices": choices}


async def respond(
    service: Service, request: Request, job: Job, shape: Shape, streaming: Streaming | None
) -> Response:
    """The HTTP answer; work stops as soon as the client goes away."""
    record = record_of(request.scope)
    record.prompt_tokens = sum(len(prompt) for prompt in job.prompts)
    answer = Answer(job, shape, service.metrics, record)
    if streaming is not None:
        return EventStream(answer.events(streaming))
    body = await until_disconnect(request.receive, answer.whole())
    if body is None:
        return Response(status_code=499)  # nobody reads it
    return Response(orjson.dumps(body), media_type="application/json")
