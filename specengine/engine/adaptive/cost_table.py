"""What a round costs, by its batch size, the depth of its drafts, and the nodes of its trees."""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from specengine.core.errors import ConfigError

Curve = dict[int, float]

_SAME = 0.1  # relative; texts that differ less cost alike
# Tokens. What shorter texts cost more is no more than a table is wrong by, and the same whatever is
# drafted: to count it made K = 2 look better than K = 1 where it was not (adaptive-sweep).
_SHORT = 512.0

_NONE: Mapping[int, Mapping[int, Curve]] = {}

_TABLES = ("seconds", "smaller_trees", "reading")
_FORM = '{"seconds": {"1": {"0": 0.0031, "3": 0.0042}, "8": {"0": 0.0033, "3": 0.0047}}}'


class Costs(Protocol):
    """Seconds of rounds, as far as they are known."""

    @property
    def is_fixed(self) -> bool:
        """Whether rounds that run teach nothing more."""
        ...

    def of(self, batch_size: int, depth: float, num_nodes: int | None = None) -> float | None:
        """depth: num_steps, or the mean of it where requests draft differently. num_nodes: of trees
        that are smaller than they could be, root included."""
        ...

    def is_settled(self, batch_size: int, num_steps: int, num_nodes: int | None = None) -> bool:
        """Whether the cost is known well enough to act on."""
        ...


@dataclass(frozen=True)
class Reading:
    """Seconds that rounds take longer where each request has so many tokens of text, by batch size
    and num_steps. Attention reads all of it, so that they grow with it."""

    tokens: int
    seconds: dict[int, Curve]

    def __post_init__(self) -> None:
        curves = self.seconds.values()
        values = [value for curve in curves for value in curve.values()]
        if self.tokens < 1 or not values or not all(map(len, curves)):
            raise ValueError("reading needs tokens, and seconds by batch size and num_steps")
        if not all(math.isfinite(value) and value >= 0 for value in values):
            raise ValueError("reading: seconds must be 0 or more")

    def of(self, batch_size: int, depth: float) -> float:
        """Of one token more."""
        near = _around(self.seconds, batch_size)
        whole = along({size: along(self.seconds[size], depth) for size in near}, batch_size)
        return whole / self.tokens


class StepCosts:
    """Seconds of a round by batch size and num_steps, measured beforehand.

    A file of it is a JSON object: `seconds` maps batch sizes to objects that map num_steps to
    seconds, 0 (plain decoding) and at least one more in each. `smaller_trees` may map numbers of
    nodes to more such objects, in which 0 need not be. `reading` may have `tokens`, and `seconds`
    as above, which rounds of requests with so much text take longer. Other keys are kept as notes.
    """

    is_fixed = True

    def __init__(
        self,
        seconds: Mapping[int, Curve],
        smaller_trees: Mapping[int, Mapping[int, Curve]] = _NONE,
        notes: Mapping[str, object] | None = None,
        reading: Reading | None = None,
    ) -> None:
        """notes: what else its file says. reading: of requests of no text nothing.

        Raises ValueError for a table that gives no answer."""
        self.notes = dict(notes or {})
        self.reading = reading
        self.text = 0.0  # tokens of each request whose rounds are asked about
        self.seconds = _ascending(seconds)
        self.smaller_trees = {size: _ascending(one) for size, one in smaller_trees.items() if one}
        if not self.seconds or min(self.seconds) < 1:
            raise ValueError("it needs batch sizes of at least 1")
        for size, curve in self.seconds.items():
            if 0 not in curve or len(curve) < 2 or min(curve) < 0:
                raise ValueError(f"batch size {size} needs num_steps 0 and at least one more")
            _check_seconds(size, curve)
        for curves in self.smaller_trees.values():
            for size, curve in curves.items():
                _check_seconds(size, curve)

    @classmethod
    def read(cls, path: Path) -> StepCosts:
        """Raises ConfigError."""
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            smaller = raw.get("smaller_trees", {}) if "seconds" in raw else {}
            sizes = {int(nodes): _numbers(curves) for nodes, curves in smaller.items()}
            reading = _reading_of(raw["reading"]) if "reading" in raw else None
            table = cls(_numbers(raw["seconds"]), sizes, reading=reading)
            table.notes = {key: value for key, value in raw.items() if key not in _TABLES}
            return table
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"--speculative-cost-table {path}: no table of round costs ({error}); it looks "
                f"like {_FORM}, in seconds by batch size and num_steps; mend it, or delete it "
                "to have one made"
            ) from error

    def write(self, path: Path) -> None:
        """All of it or nothing: what was there before stays where this fails. Raises OSError."""
        path = path.resolve()  # a link stays one
        given = {**self.notes, "seconds": self.seconds, "smaller_trees": self.smaller_trees}
        if self.reading is not None:
            given["reading"] = asdict(self.reading)
        half = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            half.write_text(json.dumps(given, indent=1) + "\n", encoding="utf-8")
            os.replace(half, path)
        finally:
            half.unlink(missing_ok=True)

    def go_to(self, tokens: float) -> bool:
        """From here on requests have so much text; whether that changes costs. Short ones cost what
        none do."""
        text = tokens if tokens >= _SHORT else 0.0
        if self.reading is None or abs(text - self.text) <= _SAME * self.text:
            return False
        self.text = text
        return True

    def of(self, batch_size: int, depth: float, num_nodes: int | None = None) -> float | None:
        found = self._of_no_text(batch_size, depth, num_nodes)
        if found is None or self.reading is None:
            return found
        return found + self.text * self.reading.of(batch_size, depth)

    def _of_no_text(self, batch_size: int, depth: float, num_nodes: int | None) -> float | None:
        """On straight lines between what was measured, and beyond it; never below the nearest
        measurement there. Smaller trees cost what whole ones do below the smallest batch size that
        they were measured at, and None if they were measured nowhere."""
        rows = self.seconds
        if num_nodes is not None:
            smaller = self.smaller_trees.get(num_nodes)
            if smaller is None:
                return None
            if batch_size >= min(smaller):
                near = _around(smaller, batch_size)
                none = {size: self._of_no_text(size, 0, None) or 0.0 for size in near}
                rows = {size: {0: none[size], **smaller[size]} for size in near}
        near = _around(rows, batch_size)  # all of them would take a millisecond of each round
        return along({size: along(rows[size], depth) for size in near}, batch_size)

    def is_settled(self, batch_size: int, num_steps: int, num_nodes: int | None = None) -> bool:
        return True


def _ascending(seconds: Mapping[int, Curve]) -> dict[int, Curve]:
    return {size: dict(sorted(seconds[size].items())) for size in sorted(seconds)}


def _check_seconds(batch_size: int, curve: Curve) -> None:
    if not all(math.isfinite(value) and value > 0 for value in curve.values()):
        raise ValueError(f"batch size {batch_size}: seconds must be above 0")


def _numbers(raw: Mapping[str, Mapping[str, float]]) -> dict[int, Curve]:
    return {
        int(size): {int(steps): float(value) for steps, value in curve.items()}
        for size, curve in raw.items()
    }


def _reading_of(raw: Mapping[str, Any]) -> Reading:
    return Reading(int(raw["tokens"]), _ascending(_numbers(raw["seconds"])))


def _around(ascending: Iterable[int], place: float) -> list[int]:
    """The two that a place lies between, or that are nearest to it; the one that there is."""
    places = list(ascending)
    index = min(max(bisect_left(places, place), 1), len(places) - 1)
    return places[max(index - 1, 0) : index + 1]


def along(curve: Curve, place: float) -> float:
    """The value of a curve (keys ascending) at a place of it, or beside it. Of a single point, that
    of the point."""
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


def measure(
    time_of: Callable[[int, int], float], batch_sizes: Iterable[int], steps: Iterable[int]
) -> StepCosts:
    """time_of(batch_size, num_steps): seconds of one such round. From large to small, as graphs are
    captured. steps: 0 and at least one more."""
    wanted = sorted(set(steps))
    sizes = sorted(set(batch_sizes), reverse=True)
    return StepCosts({size: {k: time_of(size, k) for k in wanted} for size in sizes})
