"""Limits that the scheduler works within."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specengine.core.request import Req, ReqState


@dataclass(frozen=True, kw_only=True)
class SchedulePolicy:
    """context_len: tokens of a request, prompt and output together. max_nodes: the most a round
    verifies for one request, root included; 1 without speculation. draft_slots: KV slots that a
    drafter fills beyond a request's tokens. chunked_prefill_size: prompt tokens a forward; -1 never
    splits."""

    context_len: int
    max_running_requests: int
    chunked_prefill_size: int
    max_nodes: int = 1
    draft_slots: int = 0
    enable_mixed_chunk: bool = False

    @property
    def round_slots(self) -> int:
        """KV slots that a round can write for one request: verification and drafting take turns
        in the same ones."""
        return max(self.max_nodes, self.draft_slots)

    def going_on(self, reqs: Iterable[Req]) -> list[Req]:
        """Those that have not ended, and have more than one token left to emit: `remaining_tokens`,
        without a call for each of hundreds of requests between two rounds."""
        context = self.context_len
        return [
            req
            for req in reqs
            if req.state is not ReqState.FINISHED
            and (count := len(req.output_ids) + 1) + len(req.prompt_ids) < context
            and ((limit := req.sampling.max_tokens) is None or count < limit)
        ]

    def left_after(self, reqs: Iterable[Req], said: Iterable[Sequence[int]]) -> list[int]:
        """`remaining_tokens` of each once it has emitted so many more, without a call of each."""
        context, left = self.context_len, []
        for req, new in zip(reqs, said, strict=True):
            room, limit = context - len(req.prompt_ids), req.sampling.max_tokens
            most = room if limit is None or limit > room else limit
            left.append(most - len(req.output_ids) - len(new))
        return left

    def remaining_tokens(self, req: Req) -> int:
        """Tokens that the request may still emit."""
        room = self.context_len - req.seq_len
        if req.sampling.max_tokens is None:
            return room
        return min(room, req.sampling.max_tokens - len(req.output_ids))
