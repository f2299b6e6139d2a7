"""What a request must be to be queued."""

from __future__ import annotations

from specengine.core.errors import QueueFullError
from specengine.core.sampling import SamplingParams
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
