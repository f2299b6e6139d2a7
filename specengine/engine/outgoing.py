"""What is handed to the callers of requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from specengine.core.request import FinishReason, Req
from specengine.core.sampling import SamplingParams
from specengine.engine.detokenizer import Detokenizer
from specengine.engine.outputs import RequestOutput, RequestTimes

if TYPE_CHECKING:
    from specengine.engine.pooler import Pooler  # it loads PyTorch, which front ends do without

ENDED_BY_OPERATOR = "the server's operator ended the request"


def request_id(label: str, job: str, prompt: int) -> str:
    """The id of one prompt's request. label: what the client calls it, which need not be unique;
    job: unique, without ":" and "-"."""
    return f"{label}:{job}-{prompt}"


def owner_of(rid: str) -> str:
    """The job of a request_id; "" for other ids."""
    label, _, rest = rid.rpartition(":")
    return rest.rpartition("-")[0] if label or rid.startswith(":") else ""


def is_named(rid: str, names: Sequence[str]) -> bool:
    """Whether one of `names` is the label or the job of a request_id, either followed by "_" and
    the prompt's number, or all of it."""
    label, _, rest = rid.rpartition(":")
    job, _, prompt = rest.rpartition("-")
    return bool({label, job, f"{label}_{prompt}", f"{job}_{prompt}", rid} & set(names))


@dataclass(eq=False)
class Choice:
    """One request on its way out: what has been handed to the caller so far."""

    req: Req
    rid: str  # the caller's; choices of one n > 1 request share it
    index: int
    tokenizer: Any
    streams: bool  # hands tokens out as they come
    pooler: Pooler | None = None  # makes the vector that is wanted of its prompt
    num_sent: int = 0

    @cached_property
    def detokenizer(self) -> Detokenizer:
        """Used where the text is made in this process."""
        return Detokenizer(self.tokenizer, self.req.sampling)

    @property
    def embedding(self) -> list[float] | None:
        """The vector of the prompt, where it was asked for and is known."""
        return self.pooler.vector() if self.pooler and self.req.output_ids else None

    @property
    def times(self) -> RequestTimes:
        req = self.req
        return RequestTimes(
            req.arrival_time, req.first_token_time, req.finish_time, req.admitted_time
        )

    def take_output(self) -> RequestOutput:
        """What came since the last call."""
        req, start = self.req, self.num_sent
        new, self.num_sent = req.output_ids[start:], len(req.output_ids)
        delta = self.detokenizer.add(new, req.finish_reason)
        return RequestOutput(
            rid=self.rid,
            index=self.index,
            new_token_ids=new,
            token_ids=req.output_ids,
            text_delta=delta,
            text=self.detokenizer.text,
            finish_reason=req.finish_reason,
            logprobs=req.logprobs[start:],
            all_logprobs=req.logprobs,
            prompt_logprobs=req.prompt_logprobs,
            num_prompt_tokens=len(req.prompt_ids),
            num_cached_tokens=req.prefix_hit_len,
            spec=req.spec,
            embedding=self.embedding,
            times=self.times,
        )


def given_up(
    rid: str, prompt_ids: list[int], sampling: SamplingParams, tokenizer: Any
) -> list[Choice]:
    """The n choices of a request that an operator ended before it was queued."""
    choices = []
    for index in range(sampling.n):
        req = Req(f"{rid}#{index}", prompt_ids, sampling)
        req.finish_reason = FinishReason("abort", message=ENDED_BY_OPERATOR)
        choices.append(Choice(req, rid, index, tokenizer, streams=False))
    return choices
