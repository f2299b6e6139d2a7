"""Expected tokens a second, by the depth of drafts and the nodes of trees."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from specengine.core.spec_stats import DraftShape
from specengine.engine.adaptive.acceptance import (
    Acceptance,
    HybridAcceptance,
    RoundObservation,
    merged,
)
from specengine.engine.adaptive.costs import PLAIN, Costs, bucket

BUFFERED = 4  # rounds that are learned from at once
_HOST_SAMPLES = 8  # rounds of which the median counts
_SAME_HOST = 0.05  # relative; a smaller change is ignored


@dataclass(frozen=True)
class Estimate:
    """What each shape is expected to yield for a batch, in rounds in which some request has a
    draft: the others are the same whatever is chosen."""

    batch_size: int
    chances: Mapping[int | None, Sequence[float]]  # of each position, by num_nodes
    tokens: dict[DraftShape, float]  # a request and round
    seconds: dict[DraftShape, float]  # a round
    rates: dict[DraftShape, float]  # tokens a second

    def gain(self, shape: DraftShape) -> float:
        """Its rate over that of plain decoding."""
        return self.rates[shape] / self.rates[PLAIN]

    @property
    def best(self) -> DraftShape:
        """The first of equals: shallow shapes come before deep ones, small before large ones."""
        return max(self.rates, key=self.rates.__getitem__)

    @property
    def best_draft(self) -> DraftShape:
        """The best shape other than plain decoding."""
        return max(filter(lambda shape: shape.num_steps, self.rates), key=self.rates.__getitem__)


def estimate(
    batch_size: int,
    chances: Mapping[int | None, Sequence[float]],
    coverage: float,
    seconds: dict[DraftShape, float],
) -> Estimate:
    """chances: of acceptance by position, for each num_nodes of the shapes. coverage: the share of
    requests that have a draft. seconds: of a round of each shape, ascending, PLAIN among them."""
    expected = {size: expected_tokens(places) for size, places in chances.items()}
    tokens = {
        shape: 1.0 + coverage * (expected[shape.num_nodes][shape.num_steps] - 1.0)
        for shape in seconds
    }
    rates = {shape: batch_size * tokens[shape] / cost for shape, cost in seconds.items()}
    return Estimate(batch_size, chances, tokens, seconds, rates)


def expected_tokens(chances: Sequence[float]) -> list[float]:
    """Tokens of a round with 0, 1, .. len(chances) drafts in a chain, the bonus token included
    (Leviathan et al. 2023, section 3)."""
    tokens, path = [1.0], 1.0
    for chance in chances:
        path *= chance
        tokens.append(tokens[-1] + path)
    return tokens


@dataclass(slots=True)
class _HostKind:
    """Rounds with drafts, or rounds without, of one bucket of batch sizes."""

    seconds: float | None = None
    is_scaled: bool = False  # by the other kind's change, since it was measured itself
    samples: list[float] = field(default_factory=list)


class HostSeconds:
    """Seconds that the host takes between two rounds, by batch sizes up to the next power of two,
    for rounds with drafts and without. A table measured on the device alone lacks them; for models
    of a few million parameters the host is slower than its graphs.

    The depth of drafts makes less of a difference to the host than other load on its cores does. So
    a kind that has not run recently is scaled by the other kind's change until it is measured
    again; its first measurement then does not scale the other kind.
    """

    def __init__(self, overlaps: bool = True) -> None:
        """overlaps: host and device work at the same time; else one after the other."""
        self.overlaps = overlaps
        self._kinds: dict[int, tuple[_HostKind, _HostKind]] = {}  # without drafts, and with

    def record(self, batch_size: int, shape: DraftShape, seconds: float) -> bool:
        """seconds: that the host was busy for one such round. Returns whether `of` changes."""
        kinds = self._kinds.get(key := bucket(batch_size))
        if kinds is None:
            kinds = self._kinds[key] = _HostKind(), _HostKind()
        known = kinds[shape.num_steps > 0]
        known.samples.append(seconds)
        if len(known.samples) < _HOST_SAMPLES:
            return False
        found, old = median(known.samples), known.seconds
        was_scaled, known.is_scaled = known.is_scaled, False
        known.samples.clear()
        if old is not None and abs(found - old) <= _SAME_HOST * old:
            return False
        known.seconds = found
        other = kinds[shape.num_steps == 0]
        if old is not None and other.seconds is not None and not was_scaled:
            other.seconds *= found / old
            other.is_scaled = True
            other.samples.clear()
        return True

    def of(self, batch_size: int, device: dict[DraftShape, float]) -> dict[DraftShape, float]:
        """Seconds of a round of each shape. device: those on the device. Drafts whose host time is
        unknown are taken to cost the host what rounds without drafts do."""
        kinds = self._kinds.get(bucket(batch_size))
        none, some = (0.0, 0.0) if kinds is None else (one.seconds or 0.0 for one in kinds)
        host = {shape: (some or none) if shape.num_steps else none for shape in device}
        if self.overlaps:
            return {shape: max(cost, host[shape]) for shape, cost in device.items()}
        return {shape: cost + host[shape] for shape, cost in device.items()}


class Estimator:
    """Keeps the estimate of the last batch size until something was learned: it is asked for in
    every round, between two of them, where the host's time may be the round's."""

    def __init__(
        self,
        shapes: Sequence[DraftShape],
        costs: Costs,
        acceptance: Acceptance | HybridAcceptance,
        host: HostSeconds | None,
        pads: bool,
    ) -> None:
        """shapes: to choose from, ascending. host: beside costs that are the device's alone. pads:
        a round costs as if all requests drafted; HybridAcceptance accounts for this itself."""
        self.shapes = shapes
        self.costs = costs
        self.acceptance = acceptance
        self.host = host
        self._steps = sorted({one.num_steps for one in shapes})
        self._pads = pads and not acceptance.is_hybrid
        self._waiting: list[RoundObservation] = []  # to be learned from together
        self._kind: tuple[object, ...] = ()  # of them
        self._estimate: Estimate | None = None
        self._fixed: dict[int, dict[DraftShape, float]] = {}  # seconds by batch size

    def of(self, batch_size: int) -> Estimate | None:
        """The same object until something changes; None while costs are unknown."""
        if self._estimate is None or self._estimate.batch_size != batch_size:
            self._estimate = self._compute(batch_size, keeps=True)
        return self._estimate

    def peek(self, batch_size: int) -> Estimate | None:
        """As `of`, but changes nothing: any thread may call it."""
        found = self._estimate
        if found is not None and found.batch_size == batch_size:
            return found
        return self._compute(batch_size, keeps=False)

    def observe(self, observation: RoundObservation) -> None:
        """Learn from a round with drafts now."""
        self.flush()
        self._learn(observation)

    def buffer(self, observation: RoundObservation) -> None:
        """Learn from a round with drafts together with a few more of its kind: on the host, one
        costs about as much to learn from as four."""
        kind = observation.kind
        if kind != self._kind:
            self.flush()
            self._kind = kind
        self._waiting.append(observation)
        if len(self._waiting) == BUFFERED:
            self.flush()

    def flush(self) -> None:
        """Learn from all rounds that wait."""
        if self._waiting:
            self._learn(merged(self._waiting))
            self._waiting = []

    def costs_changed(self) -> None:
        """Whether learned, measured or the host's."""
        self._fixed.clear()
        self._estimate = None

    def _learn(self, observation: RoundObservation) -> None:
        self.acceptance.observe(observation)
        self._estimate = None

    def _compute(self, batch_size: int, keeps: bool) -> Estimate | None:
        coverage = max(self.acceptance.coverage, 1 / batch_size)
        seconds = self._seconds(batch_size, coverage, keeps)
        if seconds is None:
            return None
        if not self.acceptance.has_ranks:
            seconds = {one: cost for one, cost in seconds.items() if one.num_nodes is None}
        chances = self.acceptance.by_size({one.num_nodes for one in seconds})
        return estimate(batch_size, chances, coverage, seconds)

    def _seconds(
        self, batch_size: int, coverage: float, keeps: bool
    ) -> dict[DraftShape, float] | None:
        if self._pads and self.costs.is_fixed:
            # A request near its end drafts less, and few batches are without one for long.
            coverage = 1.0
        is_constant = self.costs.is_fixed and coverage == 1 and not self.acceptance.is_hybrid
        if is_constant and batch_size in self._fixed:
            return self._fixed[batch_size]
        mean_levels = self.acceptance.mean_levels
        levels = {k: coverage * mean_levels(k, batch_size) for k in self._steps}
        found = seconds_by_shape(self.costs, batch_size, levels, self.shapes)
        if found is not None and self.host is not None:
            found = self.host.of(batch_size, found)
        if is_constant and keeps:
            assert found is not None, "a measured table knows every cost"
            self._fixed[batch_size] = found
        return found


def seconds_by_shape(
    costs: Costs, batch_size: int, levels: Mapping[int, float], shapes: Sequence[DraftShape]
) -> dict[DraftShape, float] | None:
    """Seconds of a round of each shape; None while those of whole drafts are unknown. A smaller
    tree of unknown cost is taken to cost what the whole one does while costs are learned, and is
    left out of a measured table. levels: drafted by a request, the mean, by num_steps."""
    found: dict[DraftShape, float] = {}
    for shape in shapes:
        depth = levels[shape.num_steps]
        seconds = costs.of(batch_size, depth, shape.num_nodes)
        if seconds is None and shape.num_nodes is not None:
            if costs.is_fixed:
                continue
            seconds = costs.of(batch_size, depth)
        if seconds is None:
            return None
        found[shape] = seconds
    return found


def all_shapes(steps: Sequence[int], sizes: Mapping[int, Sequence[int]]) -> list[DraftShape]:
    """Ascending. sizes: num_nodes of cut trees by num_steps, beside whole drafts."""
    return [
        DraftShape(depth, size)
        for depth in sorted(steps)
        for size in (*sorted(sizes.get(depth, ())), None)
    ]


def smaller_sizes(steps: Sequence[int], nodes_of: Callable[[int], int]) -> dict[int, list[int]]:
    """Sizes of cut trees by depth: a half and a quarter of the deepest tree, and a quarter of each
    other, but enough nodes for a path of full depth. nodes_of(depth): of a whole tree, root
    included. Few, since on a GPU each is a graph, and each is tried now and then."""
    deepest, sizes = max(steps), {}
    for depth in filter(None, steps):
        whole = nodes_of(depth)
        parts = (2, 4) if depth == deepest else (4,)
        found = {max(-(-whole // part), depth + 1) for part in parts}
        sizes[depth] = sorted(size for size in found if size < whole)
    return {depth: found for depth, found in sizes.items() if found}
