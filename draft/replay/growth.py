"""Which nodes of a recorded draft another setting would have had."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from specengine.core.errors import DataError
from specengine.draft.choice import FIRST_RANK, NEXT_RANK
from specengine.draft.replay.requests import RecordedDraft

Allowed = Callable[[int], bool]


@dataclass(frozen=True)
class Growth:
    """The candidates that growing with a topk finds, best first, as EAGLE-2 grows its trees (Li et
    al. 2024). A setting takes the first few of those within its depth.

    expanded: depth of the nodes whose children were looked for, the root among them. short: those
    of them with fewer children in the trace than would have been looked for.
    """

    nodes: list[int]
    depths: list[int]
    expanded: dict[int, int]
    short: frozenset[int]

    def kept(self, num_steps: int, num_nodes: int) -> list[int]:
        """The nodes of a tree so deep, with so many nodes, root included; without the root."""
        within = [n for n, depth in zip(self.nodes, self.depths, strict=True) if depth <= num_steps]
        return within[: num_nodes - 1]


def in_order(draft: RecordedDraft) -> Growth:
    """Drafts that do not grow level by level: nodes in their order."""
    nodes = list(range(1, len(draft.tokens)))
    return Growth(nodes, [0] * len(nodes), {}, frozenset())


def grow(draft: RecordedDraft, topk: int, is_static: bool, allowed: Allowed | None) -> Growth:
    """allowed(token): whether the drafter can say it; None is every token. is_static: scores follow
    ranks, not probabilities. Raises DataError where a tree has no scores."""
    growth = _Grower(draft, topk, is_static, allowed)
    while growth.frontier:
        growth.descend()
    order = sorted(range(len(growth.nodes)), key=lambda i: (-growth.scores[i], growth.nodes[i]))
    return Growth(
        [growth.nodes[i] for i in order],
        [growth.depths[i] for i in order],
        growth.expanded,
        frozenset(growth.short),
    )


class _Grower:
    def __init__(
        self, draft: RecordedDraft, topk: int, is_static: bool, allowed: Allowed | None
    ) -> None:
        self.draft = draft
        self.topk = topk
        self.is_static = is_static
        self.allowed = allowed
        self.nodes: list[int] = []
        self.scores: list[float] = []
        self.depths: list[int] = []
        self.expanded: dict[int, int] = {}
        self.short: set[int] = set()
        self.frontier = [(0.0, 0)]  # score and node
        self.depth = 0

    def descend(self) -> None:
        new: list[tuple[float, int]] = []
        for score, node in self.frontier:
            self.expanded[node] = self.depth
            children = self._children(node)
            if len(children) < self.topk:
                self.short.add(node)
            new += [(self._score(score, child, rank), child) for rank, child in enumerate(children)]
        self.depth += 1
        for score, node in new:
            self.nodes.append(node)
            self.scores.append(score)
            self.depths.append(self.depth)
        self.frontier = sorted(new, key=lambda pair: (-pair[0], pair[1]))[: self.topk]

    def _children(self, node: int) -> list[int]:
        children, allowed = self.draft.children[node], self.allowed
        if allowed is not None:
            children = [one for one in children if allowed(self.draft.tokens[one])]
        return children[: self.topk]

    def _score(self, above: float, node: int, rank: int) -> float:
        if self.is_static:
            return above + math.log(FIRST_RANK) + rank * math.log(NEXT_RANK)
        prob = self.draft.path_probs[node]
        if not math.isnan(prob):
            return math.log(prob) if prob > 0 else -math.inf
        if self.topk > 1 or not self.draft.is_chain:
            raise DataError(
                "the drafter gave no probabilities for its trees, and without them a smaller tree "
                "is not known; record greedy requests without --speculative-draft-sampling"
            )
        return -float(self.depth + 1)
