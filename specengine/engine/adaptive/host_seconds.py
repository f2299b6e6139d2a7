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
    is_guess: bool = False  # by what became of the other kind since it was seen itself
    samples: list[float] = field(default_factory=list)


class HostSeconds:
    """A table of costs that was measured on the device alone knows nothing of a host that is slower
    than its graphs, as it is for models of a few million parameters. Here is learned what the host
    takes between two rounds, by what the first of them was: it commits that one, and launches what
    comes behind the second, while the device runs that.

    By batch sizes up to the next power of two, and of each for rounds with drafts and those without
    any: how deep drafts are makes less of a difference to the host than it makes from one moment to
    the next, when others use its cores as well. So what has not run for a while is thought to have
    become slower or faster as what has, until it runs: what it takes then says nothing of the other
    kind, or how both differ would stay for good what it was when they were seen first.
    """

    def __init__(self, overlaps: bool = True) -> None:
        """overlaps: host and device work at the same time; else one after the other."""
        self.overlaps = overlaps
        self._known: dict[int, tuple[_Known, _Known]] = {}  # of rounds without drafts, and with
        self._last: tuple[int, Shape, _Known, _Known] | None = None

    def record(self, batch_size: int, shape: Shape, seconds: float) -> bool:
        """seconds: that the host was busy. Whether `of` has a new answer since."""
        known, other = self._of_kind(batch_size, shape)
        known.samples.append(seconds)
        if len(known.samples) < _SAMPLES:
            return False
        found, old = median(known.samples), known.seconds
        was_guess, known.is_guess = known.is_guess, False
        known.samples.clear()
        if old is not None and abs(found - old) <= _SAME * old:
            return False
        known.seconds = found
        if old is not None and other.seconds is not None and not was_guess:
            other.seconds *= found / old
            other.is_guess = True
            other.samples.clear()
        return True

    def of(self, batch_size: int, device: dict[Shape, float]) -> dict[Shape, float]:
        """Seconds of a round of each shape. device: what it takes there. Drafts of which nothing is
        known cost the host no less than none."""
        if (known := self._known.get(bucket(batch_size))) is None:
            known = _Known(), _Known()
        none, some = (one.seconds or 0.0 for one in known)
        return {
            shape: self._together(cost, (some or none) if shape.num_steps else none)
            for shape, cost in device.items()
        }

    def _of_kind(self, batch_size: int, shape: Shape) -> tuple[_Known, _Known]:
        """What is known of such rounds, and of the others. Of the same decision as the last time
        without a look into the tables: it is asked between any two rounds."""
        if self._last is not None and self._last[0] == batch_size and self._last[1] is shape:
            return self._last[2], self._last[3]
        none, some = self._known.setdefault(bucket(batch_size), (_Known(), _Known()))
        known, other = (some, none) if shape.num_steps else (none, some)
        self._last = batch_size, shape, known, other
        return known, other

    def _together(self, device: float, host: float) -> float:
        return max(device, host) if self.overlaps else device + host
