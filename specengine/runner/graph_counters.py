"""Counters of graphs: how often they were captured and replayed, and why they were not."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

_FALLBACK = "fallback: "
# Reasons.
PLANS_ON_HOST = "the attention backend plans on the host"
MEMORY_SPENT = "memory for graphs is spent"


@dataclass(frozen=True)
class GraphStats:
    """Of one kind of graphs, since start."""

    captures: int = 0
    replays: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)  # what ran without them, by reason

    @classmethod
    def of(cls, counters: Counter[str]) -> GraphStats:
        """From any thread."""
        now = dict(counters)  # in one piece: the engine's thread may add a reason meanwhile
        return cls(
            captures=now.get("captures", 0),
            replays=now.get("replays", 0),
            fallbacks={
                name.removeprefix(_FALLBACK): count
                for name, count in now.items()
                if name.startswith(_FALLBACK)
            },
        )


@dataclass(frozen=True)
class NoGraphs:
    """Stands where graphs of a kind would. Whatever they would have served is a fallback, for one
    reason, which is logged at once."""

    kind: str
    reason: str
    counters: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        logger.info("no %s graphs: %s", self.kind, self.reason)

    def count(self) -> None:
        """One that they would have served."""
        count_fallback(self.counters, self.kind, self.reason)


def count_fallback(counters: Counter[str], kind: str, reason: str) -> None:
    """Count a batch that no graph of this kind served. The first of each reason is logged."""
    counters[_FALLBACK + reason] += 1
    if counters[_FALLBACK + reason] == 1:
        logger.info(
            "a batch without a %s graph: %s (told once; /metrics counts them)", kind, reason
        )
