"""How requests want their tokens chosen and their logits edited, by row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_COLUMNS = 6


TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED, SHIFT = range(NUM_COLUMNS)


@dataclass(frozen=True)
class ChoiceTable:
    """How requests want their tokens chosen, a row a request, one word a parameter.

    words: int64 [S, NUM_COLUMNS]. TEMPERATURE (0 is greedy, and nothing else is read then), TOP_P
    (1 where off) and MIN_P (0 where off) are the bits of a float64. TOP_K: the vocabulary's size
    where off. SHIFT: added to a row's position, so that positions may be counted as is convenient.
    """

    words: Tensor

    @classmethod
    def of(cls, num_slots: int, device: torch.device) -> ChoiceTable:
        return cls(torch.zeros(num_slots, NUM_COLUMNS, dtype=torch.int64, device=device))

    def column(self, index: int) -> Tensor:
        """[S], int64 or float64."""
        words = self.words[:, index]
        return words.view(torch.float64) if index in (TEMPERATURE, TOP_P, MIN_P) else words


@dataclass(frozen=True)
class DrawPlaces:
    """Whose rows they are, and what they decide: as many rows, in a row, for each of B places. Row
    r belongs to slot slots_B[r // nodes], and decides the token at position
    starts_B[r // nodes] + depth + SHIFT of that slot, where depth is depths_R[r], or r % nodes."""

    slots_B: Tensor  # int64
    starts_B: Tensor  # int64
    nodes: int = 1
    depths_R: Tensor | None = None  # int64, contiguous


FREQUENCY, PRESENCE, REPETITION = range(3)


IN_PROMPT, ENDS = 1, 2


@dataclass(frozen=True)
class EditTables:
    """By slot, of which few requests need one; slot 0 edits nothing."""

    slots: Tensor  # int64 [num_rows], of each row of the page table
    penalties: Tensor  # float32 [S, 3], REPETITION 1 where off
    held_until: Tensor  # int64 [S], the position from which tokens may end the request
    bias: Tensor  # float32 [S, V]
    counts: Tensor  # float32 [S, V], of tokens generated, the last one included
    flags: Tensor  # uint8 [S, V], IN_PROMPT and ENDS

    @classmethod
    def of(cls, num_rows: int, num_slots: int, vocab: int, device: torch.device) -> EditTables:
        bias = torch.zeros(num_slots, vocab, device=device)
        return cls(
            slots=torch.zeros(num_rows, dtype=torch.int64, device=device),
            penalties=torch.zeros(num_slots, 3, device=device),
            held_until=torch.zeros(num_slots, dtype=torch.int64, device=device),
            bias=bias,
            counts=torch.zeros_like(bias),
            flags=torch.zeros_like(bias, dtype=torch.uint8),
        )


@dataclass(frozen=True)
class DraftedNodes:
    """N nodes of B requests, whose tokens count for the rows below them. Rows are those of
    each request's last nodes, as many of each: of chains all or the last, of trees as the mask has
    them."""

    rows_B: Tensor  # int64, of the page table
    starts_B: Tensor  # int64, position of the token that rows of depth 0 decide
    tokens_BN: Tensor  # int64, contiguous
    depths_R: Tensor | None = None  # int64, contiguous: from starts_B on; None: chains
    mask_BMN: Tensor | None = None  # bool, contiguous: ancestors and self; None: chains
    has_root: bool = True  # node 0 is the root, and counted by the tables
