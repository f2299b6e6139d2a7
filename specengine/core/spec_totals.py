"""What speculation has come to since an engine started."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class SpecTotals:
    """Engine-wide counters behind /metrics: what ran, not what was configured."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)

    def record(self, drafted: int, accepted: int) -> None:
        """Count one request's round. A round that drafted nothing is not a draft."""
        if drafted == 0:
            return
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        missing = accepted - len(self.accepted_per_pos)
        self.accepted_per_pos.extend([0] * missing)
        for position in range(accepted):
            self.accepted_per_pos[position] += 1
