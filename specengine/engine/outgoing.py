"""What is handed to the callers of requests."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from specengine.core.request import Req
from specengine.engine.detokenizer import Detokenizer
from specengine.engine.outputs import RequestOutput, RequestTimes


@dataclass(eq=False)
class Choice:
    """One request on its way out: what has been handed to the caller so far."""

    req: Req
    rid: str  # the caller's; choices of one n > 1 request share it
    index: int
    tokenizer: Any
    streams: bool  # hands tokens out as they come
    num_sent: int = 0

    @cached_property
    def detokenizer(self) -> Detokenizer:
        """Used where the text is made in this process."""
        return Detokenizer(self.tokenizer, self.req.sampling)

    @property
    def times(self) -> RequestTimes:
        req = self.req
        return RequestTimes(
            req.arrival_time, req.first_token_time, req.finish_time, req.admitted_time
        )

    def take_tokens(self) -> list[int]:
        """Those since the last call."""
        output_ids, start = self.req.output_ids, self.num_sent
        self.num_sent = len(output_ids)
        return output_ids[start:]

    def take_output(self) -> RequestOutput:
        req, start = self.req, self.num_sent
        new = self.take_tokens()
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
            times=self.times,
        )
