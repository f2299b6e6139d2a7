"""What rounds cost, learned from the rounds themselves."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from specengine.engine.adaptive.cost_table import along

_WINDOW = 31
_SETTLED = 8  # runs
_STALE = 512  # rounds of the same batch size
_CELLS = 4  # a draft of every request


@dataclass
class _Cell:
    window: deque[float]
    last: int  # round


@dataclass
class _Row:
    """Of one bucket of batch sizes."""

    round: int = 0
    curve: dict[int, float] = field(default_factory=dict)  # seconds by cell, ascending
    cells: dict[int, _Cell] = field(default_factory=dict)
    runs: dict[int, list[int]] = field(default_factory=dict)  # by num_steps, the last few rounds


class RunningCosts:
    """Medians over the last rounds, by the drafts that were verified in them and by batch sizes up
    to the next power of two. What was measured long ago, on shorter texts or a busier machine, is
    forgotten as soon as it is measured again, and is not settled until then."""

    is_fixed = False

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}

    def record(self, batch_size: int, num_steps: int, num_drafts: int, seconds: float) -> None:
        """num_drafts: levels drafted over the batch, where num_steps a request were asked for."""
        row = self._rows.setdefault(bucket(batch_size), _Row())
        row.round += 1
        row.runs[num_steps] = [*row.runs.get(num_steps, [])[1 - _SETTLED :], row.round]
        place = round(_CELLS * num_drafts / batch_size)
        cell = row.cells.get(place)
        if cell is None or row.round - cell.last > _STALE:
            cell = row.cells[place] = _Cell(deque(maxlen=_WINDOW), row.round)
        cell.window.append(seconds)
        cell.last = row.round
        is_new = place not in row.curve
        row.curve[place] = median(cell.window)
        if is_new:
            row.curve = dict(sorted(row.curve.items()))

    def of(self, batch_size: int, depth: float) -> float | None:
        """None until rounds of this size have run with drafts and without."""
        row = self._rows.get(bucket(batch_size))
        if row is None or 0 not in row.curve or len(row.curve) < 2:
            return None
        return along(row.curve, _CELLS * depth)

    def is_settled(self, batch_size: int, num_steps: int) -> bool:
        row = self._rows.get(bucket(batch_size))
        runs = [] if row is None else row.runs.get(num_steps, [])
        return row is not None and len(runs) == _SETTLED and row.round - runs[0] <= _STALE


def bucket(batch_size: int) -> int:
    """The next power of two."""
    return 1 << (batch_size - 1).bit_length()
