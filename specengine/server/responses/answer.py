"""The response around the items of an answer, whole and in events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from specengine.core.errors import RequestError
from specengine.engine.outputs import RequestOutput
from specengine.engine.tokens import encode_text, vocabulary_of
from specengine.server.chat_plan import plan_chat
from specengine.server.errors import ApiError, as_api_error
from specengine.server.generation import Run
from specengine.server.job import Job, JobPrompt, check_context, checked, make_job
from specengine.server.json_bytes import Json, dumps
from specengine.server.responses.fields import NamedFunction, ResponsesRequest, renamed
from specengine.server.responses.writer import OutputWriter
from specengine.server.service import ServedEngine
from specengine.server.streaming import closing

# What becomes of a response, and the event that tells its end.
_ENDS = {"completed", "incomplete", "failed"}


async def responses_job(
    engine: ServedEngine, body: ResponsesRequest, label: str
) -> tuple[Job, OutputWriter]:
    """Raises ApiError or RequestError where the request cannot be served."""
    chat = body.to_chat()
    try:
        plan = await asyncio.to_thread(plan_chat, engine, chat, "input")
    except RequestError as error:
        raise renamed(error) from None
    check_context(engine, [plan.prompt], "input")
    sampling, grammar = plan.sampling, plan.sampling.grammar
    if grammar is not None and grammar.param == "response_format":
        sampling = replace(sampling, grammar=replace(grammar, param="text.format"))
    parser = None if plan.make_parser is None else plan.make_parser()
    vocabulary = vocabulary_of(engine.tokenizer) if body.wants_logprobs else None
    job = make_job(engine, [JobPrompt(plan.prompt, sampling, label)])
    return job, OutputWriter(parser, vocabulary)


class ResponsesAnswer:
    """OpenAI's response object; with `metrics`, as all answers have them."""

    def __init__(self, run: Run, body: ResponsesRequest, writer: OutputWriter) -> None:
        self._run = run
        self._body = body
        self._writer = writer
        self._created = int(time.time())
        self._num_events = 0

    async def whole(self) -> Json:
        kind = "completed"
        async with closing(self._run.outputs(self._writer.needs_steps)) as outputs:
            async for _, output in outputs:
                for _ in self._writer.feed(_in_one_piece(output, self._writer.needs_steps)):
                    pass
                kind = _end_of(checked(output))
        return self._response(kind)

    async def events(self) -> AsyncIterator[bytes]:
        kind, has_begun = "completed", False
        try:
            async with closing(self._run.outputs(stream=True)) as outputs:
                async for _, output in outputs:
                    if not has_begun:
                        has_begun = True
                        for name in ("created", "in_progress"):
                            yield self._tell(name, self._response("in_progress"))
                    checked(output)
                    for one in self._writer.feed(output):
                        yield self._event(one)
                    kind = _end_of(output)
        except Exception as error:
            if not has_begun:
                raise
            found = as_api_error(error)
            self._run.note_error(found)
            for one in self._writer.close("incomplete"):
                yield self._event(one)
            yield self._tell("failed", self._response("failed", found))
            return
        yield self._tell(kind, self._response(kind))

    def _tell(self, name: str, response: Json) -> bytes:
        return self._event({"type": f"response.{name}", "response": response})

    def _event(self, payload: Json) -> bytes:
        numbered = {**payload, "sequence_number": self._num_events}
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (payload["type"].encode(), dumps(numbered))

    def _response(self, status: str, error: ApiError | None = None) -> Json:
        has_ended = status in _ENDS
        is_cut = status == "incomplete"
        told = {
            "id": "resp_" + self._run.job.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None if error is None else {"code": "server_error", "message": error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": self._run.job.engine.model_name,
            "output": self._writer.items if has_ended else [],
            "usage": self._usage() if has_ended and error is None else None,
        }
        return told | self._settings() | ({"metrics": self._run.metrics()} if has_ended else {})

    def _settings(self) -> Json:
        """What was asked for, with its defaults."""
        body, sampling = self._body, self._run.job.prompts[0].sampling
        format = body.text and body.text.format
        choice = body.tool_choice or "auto"
        return {
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": _dumped(format) if format is not None else {"type": "text"}},
            "tool_choice": _dumped(choice) if isinstance(choice, NamedFunction) else choice,
            "tools": [one.model_dump() for one in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "user": body.user,
        }

    def _usage(self) -> Json:
        run, reasoning = self._run, self._writer.reasoning
        tokenizer = run.job.engine.tokenizer
        thought = encode_text(tokenizer, reasoning, add_special_tokens=False) if reasoning else []
        prompt, made = run.job.num_prompt_tokens, run.num_made
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": run.num_cached, "cache_write_tokens": 0},
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": min(len(thought), made)},
            "total_tokens": prompt + made,
        }


def _in_one_piece(output: RequestOutput, is_step: bool) -> RequestOutput:
    """An output that was not streamed, with all that came as what is new."""
    if is_step:
        return output
    return replace(output, text_delta=output.text, logprobs=output.all_logprobs)


def _end_of(output: RequestOutput) -> str:
    finish = output.finish_reason
    return "incomplete" if finish is not None and finish.kind == "length" else "completed"


def _dumped(one: Any) -> Any:
    return one.model_dump(by_alias=True, exclude_none=True)
