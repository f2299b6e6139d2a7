"""/v1/completions."""

from __future__ import annotations

import asyncio

from specengine.core.errors import RequestError
from specengine.core.request import TokenLogprob
from specengine.engine.detokenizer import IncrementalDecoder
from specengine.engine.outputs import RequestOutput
from specengine.engine.tokens import encode_text, vocabulary_of
from specengine.server.generation import Job, Json, check_context, make_job
from specengine.server.logprobs import TextLogprobs, shown
from specengine.server.protocol import CompletionRequest, Prompt
from specengine.server.service import ServedEngine


async def completion_job(engine: ServedEngine, body: CompletionRequest) -> Job:
    """Raises ApiError or RequestError where the request cannot be served."""
    sampling = body.to_sampling()
    prompts = await asyncio.to_thread(_encode, engine, body.prompt)
    check_context(engine, prompts, "prompt")
    return make_job(engine, prompts, sampling, body.is_prompt_only)


def _encode(engine: ServedEngine, prompts: list[Prompt]) -> list[list[int]]:
    encoded = [encode_text(engine.tokenizer, p) if isinstance(p, str) else p for p in prompts]
    if not all(encoded):
        raise RequestError("prompt is empty; give at least one token", "prompt")
    return encoded


class CompletionShape:
    """With echo, the text and logprobs of a choice begin with those of its prompt."""

    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, job: Job, body: CompletionRequest) -> None:
        self._job = job
        self._prompts: list[Prompt] = body.prompt
        self._echo = bool(body.echo)
        self._logprobs: dict[int, TextLogprobs] = {}

    def opening(self, choice: int, output: RequestOutput) -> Json | None:
        if not self._echo:
            return None
        return _choice(choice, self._echoed_text(choice), self._echoed_logprobs(choice, output))

    def deltas(self, choice: int, output: RequestOutput) -> list[Json]:
        has_logprobs = bool(output.logprobs) and self._job.sampling.logprobs is not None
        if not output.text_delta and not has_logprobs:
            return []
        return [_choice(choice, output.text_delta, self._new(choice, output.logprobs, output))]

    def closing(self, choice: int, output: RequestOutput) -> Json:
        assert output.finish_reason is not None
        return _choice(choice, "", None, output.finish_reason.kind)

    def whole(self, choice: int, output: RequestOutput) -> Json:
        assert output.finish_reason is not None
        text, logprobs = output.text, None
        if self._echo:
            text = self._echoed_text(choice) + text
            logprobs = self._echoed_logprobs(choice, output)
        new = self._new(choice, output.all_logprobs, output)
        if logprobs is not None and new is not None:
            new = {name: logprobs[name] + new[name] for name in new}
        return _choice(choice, text, new, output.finish_reason.kind)

    def _echoed_text(self, choice: int) -> str:
        prompt = self._prompts[choice // self._job.sampling.n]
        if isinstance(prompt, str):
            return prompt
        skip = self._job.sampling.skip_special_tokens
        return IncrementalDecoder(self._job.engine.tokenizer, skip).add(prompt, final=True)

    def _echoed_logprobs(self, choice: int, output: RequestOutput) -> Json | None:
        if self._job.sampling.logprobs is None:
            return None
        prompt = self._job.prompts[choice // self._job.sampling.n]
        return self._writer(choice).take(prompt, output.prompt_logprobs)

    def _new(self, choice: int, entries: list[TokenLogprob], output: RequestOutput) -> Json | None:
        if self._job.sampling.logprobs is None:
            return None
        kept = shown(entries, output.finish_reason)
        return self._writer(choice).take([entry.token for entry in kept], kept)

    def _writer(self, choice: int) -> TextLogprobs:
        if choice not in self._logprobs:
            vocabulary = vocabulary_of(self._job.engine.tokenizer)
            skip = self._job.sampling.skip_special_tokens
            self._logprobs[choice] = TextLogprobs(vocabulary, skip)
        return self._logprobs[choice]


def _choice(
    choice: int, text: str, logprobs: Json | None, finish_reason: str | None = None
) -> Json:
    return {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
