"""How requests want their tokens chosen, on the device, where rounds fly without the host."""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from specengine.core.batch import ForwardBatch, RowBatch
from specengine.core.choice_words import choice_words
from specengine.core.random_streams import Stream
from specengine.core.request import Req
from specengine.core.transfer import sent
from specengine.engine.row_draws import EditedBest
from specengine.engine.row_edits import MOST_EDITING, RowEdits, edits_logits
from specengine.kernels.sample_rows import SHIFT, ChoiceTable, Places, sample_rows


class Choosing(NamedTuple):
    """What a round must be able to do for its requests, beside taking the best token. One that
    edits, masks or tells logprobs can sample as well, so that there are fewer kinds. weighs: the
    verifier decides by more than the tokens that are chosen; for most rules, as somebody does
    sample."""

    samples: bool = False
    edits: bool = False
    logprobs: bool = False
    masks: bool = False
    weighs: bool = False

    @classmethod
    def of(cls, reqs: list[Req], weighs: bool = False, weighs_greedy: bool = False) -> Choosing:
        """weighs: whether rounds do in which somebody samples; weighs_greedy: and the others."""
        edits = any(map(edits_logits, reqs))
        logprobs = any(req.sampling.logprobs is not None for req in reqs)
        masks = any(req.grammar is not None for req in reqs)
        all_greedy = all(req.sampling.is_greedy for req in reqs)
        samples = edits or logprobs or masks or not all_greedy
        return cls(samples, edits, logprobs, masks, weighs_greedy if all_greedy else weighs)


BEST = Choosing()


class RowChoices:
    """Temperature, top-k, top-p, min-p and seed by row of the page table, written when a request
    comes to a row; and edits of logits. The position in the output follows from the length that the
    round goes by."""

    weighs = False  # whether rounds weigh drafts; set before there is a request
    weighs_greedy = False  # likewise, those in which nobody samples

    def __init__(self, num_rows: int, context: int, vocab_size: int, device: torch.device) -> None:
        """context: the most tokens of a request."""
        self.context = context
        self.table = ChoiceTable.of(num_rows, device)
        # Likewise by row: tokens, prompt and output together, at which requests end at the latest.
        self.ends = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.edits = RowEdits(num_rows, vocab_size, device)
        self.vocab_size = vocab_size
        self._owners: list[Req | None] = [None] * num_rows
        self._asked: list[Req] = []  # of whom it was asked last what they choose
        self._told = BEST

    def choosing_of(self, reqs: list[Req]) -> Choosing:
        """`Choosing.of`, once for rounds of the same requests: but for edits, which end with
        min_tokens, nothing of it changes."""
        if self._told.edits or self._asked != reqs:
            told = Choosing.of(reqs, self.weighs, self.weighs_greedy)
            self._asked, self._told = reqs, told
        return self._told

    @property
    def greedy(self) -> Choosing:
        """Of greedy requests that want nothing else."""
        return Choosing(weighs=self.weighs_greedy)

    @property
    def sampled(self) -> Choosing:
        """Of requests that sample, and want nothing else."""
        return Choosing(samples=True, weighs=self.weighs)

    def fits(self, reqs: list[Req]) -> bool:
        """Whether there are tables for all edits."""
        return sum(map(edits_logits, reqs)) <= MOST_EDITING

    def write(self, reqs: list[Req], rows_B: Tensor, choosing: Choosing) -> None:
        """Before the launch of a round of these requests. rows_B: of the page table, on the
        device."""
        if choosing != BEST:
            self._write_words([(row_of(r), r) for r in reqs if self._owners[row_of(r)] is not r])
        if choosing.edits:
            self.edits.write(reqs, rows_B)

    def _write_words(self, new: list[tuple[int, Req]]) -> None:
        if not new:
            return
        words = choice_words([req for _, req in new], self.vocab_size)
        # A round's length leaves out its root, which is the last token.
        words[:, SHIFT] = [1 - len(req.prompt_ids) for _, req in new]
        rows, ends = [row for row, _ in new], [end_of(req, self.context) for _, req in new]
        told = torch.from_numpy(np.column_stack([rows, ends, words]))
        packed = sent(told, self.table.words.device)
        self.ends[packed[:, 0]], self.table.words[packed[:, 0]] = packed[:, 1], packed[:, 2:]
        for row, req in new:
            self._owners[row] = req

    def edited_best(self, rows: RowBatch) -> EditedBest:
        """For the drafts of one round."""
        return EditedBest(self.edits.for_chains(rows), self.vocab_size)

    def tokens(
        self, logits_RV: Tensor, rows: RowBatch, batch: ForwardBatch, in_place: bool = True
    ) -> Tensor:
        """int64 [R], as plain decoding would choose them, from the edited logits of the
        verification `batch`. in_place: these are written over."""
        nodes = len(logits_RV) // len(rows.rows_B)
        depths_R = None if batch.tree is None else batch.tree.depths_T
        places = Places(rows.rows_B, rows.lens_B, nodes, depths_R)
        return sample_rows(logits_RV, self.table, places, int(Stream.SAMPLE), in_place=in_place)

    def count(
        self, rows: RowBatch, tokens_BN: Tensor, accepted_B: Tensor, choosing: Choosing
    ) -> None:
        """The tokens that came of a round, for penalties."""
        if choosing.edits:
            self.edits.count(rows, tokens_BN, accepted_B)


def end_of(req: Req, context: int) -> int:
    """Tokens that a request has at most, as SchedulePolicy.remaining_tokens counts."""
    limit = req.sampling.max_tokens
    return context if limit is None else min(context, len(req.prompt_ids) + limit)


def rows_of(reqs: list[Req]) -> list[int]:
    rows = [req.req_pool_idx for req in reqs]
    assert None not in rows, "a request has no row in the request pool"
    return cast(list[int], rows)


def row_of(req: Req) -> int:
    """Of the page table."""
    assert req.req_pool_idx is not None, f"{req.rid} has no row in the request pool"
    return req.req_pool_idx
