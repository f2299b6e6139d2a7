"""What a paused drafter has missed."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.core.transfer import sent
from specengine.engine.round.source import Source


class StaleRows:
    """Rows of the page table whose rounds a paused drafter has not observed."""

    def __init__(self, source: Source, lens: Tensor) -> None:
        """lens: int64, of RoundState."""
        self.source = source
        self.lens = lens
        self._rows: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, rows: list[int]) -> None:
        self._rows.update(rows)

    def forget(self, rows: list[int]) -> bool:
        """The drafter reads them anew. Returns whether any of them was stale."""
        found = self._rows.intersection(rows)
        self._rows -= found
        return bool(found)

    def tell(self) -> None:
        """Before the drafter observes again: where its states are old."""
        if self._rows:
            rows = sent(torch.tensor([*self._rows]), self.lens.device)
            self.source.mark_stale(rows, self.lens[rows])
            self._rows.clear()
