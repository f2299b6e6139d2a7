"""The logit edits of requests (bias, penalties, min_tokens), in tables on the device."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specengine.core.batch import ForwardBatch
from specengine.core.draft_picks import DraftEdits
from specengine.core.request import Req
from specengine.core.rows import RowBatch
from specengine.core.sampling_batch import ending_tokens, is_held
from specengine.core.transfer import sent
from specengine.kernels.sample.edit_rows import count_tokens_, edit_rows_
from specengine.kernels.sample.types import ENDS, IN_PROMPT, DraftedNodes, EditTables
from specengine.kernels.tree.types import Beams

MAX_EDITING = 64  # requests at once, each of which takes 9 bytes a token of the vocabulary


def edits_logits(req: Req) -> bool:
    sampling = req.sampling
    return bool(sampling.logit_bias) or sampling.has_penalties or is_held(req)


@dataclass(frozen=True)
class RootEdits(DraftEdits):
    """The drafts of a tree, each edited as the round's root is: what was drafted above them does
    not count. The target's rows decide, and matching needs no more."""

    tables: EditTables
    rows: RowBatch

    def apply(self, logits_TV: Tensor, target_ids: Tensor | None) -> Tensor:
        full_TV, width = logits_TV, self.tables.bias.shape[1]
        if target_ids is not None:
            full_TV = logits_TV.new_zeros(len(logits_TV), width)
            full_TV.index_copy_(1, target_ids, logits_TV)
        rows, per_request = self.rows, len(logits_TV) // len(self.rows.rows_B)
        rows_T, starts_T, roots_T = (
            each.repeat_interleave(per_request) if per_request > 1 else each
            for each in (rows.rows_B, rows.lens_B, rows.roots_B)
        )
        edit_rows_(
            full_TV, self.tables, DraftedNodes(rows_T, starts_T, roots_T[:, None].contiguous())
        )
        return full_TV if target_ids is None else full_TV[:, target_ids]


@dataclass(frozen=True)
class NodeEdits(RootEdits):
    """The drafts of a tree, each edited as the target's logits will be there. As in DraftChoice,
    tokens that were drafted above it count, and logits are of the target's vocabulary."""

    levels: list[Tensor] = field(default_factory=list)  # int64 [B, K] each, tokens expanded

    def in_tree(
        self, logits_TV: Tensor, target_ids: Tensor | None, beams: Beams | None
    ) -> tuple[Tensor, None]:
        """In place where there are no target_ids."""
        full_TV = expanded(logits_TV, target_ids, self.tables.bias.shape[1])
        return edit_rows_(full_TV, self.tables, self._above(beams)), None

    def _above(self, beams: Beams | None) -> DraftedNodes:
        rows_B, starts_B = self.rows.rows_B, self.rows.lens_B
        if beams is None:
            return DraftedNodes(rows_B, starts_B, self.rows.roots_B[:, None])
        # A node that does not exist has token -1.
        self.levels.append(beams.tokens_BK.clamp(min=0))
        path = torch.cat(self.levels, dim=1), beams.depths_T, beams.mask_BKN
        return DraftedNodes(rows_B, starts_B + 1, *path, has_root=False)


class ChainEdits:
    """The drafts of a chain, each edited as the target's logits will be there: as in DraftChoice,
    tokens that were drafted above it count."""

    def __init__(self, tables: EditTables, rows: RowBatch) -> None:
        self.tables = tables
        self.rows = rows
        self._above_BN = rows.roots_B[:, None]

    def apply(self, logits_BV: Tensor) -> None:
        """In place, to the next level; of the target's vocabulary."""
        above = DraftedNodes(self.rows.rows_B, self.rows.lens_B, self._above_BN)
        edit_rows_(logits_BV, self.tables, above)

    def advance(self, tokens_B: Tensor) -> None:
        """To the level below these tokens."""
        self._above_BN = torch.cat([self._above_BN, tokens_B[:, None]], dim=1)


def expanded(
    logits_BV: Tensor, target_ids: Tensor | None, vocab_size: int, out_BV: Tensor | None = None
) -> Tensor:
    """Over the target's vocabulary; tokens that the draft does not have get minus infinity. out_BV:
    where the result is written, if given."""
    if target_ids is None:
        return logits_BV if out_BV is None else out_BV.copy_(logits_BV)
    if out_BV is None:
        out_BV = logits_BV.new_empty(len(logits_BV), vocab_size)
    return out_BV.fill_(float("-inf")).index_copy_(1, target_ids, logits_BV)


class LogitEditState:
    """Bias, penalties and min_tokens, in tables that are made when a request first has any. A
    request's slot is filled when it comes, and again where it gained tokens that no round on the
    device has counted. Rounds of the same requests, or of fewer, need no write in between: edits
    end and never begin, and the slot of those that have ended edits nothing."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.num_rows = num_rows
        self.vocab_size = vocab_size
        self.device = device
        self._tables: EditTables | None = None
        self._slots: dict[Req, int] = {}
        self._counted: dict[Req, int] = {}  # output tokens, of requests that have a slot

    @property
    def tables(self) -> EditTables:
        self.prepare()
        assert self._tables is not None
        return self._tables

    def prepare(self) -> None:
        """Make the tables, where there are none yet."""
        if self._tables is None:
            num_slots = 1 + min(MAX_EDITING, self.num_rows)
            self._tables = EditTables.of(self.num_rows, num_slots, self.vocab_size, self.device)

    def write(self, reqs: list[Req], rows_B: Tensor) -> None:
        """Before the launch of a round of these requests. rows_B: of the page table, on the device;
        as many of them edit their logits as there are slots for."""
        editing = {req for req in reqs if edits_logits(req)}
        for req in self._slots.keys() - editing:
            del self._slots[req], self._counted[req]
        free = set(range(1, len(self.tables.penalties))) - set(self._slots.values())
        for req in editing:
            if req not in self._slots:
                self._slots[req] = free.pop()
            if self._counted.get(req) != len(req.output_ids):
                self._fill(self._slots[req], req)
        slots = torch.tensor([self._slots.get(req, 0) for req in reqs])
        self.tables.slots[rows_B] = sent(slots, self.device)

    def forget(self) -> None:
        """A round that was counted may not be committed: fill all slots again."""
        self._counted = dict.fromkeys(self._counted, -1)

    def _fill(self, slot: int, req: Req) -> None:
        tables, sampling = self.tables, req.sampling
        for table in (tables.bias, tables.counts, tables.flags):
            table[slot].zero_()
        numbers = sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty
        tables.penalties[slot] = sent(torch.tensor(numbers), self.device)
        # A round's position leaves out its root, which is the last token.
        held = 0 if req.grammar is not None else sampling.min_tokens  # grammars see to that
        tables.held_until[slot] = held + len(req.prompt_ids) - 1
        tables.flags[slot, self._ids(req.prompt_ids)] = IN_PROMPT
        tables.flags[slot, self._ids(ending_tokens(req, self.vocab_size))] += ENDS
        bias = torch.tensor([*sampling.logit_bias.values()], dtype=torch.float32)
        tables.bias[slot, self._ids([*sampling.logit_bias])] = sent(bias, self.device)
        ids = self._ids(req.output_ids)
        tables.counts[slot].index_put_((ids,), torch.ones_like(ids).float(), accumulate=True)
        self._counted[req] = len(req.output_ids)

    def _ids(self, tokens: list[int]) -> Tensor:
        return sent(torch.tensor(tokens, dtype=torch.int64), self.device)

    def apply(self, logits_RV: Tensor, rows: RowBatch, batch: ForwardBatch) -> Tensor:
        """In place, on the rows of a verification."""
        tokens_BN = batch.input_ids.view(len(rows.rows_B), -1)
        depths, mask = None, None
        if batch.tree is not None:
            depths, mask = batch.tree.depths_T, batch.tree.mask_BNN
        drafted = DraftedNodes(rows.rows_B, rows.lens_B, tokens_BN, depths, mask)
        return edit_rows_(logits_RV, self.tables, drafted)

    def count(self, rows: RowBatch, tokens_BN: Tensor, accepted_B: Tensor) -> None:
        """Count the tokens at each node of the accepted paths."""
        count_tokens_(self.tables, rows.rows_B, tokens_BN, accepted_B)

    def note(self, reqs: list[Req], tokens: list[list[int]]) -> None:
        """Tokens that a collected round has counted."""
        if not self._counted:
            return
        for req, new in zip(reqs, tokens, strict=True):
            if req in self._counted:
                self._counted[req] += len(new)
