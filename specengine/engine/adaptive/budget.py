"""What may be lost on rounds that only serve to find out."""

from __future__ import annotations

SHARE = 0.005
_LARGEST = 2.0  # rounds
_DEEPEST = 16.0  # rounds; earned in 3,200


class ProbeBudget:
    """Seconds. A fixed share of all time may be lost on probes, whatever comes of them, and a probe
    that gains pays for the next one at once. Little can be saved up, and no debt forbids probes for
    more than some thousand rounds: of one that cost more than that, the rest is forgiven."""

    def __init__(self) -> None:
        self.saved = 0.0

    def allows(self, loss: float, round_seconds: float) -> bool:
        """loss: expected; round_seconds: of a round as it would be without the probe."""
        return self.saved >= min(loss, _LARGEST * round_seconds)

    def earn(self, round_seconds: float, rounds: int = 1) -> None:
        self._add(rounds * SHARE * round_seconds, round_seconds)

    def pay(self, loss: float, round_seconds: float, own: float = 0.0) -> None:
        """What a probe really cost, or less than 0 where it gained. own: of that, what it took for
        itself on the host. The rest may have been held up by something else, and is not charged
        beyond what probes usually cost."""
        self._add(-own - min(loss - own, _LARGEST * round_seconds), round_seconds)

    def _add(self, seconds: float, round_seconds: float) -> None:
        least, most = -_DEEPEST * round_seconds, _LARGEST * round_seconds
        self.saved = max(least, min(self.saved + seconds, most))
