"""Mistakes in rolling recurrent state back: tests that let them pass prove nothing.

Each is caught by test_recurrent_state.py::test_wrong_rollback_is_noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specengine.kernels.delta.types import StatePaths

Accepted = Callable[[StatePaths], Tensor]  # int64 [B], nodes below the root; -1: not even the root


@dataclass(frozen=True)
class StateMutant:
    """What a commit takes for the accepted nodes."""

    name: str
    accepted: Accepted

    def spoil(self, paths: StatePaths) -> StatePaths:
        most = torch.full_like(paths.accepted_B, paths.width - 1)
        return replace(paths, accepted_B=self.accepted(paths).minimum(most))


STATE_MUTANTS = (
    StateMutant("one node early", lambda paths: paths.accepted_B - 1),
    StateMutant("one node late", lambda paths: paths.accepted_B + 1),
    StateMutant("no rollback", lambda paths: torch.full_like(paths.accepted_B, paths.width)),
    StateMutant("no commit", lambda paths: torch.full_like(paths.accepted_B, -1)),
)
