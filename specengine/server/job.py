"""What one generation request asks of the engine, whatever its endpoint."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from secrets import token_hex

from specengine.core.request import FinishReason
from specengine.core.sampling import SamplingParams
from specengine.engine.outgoing import request_id
from specengine.engine.outputs import RequestOutput
from specengine.server.bounds import check_fits
from specengine.server.errors import ApiError
from specengine.server.logprobs import LOWEST
from specengine.server.service import ServedEngine
from specengine.server.streaming import closing, merge


@dataclass(frozen=True)
class JobPrompt:
    """One prompt. label: what the client calls it. is_prompt_only: one token is generated, and not
    returned."""

    ids: list[int]
    sampling: SamplingParams
    label: str = ""
    is_prompt_only: bool = False


@dataclass(frozen=True)
class Job:
    """Prompts to complete, n choices each; choice numbers run over all of them.

    n: the same in the sampling parameters of every prompt. num_kept: choices of a prompt that are
    returned, those of the highest mean logprob; None returns all.
    """

    engine: ServedEngine
    id: str
    prompts: Sequence[JobPrompt]
    num_kept: int | None = None

    @property
    def n(self) -> int:
        return self.prompts[0].sampling.n

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def num_told(self) -> int:
        """Choices of a prompt."""
        return self.num_kept or self.n

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.ids) for prompt in self.prompts)

    async def outputs(self, stream: bool) -> AsyncIterator[tuple[int, RequestOutput]]:
        """(choice, output) as they come, or a finished choice at a time. Closing it early aborts
        every prompt."""
        sources = [
            self.engine.generate(
                prompt.ids, prompt.sampling, request_id(prompt.label, self.id, number), stream
            )
            for number, prompt in enumerate(self.prompts)
        ]
        if len(sources) == 1:
            async with closing(sources[0]) as outputs:
                async for output in outputs:
                    yield output.index, self._told(0, output)
            return
        async with closing(merge(sources)) as merged:
            async for number, output in merged:
                yield number * self.n + output.index, self._told(number, output)

    def kept(self, finished: Mapping[int, RequestOutput]) -> list[tuple[int, RequestOutput]]:
        """(choice, output) of what is returned, of all finished choices; numbered anew."""
        told = []
        for start in range(0, self.num_choices, self.n):
            of_prompt = [finished[choice] for choice in range(start, start + self.n)]
            if self.num_told < len(of_prompt):
                of_prompt.sort(key=_mean_logprob, reverse=True)
            told += of_prompt[: self.num_told]
        return list(enumerate(told))

    def _told(self, number: int, output: RequestOutput) -> RequestOutput:
        return _without_text(output) if self.prompts[number].is_prompt_only else output


def make_job(
    engine: ServedEngine, prompts: Sequence[JobPrompt], num_kept: int | None = None
) -> Job:
    return Job(engine, token_hex(16), prompts, num_kept)


def check_context(engine: ServedEngine, prompts: Sequence[list[int]], param: str) -> None:
    """ApiError where one leaves no room for a token."""
    check_fits(max(map(len, prompts)), engine.context_length, param)


def checked(output: RequestOutput) -> RequestOutput:
    """ApiError where the engine gave the request up."""
    finish = output.finish_reason
    if finish is not None and finish.kind not in ("stop", "length"):
        status = 503 if finish.kind == "abort" else 400
        raise ApiError(status, finish.message or "the engine gave this request up", code="aborted")
    return output


def _mean_logprob(output: RequestOutput) -> float:
    entries = output.all_logprobs
    return sum(max(one.logprob, LOWEST) for one in entries) / max(len(entries), 1)


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
