"""When a drafter that does not pay need not even follow the text."""

from __future__ import annotations

_ASLEEP = 600  # rounds
_AWAKE = 16


class Naps:
    """A drafter of hidden states follows every round, so that it can draft in the next one: 3 to 6%
    of a round, which plain decoding does not have. While no drafts stand, it sleeps through most
    rounds, and wakes for a few, in which drafts are tried again.

    What it slept through it does not know; it drafts from the tokens since it woke.
    """

    def __init__(self, asleep: int = _ASLEEP, awake: int = _AWAKE) -> None:
        self.asleep = asleep
        self.awake = awake
        self._rounds = 0  # since drafts were given up

    def sleeps(self, standing: int | None) -> bool:
        """Asked once a round. standing: the num_steps that were settled on, if any were."""
        if standing != 0:
            self._rounds = 0
            return False
        place = self._rounds % (self.asleep + self.awake)
        self._rounds += 1
        return place < self.asleep

    def wake(self) -> None:
        """Before the next round, if it sleeps."""
        if self._rounds % (self.asleep + self.awake) < self.asleep:
            self._rounds += self.asleep - self._rounds % (self.asleep + self.awake)
