"""What speculation has come to since an engine started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class SpecTotals:
    """Engine-wide counters behind /metrics: what ran, not what was configured."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)

    def record(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Count a round, of each request that drafted in it."""
        if not drafted:
            return
        self.num_drafts += len(drafted)
        self.num_draft_tokens += sum(drafted)
        self.num_accepted_tokens += sum(accepted)
        self.accepted_per_pos.extend([0] * (max(accepted) - len(self.accepted_per_pos)))
        for length in set(accepted):  # a few: a Counter takes longer where requests are few, too
            count = accepted.count(length)
            for position in range(length):
                self.accepted_per_pos[position] += count
