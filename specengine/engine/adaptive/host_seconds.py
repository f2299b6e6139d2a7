"""What the host does for a round, where that takes longer than the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from specengine.engine.adaptive.choice import Shape
from specengine.engine.adaptive.running_costs import bucket

_SAMPLES = 8  # rounds of which the median counts
_SAME = 0.05  # relative; what differs less says nothing new


@dataclass(slots=True)
class _Known:
    seconds: float | None = None
    samples: list[float] = field(default_factory=list)


class HostSeconds:
    """A table of costs that was measured on the device alone knows nothing of a host that is slower
    than its graphs, as it is for models of a few million parameters. Here is learned what the host
    takes between two rounds, by what the first of them was: it commits that one, and launches what
    comes behind the second, while the device runs that.

    By batch sizes up to the next power of two. A shape that has not run for a while costs the host
    no less than those that draft no deeper.
    """

    def __init__(self, overlaps: bool = True) -> None:
        """overlaps: host and device work at the same time; else one after the other."""
        self.overlaps = overlaps
        self._known: dict[int, dict[Shape, _Known]] = {}
        self._last: tuple[int, Shape, _Known] | None = None

    def record(self, batch_size: int, shape: Shape, seconds: float) -> bool:
        """seconds: that the host was busy. Whether `of` has a new answer since."""
        known = self._known_of(batch_size, shape)
        known.samples.append(seconds)
        if len(known.samples) < _SAMPLES:
            return False
        found, old = median(known.samples), known.seconds
        known.samples.clear()
        if old is not None and abs(found - old) <= _SAME * old:
            return False
        known.seconds = found
        return True

    def of(self, batch_size: int, device: dict[Shape, float]) -> dict[Shape, float]:
        """Seconds of a round of each shape. device: what it takes there."""
        known = self._known.get(bucket(batch_size), {})
        host = {shape: one.seconds for shape, one in known.items() if one.seconds is not None}
        return {shape: self._together(cost, _least(host, shape)) for shape, cost in device.items()}

    def _known_of(self, batch_size: int, shape: Shape) -> _Known:
        """Of the same decision as the last time without a look into the tables: it is asked between
        any two rounds."""
        if self._last is not None and self._last[0] == batch_size and self._last[1] is shape:
            return self._last[2]
        known = self._known.setdefault(bucket(batch_size), {}).setdefault(shape, _Known())
        self._last = batch_size, shape, known
        return known

    def _together(self, device: float, host: float) -> float:
        return max(device, host) if self.overlaps else device + host


def _least(host: dict[Shape, float], shape: Shape) -> float:
    if shape in host:
        return host[shape]
    lower = (cost for one, cost in host.items() if one.num_steps <= shape.num_steps)
    return max(lower, default=0.0)
