"""Seconds of a round, by batch size and by what is drafted: measured beforehand or learned."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median_low

from specengine.core.spec_stats import DraftShape

Curve = dict[int, float]  # seconds by num_steps, or by another ascending number

_SAME_CONTEXT = 0.1  # relative; context lengths that differ less cost alike
# Tokens. What a shorter context adds is less than a table's error, and the same for all depths:
# counting it made K = 2 look better than K = 1 where it was not (adaptive-sweep).
_SHORT_CONTEXT = 512.0
_WINDOW = 31  # rounds of which the median counts
_RELIABLE = 8  # runs of a shape after which its cost is reliable
_STALE = 512  # rounds of the same batch size after which a cost must be measured again
_CELLS = 4  # that learned costs have for each level drafted by all requests

_NONE: Mapping[int, Mapping[int, Curve]] = {}


PLAIN = DraftShape(0)


@dataclass(frozen=True)
class ContextCost:
    """Seconds that a round takes longer where each request has a context of so many tokens, by
    batch size and num_steps. Attention reads all of the context, so they grow in proportion."""

    tokens: int
    seconds: dict[int, Curve]

    def __post_init__(self) -> None:
        curves = self.seconds.values()
        values = [value for curve in curves for value in curve.values()]
        if self.tokens < 1 or not values or not all(map(len, curves)):
            raise ValueError("context cost: needs tokens, and seconds by batch size and num_steps")
        if not all(math.isfinite(value) and value >= 0 for value in values):
            raise ValueError("context cost: seconds must be 0 or more")

    def of(self, batch_size: int, depth: float) -> float:
        """Seconds for each token of context length."""
        near = _around(self.seconds, batch_size)
        whole = along({size: along(self.seconds[size], depth) for size in near}, batch_size)
        return whole / self.tokens


class Costs(ABC):
    """Seconds of a round. What is not overridden is so for costs that rounds do not change."""

    is_fixed: bool  # rounds that run do not change them

    @abstractmethod
    def of(self, batch_size: int, depth: float, num_nodes: int | None = None) -> float | None:
        """Seconds of a round. depth: num_steps, or its mean where requests draft differently.
        num_nodes: as in DraftShape. None where they are not known."""

    @abstractmethod
    def is_reliable(self, batch_size: int, shape: DraftShape) -> bool:
        """Whether the cost is known well enough to act on."""

    def is_given(self, batch_size: int) -> bool:
        """Whether costs of this size were there from the start."""
        return True

    def record(
        self,
        batch_size: int,
        num_steps: int,
        num_levels: int,
        seconds: float,
        num_nodes: int | None = None,
    ) -> None:
        """Learn from a round. num_steps: as chosen. num_levels: drafted, summed over the batch."""
        return

    def set_context_length(self, tokens: float) -> bool:
        """Costs are those of this context length from now on. Returns whether they change."""
        return False

    def start_from(self, table: StepCosts) -> None:
        """Take each cost of the table as one measurement; none is reliable by it."""
        return

    def learned(self) -> StepCosts | None:
        """What rounds have taught, for the next start; None where that is nothing."""
        return None


class StepCosts(Costs):
    """A table of costs, measured beforehand. Rounds that run do not change it."""

    is_fixed = True

    def __init__(
        self,
        seconds: Mapping[int, Curve],
        smaller_trees: Mapping[int, Mapping[int, Curve]] = _NONE,
        context_cost: ContextCost | None = None,
    ) -> None:
        """seconds: by batch size and num_steps; 0 and at least one more in each curve.
        smaller_trees: by num_nodes, batch size and num_steps; 0 may be missing. context_cost: None
        where the cost does not depend on the context.

        Raises ValueError for a table that gives no answer."""
        self.notes: dict[str, object] = {}  # other keys of its file
        self.context_cost = context_cost
        self.context_length = 0.0  # tokens of each request, the mean
        self.seconds = ascending(seconds)
        self.smaller_trees = {size: ascending(one) for size, one in smaller_trees.items() if one}
        if not self.seconds or min(self.seconds) < 1:
            raise ValueError("it needs batch sizes of at least 1")
        for size, curve in self.seconds.items():
            if 0 not in curve or len(curve) < 2 or min(curve) < 0:
                raise ValueError(f"batch size {size} needs num_steps 0 and at least one more")
        for curves in (self.seconds, *self.smaller_trees.values()):
            for size, curve in curves.items():
                if not all(math.isfinite(value) and value > 0 for value in curve.values()):
                    raise ValueError(f"batch size {size}: seconds must be above 0")

    def set_context_length(self, tokens: float) -> bool:
        """Costs are those of this context length from now on. Returns whether they change: a short
        context costs what none does."""
        length = tokens if tokens >= _SHORT_CONTEXT else 0.0
        change = abs(length - self.context_length)
        if self.context_cost is None or change <= _SAME_CONTEXT * self.context_length:
            return False
        self.context_length = length
        return True

    def of(self, batch_size: int, depth: float, num_nodes: int | None = None) -> float | None:
        """Seconds of a round; None for a size of trees that was never measured."""
        found = self._without_context(batch_size, depth, num_nodes)
        if found is None or self.context_cost is None:
            return found
        return found + self.context_length * self.context_cost.of(batch_size, depth)

    def _without_context(
        self, batch_size: int, depth: float, num_nodes: int | None
    ) -> float | None:
        """Interpolated linearly between measurements, and extrapolated, but never below the nearest
        one. Smaller trees cost what whole ones do below the smallest batch size at which they were
        measured."""
        rows = self.seconds
        if num_nodes is not None:
            smaller = self.smaller_trees.get(num_nodes)
            if smaller is None:
                return None
            if batch_size >= min(smaller):
                near = _around(smaller, batch_size)
                none = {size: self._without_context(size, 0, None) or 0.0 for size in near}
                rows = {size: {0: none[size], **smaller[size]} for size in near}
        near = _around(rows, batch_size)  # all rows would take a millisecond of each round
        return along({size: along(rows[size], depth) for size in near}, batch_size)

    def is_reliable(self, batch_size: int, shape: DraftShape) -> bool:
        return True


@dataclass
class _Cell:
    window: deque[float]
    last: int  # round in which it was measured last


@dataclass
class _LearnedCurve:
    seconds: Curve = field(default_factory=dict)  # medians by cell, ascending
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
class _LearnedRow:
    """What is known of one bucket of batch sizes."""

    round: int = 0
    is_given: bool = False  # an earlier engine has measured it
    curves: dict[int | None, _LearnedCurve] = field(default_factory=dict)  # by num_nodes
    runs: dict[DraftShape, list[int]] = field(default_factory=dict)  # the last few rounds of each


class RunningCosts(Costs):
    """Costs learned from the rounds: medians over the last ones (the lower one of an even number,
    so that of two rounds a slow one does not count), by the levels that were drafted, by batch
    sizes up to the next power of two, and by the nodes that trees were cut to. What was measured
    long ago, on shorter texts or a busier machine, is forgotten as soon as it is measured again,
    and is not reliable until then."""

    is_fixed = False

    def __init__(self, device: StepCosts | None = None) -> None:
        """device: seconds on the device alone, which count for a batch size until rounds run."""
        self._rows: dict[int, _LearnedRow] = {}
        self._device = device

    def record(
        self,
        batch_size: int,
        num_steps: int,
        num_levels: int,
        seconds: float,
        num_nodes: int | None = None,
    ) -> None:
        row = self._rows.setdefault(bucket(batch_size), _LearnedRow())
        row.round += 1
        shape = DraftShape(num_steps, num_nodes)
        row.runs[shape] = [*row.runs.get(shape, [])[1 - _RELIABLE :], row.round]
        place = round(_CELLS * num_levels / batch_size)
        curve = row.curves.setdefault(num_nodes if place else None, _LearnedCurve())
        curve.record(place, seconds, row.round)

    def of(self, batch_size: int, depth: float, num_nodes: int | None = None) -> float | None:
        """Seconds of a round; None until rounds of this size have run with such drafts and without,
        unless the device's seconds are known."""
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
        row = self._rows.get(bucket(batch_size))
        return row is not None and row.is_given

    def start_from(self, table: StepCosts) -> None:
        for num_nodes, curves in ((None, table.seconds), *table.smaller_trees.items()):
            for size, curve in curves.items():
                row = self._rows.setdefault(bucket(size), _LearnedRow())
                row.is_given = True
                for depth, seconds in curve.items():
                    place = row.curves.setdefault(num_nodes if depth else None, _LearnedCurve())
                    place.record(_CELLS * depth, seconds, row.round)

    def learned(self) -> StepCosts | None:
        """Costs of the batch sizes that have run for a while, at whole depths up to those that were
        drafted; None where there are none."""
        whole: dict[int, Curve] = {}
        smaller: dict[int, dict[int, Curve]] = {}
        for size, row in self._rows.items():
            if not row.is_given and row.round < _RELIABLE:
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

    def is_reliable(self, batch_size: int, shape: DraftShape) -> bool:
        row = self._rows.get(bucket(batch_size))
        runs = [] if row is None else row.runs.get(shape, [])
        return row is not None and len(runs) == _RELIABLE and row.round - runs[0] <= _STALE


def bucket(batch_size: int) -> int:
    """The next power of two."""
    return 1 << (batch_size - 1).bit_length()


def ascending(seconds: Mapping[int, Curve]) -> dict[int, Curve]:
    return {size: dict(sorted(seconds[size].items())) for size in sorted(seconds)}


def along(curve: Curve, place: float) -> float:
    """The value of a curve (keys ascending), interpolated linearly. Beyond its last key it is
    extrapolated, but does not fall; before its first key it is constant."""
    near = _around(curve, place)
    low, high = near[0], near[-1]
    if low == high:
        return curve[low]
    slope = (curve[high] - curve[low]) / (high - low)
    if place > high:
        return curve[high] + max(slope, 0.0) * (place - high)
    if place < low:
        return curve[low]
    return curve[low] + slope * (place - low)


def _around(keys: Iterable[int], place: float) -> list[int]:
    """The two keys (ascending) that a place lies between, or that are nearest to it; a single key
    alone."""
    places = list(keys)
    index = min(max(bisect_left(places, place), 1), len(places) - 1)
    return places[max(index - 1, 0) : index + 1]
