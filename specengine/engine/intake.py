"""What a request must be to be queued."""

from __future__ import annotations

from dataclasses import replace

from specengine.core.errors import QueueFullError
from specengine.core.grammar import GrammarState
from specengine.core.sampling import SamplingParams
from specengine.engine.grammar.state import LlguidanceState
from specengine.engine.parts import EngineParts
from specengine.engine.tokens import check_token_ids


def check_intake(parts: EngineParts, prompt_ids: list[int], sampling: SamplingParams) -> None:
    """Raises RequestError, or QueueFullError where too many wait."""
    check_token_ids(prompt_ids, sampling, parts.vocab_size)
    queued = parts.scheduler.num_waiting
    if queued + sampling.n > parts.config.schedule.max_queued_requests:
        raise QueueFullError(
            f"{queued} requests are waiting already; retry later, or raise --max-queued-requests"
        )


def within_context(
    parts: EngineParts, prompt_ids: list[int], sampling: SamplingParams
) -> SamplingParams:
    """With as many tokens at most as the context has room for behind the prompt."""
    room = max(parts.context_length - len(prompt_ids), 1)
    limit = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
    least = min(sampling.min_tokens, limit)
    if (limit, least) == (sampling.max_tokens, sampling.min_tokens):
        return sampling
    return replace(sampling, max_tokens=limit, min_tokens=least)


def start_grammar(
    parts: EngineParts, sampling: SamplingParams, compiled: LlguidanceState | None
) -> GrammarState | None:
    """The beginning of a request's grammar. compiled: where it was compiled already."""
    if compiled is not None:
        return compiled.fork()
    return None if sampling.grammar is None else parts.grammars.start(sampling.grammar)
