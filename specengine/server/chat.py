"""/v1/chat/completions."""

from __future__ import annotations

import asyncio
from typing import Any

from specengine.core.request import TokenLogprob
from specengine.core.sampling import SamplingParams
from specengine.engine.outputs import RequestOutput
from specengine.engine.tokens import vocabulary_of
from specengine.server.chat_plan import MakeParser, plan_chat
from specengine.server.job import Job, JobPrompt, check_context, make_job
from specengine.server.json_bytes import Json
from specengine.server.logprobs import chat_logprobs, prompt_logprobs, shown
from specengine.server.parsing.choice import ChoiceParser
from specengine.server.protocol import ChatRequest
from specengine.server.service import ServedEngine


async def chat_job(engine: ServedEngine, body: ChatRequest, label: str) -> tuple[Job, ChatShape]:
    """Raises ApiError or RequestError where the request cannot be served."""
    plan = await asyncio.to_thread(plan_chat, engine, body)
    check_context(engine, [plan.prompt], "messages")
    job = make_job(engine, [JobPrompt(plan.prompt, plan.sampling, label)])
    token_ids = plan.prompt if body.return_token_ids else None
    return job, ChatShape(engine.tokenizer, plan.sampling, plan.make_parser, token_ids)


class ChatShape:
    """make_parser: makes the parser of a choice; without it all text is content. prompt: its token
    ids, where the answer includes them."""

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        tokenizer: Any,
        sampling: SamplingParams,
        make_parser: MakeParser | None = None,
        prompt: list[int] | None = None,
    ) -> None:
        self._vocabulary = vocabulary_of(tokenizer)
        self._wants_logprobs = sampling.logprobs is not None
        self._num_prompt_logprobs = sampling.prompt_logprobs
        self._prompt = prompt
        self._make_parser = make_parser
        self._parsers: dict[int, ChoiceParser] = {}  # of the choices that are streamed

    def about_prompt(self, output: RequestOutput) -> Json:
        told: Json = {}
        if self._prompt is not None:
            told["prompt_token_ids"] = self._prompt
        if self._num_prompt_logprobs is not None:
            entries, most = output.prompt_logprobs, self._num_prompt_logprobs
            told["prompt_logprobs"] = prompt_logprobs(entries, self._vocabulary, most)
        return told

    def opening(self, choice: int, output: RequestOutput) -> Json:
        return _chunk(choice, {"role": "assistant", "content": ""})

    def silent(self, choice: int) -> Json:
        return _chunk(choice, {"content": ""})

    def deltas(self, choice: int, output: RequestOutput) -> list[Json]:
        """The logprobs of the new tokens are those of the first chunk."""
        new = [] if output.text_delta == "" else [{"content": output.text_delta}]
        if self._make_parser is not None:
            parser = self._parsers.get(choice)
            if parser is None:
                parser = self._parsers[choice] = self._make_parser()
            ended = output.finish_reason is not None
            new = [delta.json() for delta in parser.feed(output.text_delta, ended)]
        logprobs = self._logprobs(output.logprobs, output) if output.logprobs else None
        if logprobs is not None and not new:
            new = [{"content": ""}]
        return [_chunk(choice, one, None if k else logprobs) for k, one in enumerate(new)]

    def closing(self, choice: int, output: RequestOutput) -> Json:
        assert output.finish_reason is not None
        reason = _reason(output.finish_reason.kind, self._parsers.pop(choice, None))
        return _chunk(choice, {}, finish_reason=reason)

    def whole(self, choice: int, output: RequestOutput) -> Json:
        assert output.finish_reason is not None
        parser = None if self._make_parser is None else self._make_parser()
        message: Json = {"role": "assistant", "content": output.text, "refusal": None}
        if parser is not None:
            parser.feed(output.text, ended=True)
            message |= parser.answer.message()
        return {
            "index": choice,
            "message": message,
            "logprobs": self._logprobs(output.all_logprobs, output),
            "finish_reason": _reason(output.finish_reason.kind, parser),
        }

    def _logprobs(self, entries: list[TokenLogprob], output: RequestOutput) -> Json | None:
        if not self._wants_logprobs:
            return None
        return chat_logprobs(shown(entries, output.finish_reason), self._vocabulary)


def _reason(kind: str, parser: ChoiceParser | None) -> str:
    """Calls end an answer by themselves; one cut short by its length is still that."""
    has_calls = parser is not None and bool(parser.answer.calls)
    return "tool_calls" if has_calls and kind == "stop" else kind


def _chunk(
    choice: int, delta: Json, logprobs: Json | None = None, finish_reason: str | None = None
) -> Json:
    return {
        "index": choice,
        "delta": delta,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
    }
