"""What follows a prefill forward: first tokens, and logprobs of the prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specengine.core.batch import ScheduleBatch
from specengine.core.interfaces import LogitsOutput
from specengine.core.request import Req, TokenLogprob
from specengine.core.spec import PrefillResult
from specengine.core.transfer import Arriving, sent
from specengine.layers.logits import RowMap
from specengine.layers.logprobs import token_logprobs
from specengine.layers.sampler import Sample, Sampler


@dataclass(frozen=True)
class _Rows:
    """Where the logits of one request lie in the output of a prefill."""

    index: int  # of the request in the batch
    req: Req
    start: int  # first row of logits
    prefix_len: int
    count: int  # rows

    @property
    def last(self) -> int:
        return self.start + self.count - 1

    @property
    def prompt_rows(self) -> range:
        """Rows that predict a prompt token: position p predicts token p + 1."""
        if not _wants_prompt(self.req):
            return range(0)
        predicted = min(self.count, len(self.req.prompt_ids) - 1 - self.prefix_len)
        return range(self.start, self.start + predicted)


def _wants_prompt(req: Req) -> bool:
    return req.sampling.prompt_logprobs is not None and not req.output_ids


def sample_prefill(
    output: LogitsOutput,
    batch: ScheduleBatch,
    meanwhile: Callable[[Tensor], None] | None = None,
    sample: Sample | None = None,
) -> PrefillResult:
    """First tokens of the requests that sample, and logprobs of the prompt tokens that this chunk
    predicts: those after its prefix, plus None for the very first token of a prompt.

    `output` has the rows that batch.get_model_worker_batch() asked for. meanwhile: called with the
    first tokens, int64 [S] on the device, before the host waits for them, if any request samples.
    What it runs may write over `output`: no request may ask for logprobs then. sample: chooses
    tokens; a Sampler where it is missing.
    """
    layout = _layout(batch)
    sampled = [rows for rows in layout if batch.samples[rows.index]]
    tokens: list[int | None] = [None] * batch.batch_size
    logprobs: list[TokenLogprob | None] = [None] * batch.batch_size
    if sampled:
        chosen = _sample_last_rows(output, batch, sampled, sample or Sampler())
        arriving = Arriving(chosen)
        if meanwhile is not None:
            meanwhile(chosen)
        for rows, token in zip(sampled, arriving.read().tolist(), strict=True):
            tokens[rows.index] = token
        _fill_logprobs(logprobs, output.logits, sampled, chosen)
    return PrefillResult(tokens, logprobs, _prompt_logprobs(output.logits, layout))


def _layout(batch: ScheduleBatch) -> list[_Rows]:
    """The same rows, in the same order, as ScheduleBatch selects for the head."""
    layout, start = [], 0
    for i, (req, extend_len) in enumerate(zip(batch.reqs, batch.extend_lens, strict=True)):
        count = extend_len if _wants_prompt(req) else int(batch.samples[i])
        layout.append(_Rows(i, req, start, batch.prefix_lens[i], count))
        start += count
    return layout


def _sample_last_rows(
    output: LogitsOutput, batch: ScheduleBatch, sampled: list[_Rows], sample: Sample
) -> Tensor:
    """int64 [len(sampled)]."""
    device = output.logits.device
    if len(sampled) < len(output.logits):
        last = sent(torch.tensor([rows.last for rows in sampled]), device)
        argmax = output.argmax[last] if output.argmax is not None else None
        output = LogitsOutput(output.logits[last], argmax)
    request = None
    if len(sampled) < batch.batch_size:
        request = sent(torch.tensor([rows.index for rows in sampled]), device)
    return sample(output, batch.sampling, RowMap(request))


def _fill_logprobs(
    logprobs: list[TokenLogprob | None], logits: Tensor, sampled: list[_Rows], chosen: Tensor
) -> None:
    asking = [(i, rows) for i, rows in enumerate(sampled) if rows.req.sampling.logprobs is not None]
    if not asking:
        return
    index = torch.tensor([[i, rows.last] for i, rows in asking], device=logits.device)
    counts = [rows.req.sampling.logprobs or 0 for _, rows in asking]
    found = token_logprobs(logits, index[:, 1], chosen[index[:, 0]], counts)
    for (_, rows), logprob in zip(asking, found, strict=True):
        logprobs[rows.index] = logprob


def _prompt_logprobs(logits: Tensor, layout: list[_Rows]) -> list[list[TokenLogprob | None]]:
    """[B], the prompt tokens after each request's prefix, preceded by None where there is none."""
    wanted = [row for rows in layout for row in rows.prompt_rows]
    tokens: list[int] = []
    counts: list[int] = []
    for rows in layout:
        start, size = rows.prefix_len + 1, len(rows.prompt_rows)
        tokens += rows.req.prompt_ids[start : start + size]
        counts += [rows.req.sampling.prompt_logprobs or 0] * size
    index = torch.tensor([wanted, tokens], dtype=torch.int64, device=logits.device)
    found = iter(token_logprobs(logits, index[0], index[1], counts))
    return [_first_none(rows) + [next(found) for _ in rows.prompt_rows] for rows in layout]


def _first_none(rows: _Rows) -> list[TokenLogprob | None]:
    """No row predicts the first token of a prompt."""
    return [None] if _wants_prompt(rows.req) and rows.prefix_len == 0 else []
