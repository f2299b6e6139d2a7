"""What speculation has come to since an engine started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specengine.core.spec_stats import count_at


@dataclass
class SpecTotals:
    """Engine-wide counters behind /metrics: what ran, not what was configured. A batch that runs a
    round counts one for each request in it."""

    num_rounds: int = 0  # with or without drafts, beside a prefill or not
    num_drafts: int = 0  # rounds that had a draft to verify
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)
    drafts_by_length: list[int] = field(default_factory=list)  # drafts by their number of tokens

    @property
    def mean_acceptance_length(self) -> float:
        """Accepted length tau, as SpecStats has it of one request: 1 + accepted / rounds, the bonus
        token included, over all rounds; 0 before the first."""
        return 1.0 + self.num_accepted_tokens / self.num_rounds if self.num_rounds else 0.0

    @property
    def drafted_per_pos(self) -> list[int]:
        """Drafts that had a token at each place, 0 the first. Only for chains: a tree of n nodes is
        not n deep."""
        lengths = self.drafts_by_length
        return [sum(lengths[place:]) for place in range(1, len(lengths))]

    def record(self, num_rounds: int, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Count num_rounds rounds. drafted, accepted: of those that had drafts."""
        self.num_rounds += num_rounds
        if not drafted:
            return
        self.num_drafts += len(drafted)
        self.num_draft_tokens += sum(drafted)
        self.num_accepted_tokens += sum(accepted)
        self.accepted_per_pos.extend([0] * (max(accepted) - len(self.accepted_per_pos)))
        for length in set(drafted):
            count_at(self.drafts_by_length, length, drafted.count(length))
        for length in set(accepted):  # a few: a Counter takes longer where requests are few, too
            count = accepted.count(length)
            for position in range(length):
                self.accepted_per_pos[position] += count
