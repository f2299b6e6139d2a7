"""Which graph serves a forward over a few tokens of each request, and what it takes from the host.

Graphs exist for few sizes. What is missing to a size is filled with requests of nobody's, which
have row 0 of the page table: they write to slot 0 and see nothing but themselves.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specengine.core.batch import ForwardMode, ModelWorkerBatch
from specengine.core.columns import columns_size, joined_columns, parted_columns

MAX_TOKENS = 1024  # beyond, a forward takes longer than its launches
MOST_PROMPTS = 8  # requests of a forward over prompts
CROWD = 64  # likewise, of prompts of at most CROWD_WIDTH tokens
CROWD_WIDTH = 256

Ints = NDArray[np.int64]
Logits = Literal["every", "none", "chosen"]


@dataclass(frozen=True)
class Form:
    """What forwards have in common that one graph serves. Sizes include the filling."""

    mode: ForwardMode
    num_requests: int
    num_tokens: int
    width: int  # tokens of a request at most
    num_past: int | None  # of trees; None is chains
    logits: Logits  # of which rows; chosen ones are num_requests


@dataclass(frozen=True)
class Sizes:
    """The sizes of graphs.

    batch_sizes: ascending. widths: ascending, tokens of a request that launches are shaped for.
    padding: let larger graphs serve a batch. prompts: ascending, tokens of forwards in which a
    request has more; few, since each is captured while somebody waits for an answer. crowds:
    likewise, of more requests than MOST_PROMPTS, or more tokens.
    """

    batch_sizes: tuple[int, ...]
    widths: tuple[int, ...]
    padding: bool = True
    prompts: tuple[int, ...] = ()
    crowds: tuple[int, ...] = ()

    def form_of(self, batch: ModelWorkerBatch) -> Form | str:
        """The form of a batch, or why it has none."""
        widest = max(batch.extend_lens, default=0)
        prompts = self._form_of_prompts(batch) if widest > self.widths[-1] else None
        if prompts is not None:
            return prompts
        if widest > self.widths[-1] or batch.num_tokens > MAX_TOKENS:
            return "more tokens than any captured"
        if batch.batch_size > self.batch_sizes[-1]:
            return "batch larger than any captured"
        width = _at_least(self.widths, widest)
        if self.padding:
            requests, tokens = self._padded(batch.batch_size, batch.num_tokens, width)
        elif batch.batch_size not in self.batch_sizes:
            return "batch size not captured, padding off"
        elif batch.num_tokens < batch.batch_size * width:
            return "ragged, padding off"
        else:
            requests, tokens = batch.batch_size, batch.num_tokens
        return Form(
            mode=batch.forward_mode,
            num_requests=requests,
            num_tokens=tokens,
            width=width,
            num_past=None if batch.tree is None else batch.tree.num_past,
            logits=_logits(batch),
        )

    def _form_of_prompts(self, batch: ModelWorkerBatch) -> Form | None:
        """Of few enough tokens and requests, if any. What is missing are requests of nobody's."""
        count, requests = batch.num_tokens, batch.batch_size
        if not self.padding:
            return None
        given = batch.forward_mode, _logits(batch)
        if requests <= MOST_PROMPTS and count <= max(self.prompts, default=0):
            return _of_few_prompts(_at_least(self.prompts, count), *given)
        widest = max(batch.extend_lens)
        if requests > CROWD or widest > CROWD_WIDTH or count > max(self.crowds, default=0):
            return None
        return _of_a_crowd(_at_least(self.crowds, count), *given)

    def forms_of_prompts(self) -> list[Form]:
        """Those in which a drafter reads whole prompts, whose logits nobody wants."""
        if not self.padding:
            return []
        mode = ForwardMode.DRAFT_EXTEND
        few = (_of_few_prompts(size, mode, "none") for size in self.prompts)
        return [*few, *(_of_a_crowd(size, mode, "none") for size in self.crowds)]

    def limits_of_parts(self, batch: ModelWorkerBatch) -> tuple[int, int] | None:
        """Tokens and requests that prompts are cut to which no graph holds at once; None of any
        other batch."""
        widest, most = max(batch.extend_lens, default=0), max(self.crowds, default=0)
        is_crowd = batch.batch_size > CROWD or batch.num_tokens > most
        if not self.padding or not self.widths[-1] < widest <= CROWD_WIDTH <= most or not is_crowd:
            return None
        return None if batch.tree is not None or batch.logits_rows is None else (most, CROWD)

    def _padded(self, requests: int, tokens: int, width: int) -> tuple[int, int]:
        if width == 1:
            size = _at_least(self.batch_sizes, requests)
            return size, size
        steps = ladder(MAX_TOKENS)
        place = bisect.bisect_left(steps, tokens)
        most_missing = steps[place] - steps[place - 1] - 1 if place else 0
        size = _at_least(octaves(self.batch_sizes), requests)
        return size + -(-most_missing // width), steps[place]


def _of_few_prompts(size: int, mode: ForwardMode, logits: Logits) -> Form:
    return Form(mode, MOST_PROMPTS + 1, size, size, None, logits)


def _of_a_crowd(size: int, mode: ForwardMode, logits: Logits) -> Form:
    spare = -(-size // CROWD_WIDTH)
    return Form(mode, CROWD + spare, size, CROWD_WIDTH, None, logits)


@dataclass(frozen=True)
class Inputs:
    """Views of one buffer of integers, which crosses in one copy. N requests, T tokens."""

    rows_N: Tensor  # of the page table
    prefix_lens_N: Tensor
    extend_lens_N: Tensor
    seq_lens_N: Tensor
    logits_rows_N: Tensor
    qo_indptr: Tensor  # [N + 1]
    row_T: Tensor  # of the page table
    place_T: Tensor  # where its KV goes
    base_T: Tensor  # position of its tree's node of depth 0
    token_T: Tensor
    depth_T: Tensor

    @classmethod
    def of(cls, buffer: Tensor, form: Form) -> Inputs:
        return cls(*parted_columns(buffer, _sizes(form)))


def _logits(batch: ModelWorkerBatch) -> Logits:
    rows = batch.logits_rows
    return "every" if rows is None else "chosen" if rows else "none"


def num_inputs(form: Form) -> int:
    return columns_size(_sizes(form))


def _sizes(form: Form) -> list[int]:
    return [form.num_requests] * 5 + [form.num_requests + 1] + [form.num_tokens] * 5


def pack(batch: ModelWorkerBatch, tokens: Tensor, form: Form) -> Ints:
    """int64 in the order of Inputs. Tokens and depths that lie on a device are left out."""
    spare, past = form.num_tokens - batch.num_tokens, form.num_past or 0
    filling = [min(form.width, spare - done) for done in range(0, spare, form.width)]
    others = form.num_requests - batch.batch_size
    counts = _ints([*batch.extend_lens, *filling, *[0] * (others - len(filling))])
    rows = _ints([*batch.req_pool_indices, *[0] * others])
    prefix = _ints([*batch.prefix_lens, *[past] * others])
    indptr = np.concatenate(([0], counts.cumsum()))
    first_T, row_T = prefix.repeat(counts), rows.repeat(counts)
    place_T = first_T + np.arange(form.num_tokens) - indptr[:-1].repeat(counts)
    chosen = _padded(batch.logits_rows or [], form.num_requests)
    depths = [] if batch.tree is None else _on_host(batch.tree.depths_T)
    columns = [
        *(rows, prefix, counts, prefix + counts, chosen, indptr, row_T, place_T, first_T - past),
        _padded(_on_host(tokens), form.num_tokens),
        _padded(depths, form.num_tokens),
    ]
    return joined_columns(columns)


def _ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int64)


def _on_host(values: Tensor) -> Any:
    return values.numpy() if values.device.type == "cpu" else []


def _padded(values: Any, count: int) -> Ints:
    out = np.zeros(count, dtype=np.int64)
    out[: len(values)] = values
    return out


def ladder(limit: int) -> list[int]:
    """1, 2, 4, ... 64, 96, 128, 192, ... `limit` tokens: few sizes where one more costs nothing,
    and at most a third of filling where it does."""
    steps = [1]
    while steps[-1] < limit:
        between = [steps[-1] * 3 // 2] if steps[-1] >= 64 else []
        steps += [*between, steps[-1] * 2]
    return [*(step for step in steps if step < limit), limit]


def octaves(sizes: Sequence[int]) -> list[int]:
    """The least and the largest of ascending sizes, and between them as few as leave no gap of more
    than twice: requests that are not there cost nothing but blocks that end at once."""
    kept = [sizes[0]]
    for size, following in pairwise([*sizes[1:], sizes[-1] * 4]):
        if following > 2 * kept[-1] and size > kept[-1]:
            kept.append(size)
    return kept


def _at_least(sizes: Sequence[int], wanted: int) -> int:
    return sizes[bisect.bisect_left(sizes, wanted)]
