"""What speculation has come to since an engine started."""

from __future__ import annotations

from collections import Counter
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
        """Count a round, by request. One that drafted nothing is not a draft, and has accepted
        nothing."""
        self.num_drafts += len(drafted) - drafted.count(0)
        self.num_draft_tokens += sum(drafted)
        self.num_accepted_tokens += sum(accepted)
        for length, count in Counter(accepted).items():
            missing = length - len(self.accepted_per_pos)
            self.accepted_per_pos.extend([0] * missing)
            for position in range(length):
                self.accepted_per_pos[position] += count
