"""The state of requests on the device, as far as the host writes it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specengine.core.request import Req
from specengine.core.transfer import sent
from specengine.engine.draft_depth import depths_within
from specengine.engine.round.sampling import rows_of
from specengine.kernels.accept.types import RoundState


class HostView:
    """RoundState as the host writes it. Rounds on the device move their requests on by themselves:
    the host writes the state of requests that come from anywhere else."""

    def __init__(self, state: RoundState, num_steps: int) -> None:
        """num_steps: of the deepest drafts."""
        self.state = state
        self.num_steps = num_steps
        self._launched: list[Req] = []

    def is_known(self, reqs: list[Req]) -> bool:
        """Whether the device has what the host would write. All rounds of theirs are collected."""
        return set(self._launched).issuperset(reqs)

    def write(self, reqs: list[Req]) -> Tensor:
        """-> their rows of the page table, int64 [B] on the device."""
        known = [req.kv_len for req in reqs], [req.last_token for req in reqs]
        columns = np.array([rows_of(reqs), *known, depths_within(reqs, self.num_steps)])
        state = self.state
        rows, lens, roots, limits = sent(torch.from_numpy(columns), state.lens.device).unbind()
        state.lens[rows], state.roots[rows], state.max_accepted[rows] = lens, roots, limits
        return rows

    def note_launch(self, reqs: list[Req]) -> None:
        """These requests are in a round on the device."""
        self._launched = reqs

    def forget(self) -> None:
        """Something else runs, after which the state of requests may differ."""
        self._launched = []
