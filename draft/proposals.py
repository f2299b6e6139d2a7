"""From drafts of single requests to the proposal of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specengine.core.spec import DraftProposal


@dataclass(slots=True)
class Draft:
    """Nodes of one request: the root first, parents before children.

    parents: None for a chain. confidence: for each node the estimated probability that the path
    down to it is accepted, where the drafter has one.
    """

    tokens: list[int]
    parents: list[int] | None = None
    confidence: list[float] | None = None

    @property
    def num_expected(self) -> float:
        """Accepted tokens to expect, as far as confidence is to be trusted."""
        return sum(self.confidence or [1.0]) - 1.0


def chain_parents(num_nodes: int) -> list[int]:
    return list(range(-1, num_nodes - 1))


def assemble(drafts: Sequence[Draft], is_ranked: bool = False) -> DraftProposal:
    """tokens and parents are int64, confidence float32, on the CPU; tokens are padded with 0.
    confidence is there where every draft has one. is_ranked: nodes are in order of rank."""
    num_nodes = [len(draft.tokens) for draft in drafts]
    width = max(num_nodes)
    is_chain = all(draft.parents is None for draft in drafts)
    parents = None if is_chain else _parents(drafts, width)
    confidences = [draft.confidence for draft in drafts if draft.confidence is not None]
    return DraftProposal(
        tokens=_padded([draft.tokens for draft in drafts], width, np.int64),
        parents=torch.arange(-1, width - 1).expand(len(drafts), -1) if parents is None else parents,
        num_nodes=num_nodes,
        is_chain=is_chain,
        confidence=(
            _padded(confidences, width, np.float32) if len(confidences) == len(drafts) else None
        ),
        ranks=[range(count) for count in num_nodes] if is_ranked else None,
    )


def _parents(drafts: Sequence[Draft], width: int) -> Tensor:
    rows = [
        chain_parents(len(draft.tokens)) if draft.parents is None else draft.parents
        for draft in drafts
    ]
    return _padded(rows, width, np.int64)


def _padded(rows: Sequence[Sequence[Any]], width: int, dtype: Any) -> Tensor:
    """numpy reads nested lists several times faster than torch does."""
    return torch.from_numpy(np.array([[*row, *[0] * (width - len(row))] for row in rows], dtype))
