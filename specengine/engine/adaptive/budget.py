"""What may be lost on rounds that only serve to find out."""

from __future__ import annotations

SHARE = 0.005
_LARGEST = 2.0  # rounds


class ProbeBudget:
    """Seconds. A fixed share of all time may be lost on probes, whatever comes of them, and a probe
    that gains pays for the next one at once. Little can be saved up."""

    def __init__(self) -> None:
        self.saved = 0.0

    def allows(self, loss: float, round_seconds: float) -> bool:
        """loss: expected; round_seconds: of a round as it would be without the probe."""
        return self.saved >= min(loss, _LARGEST * round_seconds)

    def earn(self, round_seconds: float) -> None:
        self._add(SHARE * round_seconds, round_seconds)

    def pay(self, loss: float, round_seconds: float) -> None:
        """What a probe really cost, or less than 0 where it gained. One that was held up by
        something else is not charged for it."""
        self._add(-min(loss, _LARGEST * round_seconds), round_seconds)

    def _add(self, seconds: float, round_seconds: float) -> None:
        self.saved = min(self.saved + seconds, _LARGEST * round_seconds)
