"""Which part of a round each node of its graph belongs to, and what each took.

A graph has no markers of its own. But its kernels are those of the same round run eagerly, and in
the same order but for layers of two branches. So a round that runs eagerly, with marks around its
parts and the device synchronised at each border, tells the parts of the kernels, and replays are
cut into rounds by the first kernel whose name comes once in a round.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from specengine.core.errors import SpecEngineError

BEGIN, ACCEPT = "begin", "accept"
_COPIES = ("Memcpy", "Memset")
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")
_ALIKE = 0.8  # share of a round's names, in order, that must be those of its nodes


@dataclass(frozen=True)
class Span:
    """Times in microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Trace:
    """In order of their starts."""

    kernels: list[Span] = field(default_factory=list)  # copies and fills too
    marks: list[Span] = field(default_factory=list)
    calls: list[Span] = field(default_factory=list)  # of the host, to the driver


@dataclass(frozen=True)
class Node:
    name: str
    part: str


def read_trace(file: Path) -> Trace:
    """A trace as torch.profiler exports it."""
    return trace_of(json.loads(file.read_text())["traceEvents"])


def trace_of(events: Sequence[dict[str, Any]]) -> Trace:
    trace = Trace()
    for one in sorted((e for e in events if e.get("ph") == "X"), key=lambda e: float(e["ts"])):
        start, kind = float(one["ts"]), one.get("cat")
        span = Span(_plain_name(one["name"]), start, start + float(one.get("dur", 0.0)))
        if kind in _KERNELS:
            trace.kernels.append(span)
        elif kind == "user_annotation":
            trace.marks.append(span)
        elif kind in _CALLS:
            trace.calls.append(span)
    return trace


def _plain_name(name: str) -> str:
    """Copies and fills are called differently in graphs."""
    return next((word for word in _COPIES if name.startswith(word)), name)


def nodes_of(trace: Trace) -> list[Node]:
    """Of a marked round: a kernel belongs to the innermost mark that it runs in. What has none lies
    before the last part of verification, or after it. Raises SpecEngineError for no kernels."""
    if not trace.kernels:
        raise SpecEngineError("the profiler saw no kernels; is another profiler at work?")
    parts = [_part_of(kernel, trace.marks) for kernel in trace.kernels]
    verified = max((i for i, part in enumerate(parts) if part and "verify" in part), default=-1)
    return [
        Node(kernel.name, part or (BEGIN if place < verified else ACCEPT))
        for place, (kernel, part) in enumerate(zip(trace.kernels, parts, strict=True))
    ]


def _part_of(kernel: Span, marks: Sequence[Span]) -> str | None:
    middle = (kernel.start + kernel.end) / 2
    around = [mark for mark in marks if mark.start <= middle <= mark.end]
    return min(around, key=lambda mark: mark.end - mark.start).name if around else None


@dataclass(frozen=True)
class Round:
    """One replay. kernels: as `nodes`, which may have run in another order; next_start: of the
    round that followed with nothing but copies between; else None."""

    nodes: tuple[Node, ...]
    kernels: tuple[Span, ...]
    next_start: float | None

    @property
    def start(self) -> float:
        return min(kernel.start for kernel in self.kernels)


def rounds_of(trace: Trace, kinds: Sequence[Sequence[Node]]) -> list[Round]:
    """The replays in a trace. kinds: the nodes of each graph that may have run."""
    found: dict[int, Round] = {}
    for nodes in kinds:
        offset, marker = _marker(nodes)
        places = [i - offset for i, one in enumerate(trace.kernels) if one.name == marker]
        places = [place for place in places if place >= 0]
        for place, following in zip(places, [*places[1:], len(trace.kernels)], strict=True):
            # A round that has a node more or less than was captured is aligned up to the next one.
            exact = _in_order(trace.kernels[place : place + len(nodes)], nodes)
            if exact is not None:
                found[place] = Round(tuple(nodes), exact, None)
            elif place not in found:
                chunk = trace.kernels[place:following]
                aligned = _align(_names(chunk), nodes)
                if aligned is not None:
                    found[place] = Round(aligned, tuple(chunk), None)
    return [
        replace(one, next_start=_next_start(trace, place + len(one.kernels), found))
        for place, one in sorted(found.items())
    ]


def _in_order(kernels: Sequence[Span], nodes: Sequence[Node]) -> tuple[Span, ...] | None:
    """The kernels as the nodes are, those of one name as they ran; None: they are not the same.
    Where both branches of a layer have kernels of one name, their times may change places."""
    if Counter(_names(kernels)) != Counter(_names(nodes)):
        return None
    named = defaultdict[str, deque[Span]](deque)
    for kernel in kernels:
        named[kernel.name].append(kernel)
    return tuple(named[node.name].popleft() for node in nodes)


def _next_start(trace: Trace, place: int, found: Mapping[int, Round]) -> float | None:
    while place not in found:
        if place >= len(trace.kernels) or trace.kernels[place].name not in _COPIES:
            return None
        place += 1
    return found[place].start


def _marker(nodes: Sequence[Node]) -> tuple[int, str]:
    counts = Counter(node.name for node in nodes)
    for place, node in enumerate(nodes):
        if counts[node.name] == 1:
            return place, node.name
    raise SpecEngineError("no kernel comes once in a round: rounds cannot be told apart")


def _names(spans: Sequence[Span] | Sequence[Node]) -> list[str]:
    return [one.name for one in spans]


def _align(names: list[str], nodes: Sequence[Node]) -> tuple[Node, ...] | None:
    """Parts of kernels that are almost those of a graph; a stranger goes with the one before it."""
    matcher = SequenceMatcher(None, names, _names(nodes), autojunk=False)
    if matcher.ratio() < _ALIKE:
        return None
    parts: list[str | None] = [None] * len(names)
    for ours, theirs, size in matcher.get_matching_blocks():
        for i in range(size):
            parts[ours + i] = nodes[theirs + i].part
    aligned, last = [], BEGIN
    for name, part in zip(names, parts, strict=True):
        last = part or last
        aligned.append(Node(name, last))
    return tuple(aligned)
