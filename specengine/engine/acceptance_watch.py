"""Notices a drafter that never helps."""

from __future__ import annotations

import logging

from specengine.core.spec_totals import SpecTotals

logger = logging.getLogger(__name__)

_ROUNDS = 200
_USELESS = 0.05  # accepted tokens a draft


class AcceptanceWatch:
    """Warns once where drafts are hardly ever accepted, whatever share of the rounds has any."""

    def __init__(self) -> None:
        self._rounds, self._accepted = 0, 0  # when last looked at
        self._warned = False

    def mute(self) -> None:
        """Where nothing is accepted on purpose."""
        self._warned = True

    def check(self, totals: SpecTotals) -> None:
        rounds = totals.num_drafts - self._rounds
        if self._warned or rounds < _ROUNDS:
            return
        accepted = (totals.num_accepted_tokens - self._accepted) / rounds
        self._rounds, self._accepted = totals.num_drafts, totals.num_accepted_tokens
        if accepted < _USELESS:
            self._warned = True
            logger.warning(
                "%.2f tokens accepted of each of the last %d drafts: the drafter costs time and "
                "helps with nothing; `specengine doctor` finds out why",
                accepted,
                rounds,
            )
