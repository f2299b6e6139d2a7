"""/v1/chat/completions."""

from __future__ import annotations

import asyncio
from typing import Any

from specengine.core.request import TokenLogprob
from specengine.core.sampling import SamplingParams
from specengine.engine.chat_template import render_chat
from specengine.engine.outputs import RequestOutput
from specengine.engine.tokens import vocabulary_of
from specengine.server.generation import Job, Json, check_context, make_job
from specengine.server.logprobs import chat_logprobs, shown
from specengine.server.protocol import ChatRequest
from specengine.server.service import ServedEngine


async def chat_job(engine: ServedEngine, body: ChatRequest) -> Job:
    """Raises ApiError or RequestError where the request cannot be served."""
    sampling = body.to_sampling()
    messages = [message.for_template() for message in body.messages]
    prompt = await asyncio.to_thread(render_chat, engine.tokenizer, messages)
    check_context(engine, [prompt], "messages")
    return make_job(engine, [prompt], sampling)


class ChatShape:
    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, tokenizer: Any, sampling: SamplingParams) -> None:
        self._vocabulary = vocabulary_of(tokenizer)
        self._wants_logprobs = sampling.logprobs is not None

    def opening(self, choice: int, output: RequestOutput) -> Json:
        return _chunk(choice, {"role": "assistant", "content": ""})

    def delta(self, choice: int, output: RequestOutput) -> Json:
        logprobs = self._logprobs(output.logprobs, output)
        return _chunk(choice, {"content": output.text_delta}, logprobs)

    def closing(self, choice: int, output: RequestOutput) -> Json:
        assert output.finish_reason is not None
        return _chunk(choice, {}, finish_reason=output.finish_reason.kind)

    def whole(self, choice: int, output: RequestOutput) -> Json:
        assert output.finish_reason is not None
        return {
            "index": choice,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": self._logprobs(output.all_logprobs, output),
            "finish_reason": output.finish_reason.kind,
        }

    def _logprobs(self, entries: list[TokenLogprob], output: RequestOutput) -> Json | None:
        if not self._wants_logprobs:
            return None
        return chat_logprobs(shown(entries, output.finish_reason), self._vocabulary)


def _chunk(
    choice: int, delta: Json, logprobs: Json | None = None, finish_reason: str | None = None
) -> Json:
    return {
        "index": choice,
        "delta": delta,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
    }
