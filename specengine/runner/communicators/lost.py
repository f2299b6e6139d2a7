"""The error of a collective whose other ranks are gone."""

from __future__ import annotations

from specengine.core.parallel import Communicator


class RanksLostError(RuntimeError):
    """Another rank of `ranks` has ended, or has not come to a collective in time. Only the process
    that started the ranks knows which: engine/parallel/ranks.py and engine/sharing.py make an
    EngineStoppedError of it."""

    def __init__(self, message: str, ranks: Communicator) -> None:
        super().__init__(message)
        self.ranks = ranks
