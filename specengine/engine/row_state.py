"""Who stands on the device as the host knows it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specengine.core.request import Req
from specengine.core.transfer import sent
from specengine.engine.draft_depth import depths_within
from specengine.engine.row_choices import rows_of
from specengine.kernels.accept_chain import RoundState


class RowState:
    """RoundState as far as the host writes it. Rounds on the device move their requests on by
    themselves: it is told of those that come from anywhere else."""

    def __init__(self, state: RoundState, num_steps: int) -> None:
        """num_steps: of the deepest drafts."""
        self.state = state
        self.num_steps = num_steps
        self._flown: list[Req] = []

    def is_known(self, reqs: list[Req]) -> bool:
        """Whether the device has what the host would tell; every round of theirs has landed."""
        return set(self._flown).issuperset(reqs)

    def tell(self, reqs: list[Req]) -> Tensor:
        """-> their rows of the page table, int64 [B] on the device."""
        known = [req.kv_len for req in reqs], [req.last_token for req in reqs]
        told = np.array([rows_of(reqs), *known, depths_within(reqs, self.num_steps)])
        state = self.state
        rows, lens, roots, limits = sent(torch.from_numpy(told), state.lens.device).unbind()
        state.lens[rows], state.roots[rows], state.limits[rows] = lens, roots, limits
        return rows

    def fly(self, reqs: list[Req]) -> None:
        """They are in a round on the device."""
        self._flown = reqs

    def forget(self) -> None:
        """Something else runs, behind which requests may stand otherwise."""
        self._flown = []
