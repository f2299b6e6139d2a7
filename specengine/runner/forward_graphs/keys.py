"""Which batches share a graph: a graph's key holds its sizes, padding included.

Graphs exist for few sizes. Padding requests use row 0 of the page table: they write to KV slot 0,
which no request owns, and attend to nothing but themselves.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from specengine.core.batch import ForwardMode, ModelWorkerBatch
from specengine.runner import fallbacks

MAX_TOKENS = 1024  # of a verification; a larger one takes the device longer than its launches
MAX_REQUESTS = 8  # of a prefill of prompts of any length
LARGE_MAX_REQUESTS = 64  # of a large prefill batch, whose prompts have at most LARGE_MAX_WIDTH
LARGE_MAX_WIDTH = 256  # tokens each

Logits = Literal["every", "none", "chosen"]


class PrefillKey(NamedTuple):
    """Prefills of the target that one graph serves: tokens in all, requests at most, and tokens of
    one request at most. One more request holds the padding tokens, `padding` at most (None: as
    many as one request)."""

    tokens: int
    requests: int
    width: int
    padding: int | None = None

    def __str__(self) -> str:
        return f"{self.tokens} tokens x {self.requests} requests"

    def fits(self, batch: ModelWorkerBatch) -> bool:
        return (
            0 <= self.tokens - batch.num_tokens <= self._most_padding
            and batch.batch_size <= self.requests
            and max(batch.extend_lens) <= self.width
            and len(batch.logits_rows or ()) <= self.requests
        )

    @property
    def _most_padding(self) -> int:
        return self.width if self.padding is None else self.padding


# The launches of 30 layers of a small model take the host 12 ms, the layers themselves 2 ms: so
# prefills of many prompts run in graphs too, those of still more in parts. Attention has blocks for
# every request at its longest: hence the width, which bounds the padding request as well.
SMALL_PREFILLS = tuple(PrefillKey(n, MAX_REQUESTS, n) for n in (16, 32, 64, 128, 256, 512))
LARGE_PREFILLS = tuple(
    PrefillKey(n, LARGE_MAX_REQUESTS, LARGE_MAX_WIDTH)
    for n in range(LARGE_MAX_WIDTH, 2049, LARGE_MAX_WIDTH)
)
# Of long prompts, for models that launches bound so far (splits.most_padding). Captured late.
WIDE_PREFILLS = tuple(PrefillKey(n, MAX_REQUESTS, n) for n in (768, 1024, 1536, 2048, 3072, 4096))
PREFILL_KEYS = (*SMALL_PREFILLS, *LARGE_PREFILLS, *WIDE_PREFILLS)


class ForwardKey(NamedTuple):
    """Forwards over a few tokens of each request that one graph serves."""

    mode: ForwardMode
    num_requests: int
    num_tokens: int
    width: int  # tokens of one request at most
    num_past: int | None  # of trees; None for chains
    logits: Logits  # of which rows; "chosen" are num_requests rows


@dataclass(frozen=True)
class GraphSizes:
    """The sizes of ragged graphs.

    batch_sizes: ascending. widths: ascending, tokens of a request that launches are shaped for.
    padding: let larger graphs serve a batch. prefills: ascending, tokens of forwards in which a
    request has more than the widths; few, since each is captured while a request waits.
    large_prefills: the same for more requests than MAX_REQUESTS, or more tokens.
    """

    batch_sizes: tuple[int, ...]
    widths: tuple[int, ...]
    padding: bool = True
    prefills: tuple[int, ...] = ()
    large_prefills: tuple[int, ...] = ()

    def key_of(self, batch: ModelWorkerBatch) -> ForwardKey | str:
        """The key of a batch, or the fallback reason."""
        widest = max(batch.extend_lens, default=0)
        prefill = self._prefill_key(batch) if widest > self.widths[-1] else None
        if prefill is not None:
            return prefill
        if widest > self.widths[-1] or batch.num_tokens > MAX_TOKENS:
            return fallbacks.TOO_MANY_TOKENS
        reason = why_no_size(self.batch_sizes, self.padding, batch.batch_size)
        if reason is not None:
            return reason
        width = at_least(self.widths, widest)
        if self.padding:
            requests, tokens = self._padded(batch.batch_size, batch.num_tokens, width)
        elif batch.num_tokens < batch.batch_size * width:
            return fallbacks.RAGGED
        else:
            requests, tokens = batch.batch_size, batch.num_tokens
        num_past = None if batch.tree is None else batch.tree.num_past
        return ForwardKey(batch.forward_mode, requests, tokens, width, num_past, _logits_of(batch))

    def prefill_keys(self) -> list[ForwardKey]:
        """The keys of forwards in which a drafter reads whole prompts, without logits."""
        if not self.padding:
            return []
        mode = ForwardMode.DRAFT_EXTEND
        small = (_small_prefill(size, mode, "none") for size in self.prefills)
        return [*small, *(_large_prefill(size, mode, "none") for size in self.large_prefills)]

    def split_limits(self, batch: ModelWorkerBatch) -> tuple[int, int] | None:
        """Most tokens and requests of a part, for prefills that no graph holds at once; None for
        any other batch."""
        widest, most = max(batch.extend_lens, default=0), max(self.large_prefills, default=0)
        if not self.padding or not self.widths[-1] < widest <= LARGE_MAX_WIDTH <= most:
            return None
        if batch.batch_size <= LARGE_MAX_REQUESTS and batch.num_tokens <= most:
            return None
        if batch.tree is not None or batch.logits_rows is None:
            return None
        return most, LARGE_MAX_REQUESTS

    def _prefill_key(self, batch: ModelWorkerBatch) -> ForwardKey | None:
        count, requests = batch.num_tokens, batch.batch_size
        if not self.padding:
            return None
        if requests <= MAX_REQUESTS and count <= max(self.prefills, default=0):
            size = at_least(self.prefills, count)
            return _small_prefill(size, batch.forward_mode, _logits_of(batch))
        too_wide = max(batch.extend_lens) > LARGE_MAX_WIDTH
        if requests > LARGE_MAX_REQUESTS or too_wide or count > max(self.large_prefills, default=0):
            return None
        size = at_least(self.large_prefills, count)
        return _large_prefill(size, batch.forward_mode, _logits_of(batch))

    def _padded(self, requests: int, tokens: int, width: int) -> tuple[int, int]:
        if width == 1:
            size = at_least(self.batch_sizes, requests)
            return size, size
        steps = ladder(MAX_TOKENS)
        index = bisect.bisect_left(steps, tokens)
        most_missing = steps[index] - steps[index - 1] - 1 if index else 0
        size = at_least(octaves(self.batch_sizes), requests)
        return size + -(-most_missing // width), steps[index]


def _small_prefill(size: int, mode: ForwardMode, logits: Logits) -> ForwardKey:
    return ForwardKey(mode, MAX_REQUESTS + 1, size, size, None, logits)


def _large_prefill(size: int, mode: ForwardMode, logits: Logits) -> ForwardKey:
    requests = LARGE_MAX_REQUESTS + -(-size // LARGE_MAX_WIDTH)
    return ForwardKey(mode, requests, size, LARGE_MAX_WIDTH, None, logits)


def _logits_of(batch: ModelWorkerBatch) -> Logits:
    rows = batch.logits_rows
    return "every" if rows is None else "chosen" if rows else "none"


def ladder(limit: int) -> list[int]:
    """1, 2, 4, ... 64, 96, 128, 192, ... `limit` tokens: few sizes where one more token costs
    nothing, and at most a third of padding where it does."""
    steps = [1]
    while steps[-1] < limit:
        between = [steps[-1] * 3 // 2] if steps[-1] >= 64 else []
        steps += [*between, steps[-1] * 2]
    return [*(step for step in steps if step < limit), limit]


def octaves(sizes: Sequence[int]) -> list[int]:
    """The least and the largest of ascending sizes, and between them as few as leave no gap of more
    than a factor of two: a padding request without tokens costs only blocks that end at once."""
    kept = [sizes[0]]
    for size, following in pairwise([*sizes[1:], sizes[-1] * 4]):
        if following > 2 * kept[-1] and size > kept[-1]:
            kept.append(size)
    return kept


def why_no_size(batch_sizes: Sequence[int], padding: bool, wanted: int) -> str | None:
    """A fallback reason; None where a graph of one of these sizes, ascending, serves so many
    requests. padding: a larger one does."""
    if wanted > batch_sizes[-1]:
        return fallbacks.BATCH_TOO_LARGE
    return None if padding or wanted in batch_sizes else fallbacks.SIZE_NOT_CAPTURED


def at_least(sizes: Sequence[int], wanted: int) -> int:
    """The least of ascending sizes that is not below `wanted`."""
    return sizes[bisect.bisect_left(sizes, wanted)]
