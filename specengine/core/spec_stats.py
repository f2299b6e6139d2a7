"""What a request's rounds have come to."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple


class DraftShape(NamedTuple):
    """What a round may draft: a depth and, for a tree that is cut to its best nodes, how many of
    them, root included; None for chains and whole trees."""

    num_steps: int
    num_nodes: int | None = None

    def __str__(self) -> str:
        nodes = "" if self.num_nodes is None else f" with {self.num_nodes} nodes"
        return f"K={self.num_steps}{nodes}"


@dataclass(frozen=True)
class DepthChoice:
    """How deep the drafts of a round might go, and why.

    num_steps: for the whole batch; what a request allows itself, or has text for, may be less.
    reason: one line for logs and metrics. expected_gain: tokens a second over those of plain
    decoding; None where that is not known. num_nodes: of trees that are cut to their best nodes,
    root included; None: as large as they are.
    """

    num_steps: int
    reason: str
    expected_gain: float | None
    num_nodes: int | None = None

    @cached_property
    def shape(self) -> DraftShape:
        return DraftShape(self.num_steps, self.num_nodes)


@dataclass(slots=True)
class SpecStats:
    """Counters of one request's rounds. Accepted tokens exclude the bonus token."""

    num_rounds: int = 0  # with or without drafts, beside a prefill or not
    num_draft_tokens: int = 0
    num_accepted: int = 0
    histogram: list[int] = field(default_factory=list)  # rounds by number of accepted tokens
    is_lossy: bool = False  # a verifier that does not keep the target's distribution was at work
    depth_histogram: list[int] = field(default_factory=list)  # rounds by depth chosen for the batch
    depth: DepthChoice | None = None  # of the last round that was not beside a prefill

    def record(self, drafted: int, accepted: int, depth: DepthChoice | None = None) -> None:
        """depth: None for a round beside a prefill, in which there are no drafts."""
        self.num_rounds += 1
        self.num_draft_tokens += drafted
        self.num_accepted += accepted
        steps = 0
        if depth is not None:
            self.depth = depth
            steps = depth.num_steps
        try:  # a call would cost as much as the rest, for each request and round
            self.histogram[accepted] += 1
        except IndexError:
            count_at(self.histogram, accepted)
        try:
            self.depth_histogram[steps] += 1
        except IndexError:
            count_at(self.depth_histogram, steps)

    @property
    def mean_acceptance_length(self) -> float:
        """Accepted length tau: 1 + accepted / rounds, the bonus token included."""
        return 1.0 + self.num_accepted / self.num_rounds if self.num_rounds else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        return self.num_accepted / self.num_draft_tokens if self.num_draft_tokens else 0.0


def count_at(histogram: list[int], place: int, count: int = 1) -> None:
    while len(histogram) <= place:
        histogram.append(0)
    histogram[place] += count
