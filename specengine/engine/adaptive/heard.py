"""Rounds of which nothing has been learned yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specengine.engine.adaptive.choice import Shape
from specengine.engine.adaptive.tree_acceptance import Outcomes

ROUNDS = 4


@dataclass
class Heard:
    """A few alike, to be learned from at once. On the host one round costs about as much to
    learn from as four, and where a host is slower than its device that is time of every round."""

    kind: tuple[Shape, bool, int | None]  # whether there are ranks; what trees were cut to
    rounds: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)
    ranks: list[Sequence[int]] = field(default_factory=list)

    def add(
        self,
        drafted: Sequence[int],
        accepted: Sequence[int],
        limits: Sequence[int] | None,
        ranks: Sequence[Sequence[int]] | None,
    ) -> bool:
        """Arguments as to AdaptiveSteps.observe. Whether these are enough."""
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.limits += drafted if limits is None else limits
        self.ranks += ranks or ()
        return self.rounds >= ROUNDS

    @property
    def num_steps(self) -> int:
        return self.kind[0].num_steps

    @property
    def outcomes(self) -> Outcomes:
        shape, has_ranks, _ = self.kind
        ranks = self.ranks if has_ranks else None
        given = self.drafted, self.accepted, ranks, shape.num_nodes, self.limits
        return Outcomes(*given, rounds=self.rounds)
