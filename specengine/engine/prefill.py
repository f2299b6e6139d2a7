"""What follows the forward of a prompt: its first token, and what its drafter reads."""

from __future__ import annotations

from functools import partial

from specengine.core.batch import ScheduleBatch
from specengine.core.interfaces import LogitsOutput
from specengine.engine.grammar.masks import masked_prefill
from specengine.engine.parts import BeginAsync, EngineParts


def take_prefill(parts: EngineParts, batch: ScheduleBatch, output: LogitsOutput) -> None:
    """Sample, let the drafter read the prompt, and commit."""
    begin_async = async_begin(parts, batch, output)
    result = parts.sample_prefill(output, masked_prefill(batch), begin_async)
    if begin_async is None:
        parts.drafter.begin(batch, output, result)
    parts.scheduler.commit_prefill(batch, result)


def async_begin(
    parts: EngineParts, batch: ScheduleBatch, output: LogitsOutput
) -> BeginAsync | None:
    """For a drafter that can take first tokens from the device, where the host needs nothing else
    of the output."""
    params = [req.sampling for req in batch.reqs]
    tells = any(one.logprobs is not None or one.prompt_logprobs is not None for one in params)
    if not parts.drafter.begins_async or tells or not any(batch.samples):
        return None
    return partial(parts.drafter.begin_async, batch, output)
