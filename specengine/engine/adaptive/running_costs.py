"""What rounds cost, learned from the rounds themselves."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median_low

from specengine.engine.adaptive.cost_table import Curve, StepCosts, along

_WINDOW = 31
_SETTLED = 8  # runs
_STALE = 512  # rounds of the same batch size
_CELLS = 4  # a draft of every request


@dataclass
class _Cell:
    window: deque[float]
    last: int  # round


@dataclass
class _Curve:
    seconds: dict[int, float] = field(default_factory=dict)  # by cell, ascending
    cells: dict[int, _Cell] = field(default_factory=dict)

    def record(self, place: int, seconds: float, now: int) -> None:
        cell = self.cells.get(place)
        if cell is None or now - cell.last > _STALE:
            cell = self.cells[place] = _Cell(deque(maxlen=_WINDOW), now)
        cell.window.append(seconds)
        cell.last = now
        is_new = place not in self.seconds
        self.seconds[place] = median_low(cell.window)
        if is_new:
            self.seconds = dict(sorted(self.seconds.items()))


@dataclass
class _Row:
    """Of one bucket of batch sizes."""

    round: int = 0
    is_given: bool = False  # rounds of an earlier engine have taught it
    curves: dict[int | None, _Curve] = field(default_factory=dict)  # by num_nodes
    # by num_steps and num_nodes, the last few rounds
    runs: dict[tuple[int, int | None], list[int]] = field(default_factory=dict)


class RunningCosts:
    """Medians over the last rounds (the lower one of an even number, so that of two rounds a slow
    one does not count), by the drafts that were verified in them, by batch sizes up to the next
    power of two, and by the nodes that trees were cut to. What was measured long ago, on shorter
    texts or a busier machine, is forgotten as soon as it is measured again, and is not settled
    until then."""

    is_fixed = False

    def __init__(self, device: StepCosts | None = None) -> None:
        """device: what rounds take there, which is all that is known of sizes until they run."""
        self._rows: dict[int, _Row] = {}
        self._device = device

    def record(
        self,
        batch_size: int,
        num_steps: int,
        num_drafts: int,
        seconds: float,
        num_nodes: int | None = None,
    ) -> None:
        """num_drafts: levels drafted over the batch, where num_steps a request were asked for."""
        row = self._rows.setdefault(bucket(batch_size), _Row())
        row.round += 1
        runs = row.runs.get((num_steps, num_nodes), [])
        row.runs[num_steps, num_nodes] = [*runs[1 - _SETTLED :], row.round]
        place = round(_CELLS * num_drafts / batch_size)
        curve = row.curves.setdefault(num_nodes if place else None, _Curve())
        curve.record(place, seconds, row.round)

    def of(self, batch_size: int, depth: float, num_nodes: int | None = None) -> float | None:
        """None until rounds of this size have run with such drafts and without, unless what the
        device takes is known."""
        learned = self._learned(batch_size, depth, num_nodes)
        if learned is None and self._device is not None:
            return self._device.of(batch_size, depth, num_nodes)
        return learned

    def _learned(self, batch_size: int, depth: float, num_nodes: int | None) -> float | None:
        row = self._rows.get(bucket(batch_size))
        if row is None or None not in row.curves or num_nodes not in row.curves:
            return None
        seconds = row.curves[None].seconds
        if 0 not in seconds:
            return None
        if num_nodes is not None:
            seconds = {0: seconds[0], **row.curves[num_nodes].seconds}
        return along(seconds, _CELLS * depth) if len(seconds) > 1 else None

    def is_given(self, batch_size: int) -> bool:
        """Whether costs of this size were there from the start."""
        row = self._rows.get(bucket(batch_size))
        return row is not None and row.is_given

    def start_from(self, table: StepCosts) -> None:
        """One measurement each, that others come beside; nothing is settled."""
        for num_nodes, curves in ((None, table.seconds), *table.smaller_trees.items()):
            for size, curve in curves.items():
                row = self._rows.setdefault(bucket(size), _Row())
                row.is_given = True
                for depth, seconds in curve.items():
                    place = row.curves.setdefault(num_nodes if depth else None, _Curve())
                    place.record(_CELLS * depth, seconds, row.round)

    def table(self) -> StepCosts | None:
        """What is known of batch sizes that have run for a while, at whole depths up to what was
        drafted; None where that is nothing."""
        whole: dict[int, Curve] = {}
        smaller: dict[int, dict[int, Curve]] = {}
        for size, row in self._rows.items():
            if not row.is_given and row.round < _SETTLED:
                continue
            for num_nodes, curve in row.curves.items():
                deepest = math.ceil(max(curve.seconds) / _CELLS)
                depths = range(0 if num_nodes is None else 1, deepest + 1)
                costs = {depth: self._learned(size, depth, num_nodes) for depth in depths}
                known = {depth: cost for depth, cost in costs.items() if cost is not None}
                if known:
                    home = whole if num_nodes is None else smaller.setdefault(num_nodes, {})
                    home[size] = known
        return StepCosts(whole, smaller) if whole else None

    def is_settled(self, batch_size: int, num_steps: int, num_nodes: int | None = None) -> bool:
        row = self._rows.get(bucket(batch_size))
        runs = [] if row is None else row.runs.get((num_steps, num_nodes), [])
        return row is not None and len(runs) == _SETTLED and row.round - runs[0] <= _STALE


def bucket(batch_size: int) -> int:
    """The next power of two."""
    return 1 << (batch_size - 1).bit_length()
