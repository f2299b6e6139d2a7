"""/v1/completions."""

from __future__ import annotations

import asyncio
from typing import Any

from specengine.core.errors import RequestError
from specengine.core.request import TokenLogprob
from specengine.engine.detokenizer import IncrementalDecoder
from specengine.engine.outputs import RequestOutput
from specengine.engine.tokens import encode_text, vocabulary_of
from specengine.server.job import Job, JobPrompt, check_context, make_job
from specengine.server.json_bytes import Json
from specengine.server.logprobs import TextLogprobs, prompt_logprobs
from specengine.server.protocol import CompletionRequest, Prompt
from specengine.server.service import ServedEngine


async def completion_job(engine: ServedEngine, body: CompletionRequest, label: str) -> Job:
    """Raises ApiError or RequestError where the request cannot be served."""
    sampling = body.to_sampling(engine.sampling_defaults)
    prompts = await encode_prompts(engine, body.prompt)
    check_context(engine, prompts, "prompt")
    asked = [JobPrompt(ids, sampling, label, body.is_prompt_only) for ids in prompts]
    return make_job(engine, asked, body.num_kept)


async def encode_prompts(
    engine: ServedEngine, prompts: list[Prompt], param: str = "prompt"
) -> list[list[int]]:
    """Token ids of each. Texts are encoded in another thread, which takes a while to begin. Raises
    RequestError."""
    has_text = any(isinstance(one, str) for one in prompts)
    arguments = engine.tokenizer, prompts, param
    return await asyncio.to_thread(_encode, *arguments) if has_text else _encode(*arguments)


def _encode(tokenizer: Any, prompts: list[Prompt], param: str) -> list[list[int]]:
    encoded = [encode_text(tokenizer, p, param=param) if isinstance(p, str) else p for p in prompts]
    if not all(encoded):
        raise RequestError(f"{param} is empty; give at least one token", param)
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
        self._num_logprobs = body.logprobs
        self._num_prompt_logprobs = body.prompt_logprobs
        self._token_ids = bool(body.return_token_ids)
        self._skips_special = job.prompts[0].sampling.skip_special_tokens  # one for all
        self._logprobs: dict[int, TextLogprobs] = {}

    def about_prompt(self, output: RequestOutput) -> Json:
        return {}  # each choice may have another prompt, and tells it itself

    def opening(self, choice: int, output: RequestOutput) -> Json | None:
        if not self._echo and not self._token_ids:
            return None
        text, logprobs = "", None
        if self._echo:
            text = self._echoed_text(choice)
            logprobs = self._echoed_logprobs(choice, output)
        return _choice(choice, text, logprobs) | self._about_prompt(choice, output)

    def silent(self, choice: int) -> Json:
        return _choice(choice, "", None)

    def deltas(self, choice: int, output: RequestOutput) -> list[Json]:
        has_logprobs = bool(output.logprobs) and self._num_logprobs is not None
        if not output.text_delta and not has_logprobs:
            return []
        return [_choice(choice, output.text_delta, self._new(choice, output.logprobs))]

    def closing(self, choice: int, output: RequestOutput) -> Json:
        assert output.finish_reason is not None
        return _choice(choice, "", None, output.finish_reason.kind)

    def whole(self, choice: int, output: RequestOutput) -> Json:
        assert output.finish_reason is not None
        text, logprobs = output.text, None
        if self._echo:
            text = self._echoed_text(choice) + text
            logprobs = self._echoed_logprobs(choice, output)
        new = self._new(choice, output.all_logprobs)
        if logprobs is not None and new is not None:
            new = {name: logprobs[name] + new[name] for name in new}
        told = _choice(choice, text, new, output.finish_reason.kind)
        return told | self._about_prompt(choice, output)

    def _about_prompt(self, choice: int, output: RequestOutput) -> Json:
        told: Json = {}
        if self._token_ids:
            told["prompt_token_ids"] = self._job.prompts[choice // self._job.num_told].ids
        if self._num_prompt_logprobs is not None:
            entries, most = output.prompt_logprobs, self._num_prompt_logprobs
            vocabulary = vocabulary_of(self._job.engine.tokenizer)
            told["prompt_logprobs"] = prompt_logprobs(entries, vocabulary, most)
        return told

    def _echoed_text(self, choice: int) -> str:
        prompt = self._prompts[choice // self._job.num_told]
        if isinstance(prompt, str):
            return prompt
        decoder = IncrementalDecoder(self._job.engine.tokenizer, self._skips_special)
        return decoder.add(prompt, final=True)

    def _echoed_logprobs(self, choice: int, output: RequestOutput) -> Json | None:
        if self._num_logprobs is None:
            return None
        prompt = self._job.prompts[choice // self._job.num_told].ids
        return self._writer(choice, self._num_logprobs).take(prompt, output.prompt_logprobs)

    def _new(self, choice: int, entries: list[TokenLogprob]) -> Json | None:
        if self._num_logprobs is None:
            return None
        tokens = [entry.token for entry in entries]
        return self._writer(choice, self._num_logprobs).take(tokens, entries)

    def _writer(self, choice: int, most: int) -> TextLogprobs:
        if choice not in self._logprobs:
            vocabulary = vocabulary_of(self._job.engine.tokenizer)
            self._logprobs[choice] = TextLogprobs(vocabulary, self._skips_special, most)
        return self._logprobs[choice]


def _choice(
    choice: int, text: str, logprobs: Json | None, finish_reason: str | None = None
) -> Json:
    return {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
