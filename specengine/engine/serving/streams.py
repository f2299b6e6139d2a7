"""The callers' side: the open requests of one event loop, and what came for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec

from specengine.core.errors import (
    ConfigError,
    ModelLoadError,
    OutOfMemoryError,
    RequestError,
    SpecEngineError,
)
from specengine.core.request import TokenLogprob
from specengine.core.sampling import SamplingParams
from specengine.core.spec_stats import SpecStats
from specengine.engine.detokenizer import Detokenizer
from specengine.engine.outputs import RequestOutput, RequestTimes
from specengine.engine.serving.messages import (
    Abort,
    Answer,
    Ask,
    Beginning,
    Detail,
    Ending,
    Gained,
    Generate,
    Refused,
    Reply,
    Request,
)

Post = Callable[[Request], None]
NOT_BEGUN = Beginning(0, RequestTimes(0.0), [])


@dataclass(eq=False, slots=True)
class OpenChoice:
    """One choice, and what of it has not been handed on yet. has_news: something has come."""

    request: OpenRequest
    index: int
    detokenizer: Detokenizer
    new: list[int] = field(default_factory=list)
    new_logprobs: list[TokenLogprob] = field(default_factory=list)
    has_news: bool = False
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    beginning: Beginning = NOT_BEGUN
    ending: Ending | None = None
    spec: SpecStats = field(default_factory=SpecStats)

    def note(self, detail: Detail) -> None:
        self.new_logprobs += detail.logprobs
        if detail.beginning is not None:
            self.beginning = detail.beginning
        if detail.ending is not None:
            self.ending, self.spec = detail.ending, detail.ending.spec

    def take_output(self) -> RequestOutput:
        new, new_logprobs = self.new, self.new_logprobs
        self.new, self.has_news = [], False
        self.token_ids += new
        if new_logprobs:
            self.new_logprobs = []
            self.logprobs += new_logprobs
        request, beginning, ending = self.request, self.beginning, self.ending
        finish = None if ending is None else ending.finish_reason
        delta = self.detokenizer.add(new, finish)
        return RequestOutput(
            rid=request.rid,
            index=self.index,
            new_token_ids=new,
            token_ids=self.token_ids,
            text_delta=delta,
            text=self.detokenizer.text,
            finish_reason=finish,
            logprobs=new_logprobs,
            all_logprobs=self.logprobs,
            prompt_logprobs=beginning.prompt_logprobs,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=beginning.num_cached_tokens,
            spec=self.spec,
            times=(ending or beginning).times,
            embedding=None if ending is None else ending.embedding,
        )


@dataclass(eq=False)
class OpenRequest:
    """A request, and its choices that something has come for, in the order in which it came."""

    rid: str
    num_prompt_tokens: int
    num_open: int
    news: list[OpenChoice] = field(default_factory=list)
    waiter: asyncio.Future[None] | None = None
    error: Exception | None = None

    def wake(self) -> None:
        waiter = self.waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def fail(self, error: Exception) -> None:
        self.error = error
        self.wake()

    async def wait(self, loop: asyncio.AbstractEventLoop) -> list[OpenChoice]:
        """What has come since, once there is any. Raises the error that ended the request."""
        if not self.news and self.error is None:
            self.waiter = loop.create_future()
            try:
                await self.waiter
            finally:
                self.waiter = None
        if self.error is not None:
            raise self.error
        news, self.news = self.news, []
        return news


class Streams:
    """The requests of one event loop. Every call is made in that loop.

    post: hands a message to the engine's side; raises EngineStoppedError where it has ended.
    """

    def __init__(self, tokenizer: Any, post: Post) -> None:
        self._tokenizer = tokenizer
        self._post = post
        self._numbers = count()
        self._choices: dict[int, OpenChoice] = {}
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self._next_stream = 0

    @property
    def is_idle(self) -> bool:
        return not self._choices and not self._asked

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        rid: str,
        stream: bool,
        sendable: SamplingParams | None = None,
        embeds: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """See AsyncEngine.generate. What waits together for a choice is one output. sendable: what
        the engine is asked for, where that is not `sampling` itself. embeds: see Generate."""
        loop = asyncio.get_running_loop()
        request = OpenRequest(rid, len(prompt_ids), sampling.n)
        first, self._next_stream = self._next_stream, self._next_stream + sampling.n
        for index in range(sampling.n):
            detokenizer = Detokenizer(self._tokenizer, sampling)
            self._choices[first + index] = OpenChoice(request, index, detokenizer)
        try:
            self._post(Generate(rid, first, prompt_ids, sendable or sampling, stream, embeds))
            while request.num_open:
                for choice in await request.wait(loop):
                    output = choice.take_output()
                    if output.finish_reason is not None:
                        request.num_open -= 1
                        del self._choices[first + choice.index]
                    yield output
        finally:
            for index in range(sampling.n):
                self._choices.pop(first + index, None)
            if request.num_open and request.error is None:
                self._abandon(first)

    async def embed(self, prompt_ids: list[int], rid: str) -> list[float]:
        """The vector of a prompt. Raises RequestError or QueueFullError where it cannot be had."""
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        generated = self.generate(prompt_ids, sampling, rid, stream=False, embeds=True)
        async with aclosing(generated) as outputs:
            async for output in outputs:
                if output.embedding is not None:
                    return output.embedding
        raise RequestError("the engine gave this request up")

    async def operate(self, what: str, **arguments: Any) -> Any:
        """The result of an operation that the engine may refuse: see Operations."""
        try:
            answer = await self.ask(what, **arguments)
        except (ConfigError, ModelLoadError, OutOfMemoryError) as error:
            raise RequestError(str(error)) from error
        return msgspec.msgpack.decode(answer)

    async def ask(self, what: str, **arguments: Any) -> bytes:
        """The result of one of the host's operations, as MessagePack. Raises SpecEngineError."""
        number = next(self._numbers)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            self._post(Ask(number, what, arguments))
            return await answer
        finally:
            del self._asked[number]

    def receive(self, message: Reply) -> None:
        if isinstance(message, Gained):
            self._gain(message)
        elif isinstance(message, Refused):
            if (choice := self._choices.get(message.stream)) is not None:
                choice.request.fail(message.failure.error())
        else:
            self._note_answer(message)

    def fail(self, make_error: Callable[[], Exception]) -> None:
        """The engine has ended: so does everything that is open."""
        for choice in self._choices.values():
            choice.request.fail(make_error())
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(make_error())

    def _gain(self, message: Gained) -> None:
        """Called for each step, so no call a token: requests are woken when all is noted."""
        choices = self._choices
        for stream, tokens in message.tokens.items():
            choice = choices.get(stream)
            if choice is None:
                continue
            if choice.has_news:
                choice.new += tokens
            else:
                choice.new, choice.has_news = tokens, True
                choice.request.news.append(choice)
        for detail in message.details:
            choice = choices.get(detail.stream)
            if choice is not None:
                choice.note(detail)
        for stream in message.tokens:
            choice = choices.get(stream)
            if choice is not None:
                waiter = choice.request.waiter
                if waiter is not None and not waiter.done():
                    waiter.set_result(None)

    def _note_answer(self, message: Answer) -> None:
        answer = self._asked.get(message.number)
        if answer is None or answer.done():
            return
        if message.failure is not None:
            answer.set_exception(message.failure.error())
        else:
            answer.set_result(bytes(message.result))

    def _abandon(self, first: int) -> None:
        with suppress(SpecEngineError):  # the engine has ended, and the request with it
            self._post(Abort(first))


def decode_answer(answer: bytes, kind: type[Any]) -> Any:
    return msgspec.msgpack.decode(answer, type=kind)
