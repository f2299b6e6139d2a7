"""What the parts of a round took on the device, over many rounds."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean

from specengine.core.errors import SpecEngineError
from specengine.lab.step.timeline import Round, Trace


@dataclass(frozen=True)
class NodeTime:
    """Microseconds. busy: not counting what overlaps kernels that began before; idle: before it
    begins."""

    name: str
    part: str
    busy: float
    idle: float


@dataclass(frozen=True)
class DeviceRound:
    """Means over the middle half of the rounds, by their length: a machine has hiccups.

    between: from a round's last kernel to the next one's first, with nothing there; period: from
    first kernel to first kernel.
    """

    nodes: tuple[NodeTime, ...]
    between: float
    rounds: int  # that were seen, of this kind

    @property
    def period(self) -> float:
        return sum(node.busy + node.idle for node in self.nodes) + self.between

    @property
    def parts(self) -> dict[str, list[NodeTime]]:
        """In the order of their first node."""
        found: dict[str, list[NodeTime]] = defaultdict(list)
        for node in self.nodes:
            found[node.part].append(node)
        return dict(found)


def attribute(rounds: Sequence[Round]) -> DeviceRound:
    """Of the kind of graph that ran most often, rounds that another followed at once. Raises
    SpecEngineError where there are none."""
    followed = [one for one in rounds if one.next_start is not None]
    if not followed:
        raise SpecEngineError(
            "no round of the profile is one that was captured, followed by another; more tokens "
            "(--new-tokens) give more rounds"
        )
    usual, _ = Counter(one.nodes for one in followed).most_common(1)[0]
    alike = [one for one in followed if one.nodes == usual]
    middle = _middle_half(alike)
    times = [_times(one) for one in middle]
    nodes = tuple(
        NodeTime(node.name, node.part, *(mean(values) for values in zip(*column, strict=True)))
        for node, column in zip(usual, zip(*times, strict=True), strict=True)
    )
    return DeviceRound(nodes, mean(_between(one) for one in middle), len(alike))


def calls_of(trace: Trace, rounds: Sequence[Round]) -> dict[str, float]:
    """How often the host calls the driver, a round, between the first and the last."""
    if len(rounds) < 2:
        return {}
    first, last = rounds[0].start, rounds[-1].start
    counts = Counter(call.name for call in trace.calls if first <= call.start < last)
    return {name: count / (len(rounds) - 1) for name, count in counts.most_common()}


def nodes_in_order(nodes: Sequence[NodeTime]) -> list[str]:
    """Parts as they follow each other, for a look at what was captured."""
    parts = [node.part for node in nodes]
    return parts[:1] + [after for before, after in pairwise(parts) if before != after]


def _middle_half(rounds: list[Round]) -> list[Round]:
    ordered = sorted(rounds, key=_length)
    cut = len(ordered) // 4
    return ordered[cut : len(ordered) - cut]


def _length(one: Round) -> float:
    assert one.next_start is not None
    return one.next_start - one.start


def _times(one: Round) -> list[tuple[float, float]]:
    """busy and idle of each kernel."""
    times, reached = [(0.0, 0.0)] * len(one.kernels), one.start
    for place in sorted(range(len(times)), key=lambda place: one.kernels[place].start):
        kernel = one.kernels[place]
        begun = max(kernel.start, reached)
        end = max(kernel.end, reached)
        times[place] = (end - begun if kernel.end > reached else 0.0, begun - reached)
        reached = end
    return times


def _between(one: Round) -> float:
    assert one.next_start is not None
    return one.next_start - max(kernel.end for kernel in one.kernels)
