"""Rounds on the device whose drafts somebody else has made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor

from specengine.core.spec import RowDrafter

if TYPE_CHECKING:
    from specengine.core.batch import RowBatch


@runtime_checkable
class LateRowDrafter(RowDrafter, Protocol):
    """A RowDrafter that knows of a round what it ran to draft it, and not what was said instead."""

    def catch_up_rows(self, rows: RowBatch, tokens_BN: Tensor) -> None:
        """Before observe_rows, of a round in which others drafted: chains for some requests or for
        all; trees for all, or beside chains. It may not have been asked. Run what was said, as far
        as observe_rows does not. tokens_BN: as there."""
        ...
