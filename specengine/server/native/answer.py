"""What /generate answers with: the text, and meta_info about it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from specengine.core.limits import LimitConfig
from specengine.core.request import TokenLogprob
from specengine.core.sampling import SamplingParams
from specengine.core.spec_stats import SpecStats
from specengine.engine.outputs import RequestOutput
from specengine.engine.tokens import vocabulary_of
from specengine.server.completions import encode_prompts
from specengine.server.errors import ApiError
from specengine.server.generation import Run
from specengine.server.job import Job, JobPrompt, check_context, checked, make_job
from specengine.server.json_bytes import Json, encoded
from specengine.server.logprobs import LOWEST, name_of
from specengine.server.native.fields import NativeRequest
from specengine.server.native.sampling import PARAMS
from specengine.server.service import ServedEngine
from specengine.server.streaming import DONE, closing, event

# Of a token: its logprob, its id, and its text where that was asked for.
Entry = tuple[float | None, int, str | None]


async def native_job(engine: ServedEngine, body: NativeRequest, label: str) -> Job:
    """Raises ApiError or RequestError where the request cannot be served."""
    samplings = body.to_samplings()
    _check_grammars(samplings, engine.config.limits)
    prompts = await encode_prompts(engine, body.prompts, body.param)
    check_context(engine, prompts, body.param)
    if any((start or 0) >= len(ids) for start, ids in zip(body.starts, prompts, strict=True)):
        message = "logprob_start_len lies behind the end of a prompt"
        raise ApiError(400, message, "logprob_start_len")
    labels = [one or label for one in body.labels]
    parts = zip(prompts, samplings, labels, body.prompt_only, strict=True)
    return make_job(engine, [JobPrompt(*part) for part in parts])


def _check_grammars(samplings: Sequence[SamplingParams], limits: LimitConfig) -> None:
    """ApiError for more than can wait to be compiled, however often they are sent."""
    num, most = len({one.grammar for one in samplings} - {None}), limits.max_queued_grammars
    if num > most:
        flag = limits.options()["max_queued_grammars"].flag
        message = (
            f"{PARAMS}: {num} different grammars; at most {most} are taken at once ({flag}); send "
            "the others in another request"
        )
        raise ApiError(400, message, PARAMS, "limit_exceeded")


class NativeAnswer:
    """A choice an object; of several choices, or of a list of prompts, a list in the order of the
    prompts, the choices of one beside each other. Streamed objects hold all text so far, and their
    place in that list. A request that was ended by /abort_request answers with what it has."""

    def __init__(self, run: Run, body: NativeRequest) -> None:
        self._run = run
        self._body = body
        self._vocabulary = vocabulary_of(run.job.engine.tokenizer)
        self._started = time.monotonic()

    async def whole(self) -> Any:
        ended: dict[int, float] = {}
        async with closing(self._run.outputs(stream=False)) as outputs:
            async for choice, output in outputs:
                _check(output)
                ended[choice] = time.monotonic()
        finished = sorted(self._run.finished.items())
        told = await encoded(self._told(*one, ended[one[0]]) for one in finished)
        return told if self._body.is_list else told[0]

    async def events(self) -> AsyncIterator[bytes]:
        async with closing(self._run.outputs(stream=True)) as outputs:
            async for choice, output in outputs:
                _check(output)
                place = {"index": choice} if self._body.is_list else {}
                told = event(self._told(choice, output, time.monotonic()) | place)
                yield told + DONE if self._run.is_complete else told

    def _told(self, choice: int, output: RequestOutput, now: float) -> Json:
        number = choice // self._run.job.n
        told = {
            "text": output.text,
            "output_ids": output.token_ids,
            "meta_info": self._meta_info(number, output, now),
        }
        if self._body.return_prompt_token_ids:
            told["prompt_token_ids"] = self._run.job.prompts[number].ids
        return told

    def _meta_info(self, number: int, output: RequestOutput, now: float) -> Json:
        job = self._run.job
        meta: Json = {
            "id": self._body.name_of(number, job.id),
            "finish_reason": _finish(output),
            "prompt_tokens": output.num_prompt_tokens,
            "completion_tokens": len(output.token_ids),
            "cached_tokens": output.num_cached_tokens,
            "e2e_latency": now - self._started,
        }
        if output.finish_reason is not None:  # before, nothing is known of the rounds
            meta |= _speculative(output.spec)
        if (num_tops := job.prompts[number].sampling.logprobs) is not None:
            meta |= self._logprobs(number, output, num_tops)
        return meta

    def _logprobs(self, number: int, output: RequestOutput, num_tops: int) -> Json:
        start = self._body.starts[number]
        entries: Sequence[TokenLogprob | None] = []
        tokens: list[int] = []
        if start is not None:
            tokens = self._run.job.prompts[number].ids[start:]
            entries = [None, *output.prompt_logprobs[start + 1 :]]
        told: Json = {
            "input_token_logprobs": self._entries(tokens, entries),
            "output_token_logprobs": self._entries(output.token_ids, output.all_logprobs),
            "output_token_logprobs_length": len(output.token_ids),
        }
        if num_tops:
            told["input_top_logprobs"] = [self._tops(one) for one in entries]
            told["output_top_logprobs"] = [self._tops(one) for one in output.all_logprobs]
        return told

    def _entries(
        self, tokens: Sequence[int], entries: Sequence[TokenLogprob | None]
    ) -> list[Entry]:
        """The first of a prompt has none: nothing predicted it."""
        pairs = zip(tokens, entries, strict=False)  # of an aborted prompt fewer are known
        return [self._entry(token, one.logprob if one else None) for token, one in pairs]

    def _tops(self, entry: TokenLogprob | None) -> list[Entry] | None:
        return None if entry is None else [self._entry(*pair) for pair in entry.top]

    def _entry(self, token: int, logprob: float | None) -> Entry:
        text = name_of(self._vocabulary, token) if self._body.return_text_in_logprobs else None
        return None if logprob is None else max(logprob, LOWEST), token, text


def _check(output: RequestOutput) -> None:
    finish = output.finish_reason
    if finish is None or finish.kind != "abort":
        checked(output)


def _speculative(spec: SpecStats) -> Json:
    return {
        "spec_verify_ct": spec.num_rounds,
        "spec_accept_length": round(spec.mean_acceptance_length, 4),
        "spec_accept_rate": round(spec.draft_acceptance_rate, 4),
        "spec_accept_token_num": spec.num_accepted,
        "spec_draft_token_num": spec.num_draft_tokens,
        # What newer releases of SGLang call the same.
        "spec_num_correct_drafts": spec.num_accepted,
        "spec_num_proposed_drafts": spec.num_draft_tokens,
        "spec_correct_drafts_histogram": list(spec.histogram),
    }


def _finish(output: RequestOutput) -> Json | None:
    reason = output.finish_reason
    if reason is None:
        return None
    told: Json = {"type": reason.kind}
    if reason.kind == "length":
        told["length"] = len(output.token_ids)
    if reason.matched is not None:
        told["matched"] = reason.matched
    return told if reason.message is None else told | {"message": reason.message}
