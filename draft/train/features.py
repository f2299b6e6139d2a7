"""What the target's forward gives to drafters that learn, and a memory of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate, pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class TeacherOutput:
    """In the target's own dtype, without gradient."""

    features: Tensor  # [T, F], outputs of the feature layers, joined; F = 0 without any
    hidden: Tensor  # [T, H], after the final norm

    @property
    def num_bytes(self) -> int:
        return self.features.nbytes + self.hidden.nbytes

    def rows(self, rows: slice) -> TeacherOutput:
        return TeacherOutput(self.features[rows], self.hidden[rows])

    def clone(self) -> TeacherOutput:
        return TeacherOutput(self.features.clone(), self.hidden.clone())


# int64 [T] and tokens a document -> what the target gives.
Forward = Callable[[Tensor, list[int]], TeacherOutput]


class FeatureCache:
    """Outputs of whole documents, by their tokens, on the target's device, so that later passes
    over the data need not run the target.

    What came first stays: every pass has another order, and what was used last
    is no likelier to be wanted next.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.kept: dict[bytes, TeacherOutput] = {}

    def forward(self, input_ids: Tensor, lens: list[int], run: Forward) -> TeacherOutput:
        """As `run` gives it, which is asked for the documents that are not there."""
        places = [slice(begin, end) for begin, end in pairwise(accumulate(lens, initial=0))]
        on_host = input_ids.cpu().numpy()
        keys = [blake2b(on_host[place].tobytes(), digest_size=16).digest() for place in places]
        wanted = [i for i, key in enumerate(keys) if key not in self.kept]
        fresh: dict[int, TeacherOutput] = {}
        if wanted:
            tokens = torch.cat([input_ids[places[i]] for i in wanted])
            output, begin = run(tokens, [lens[i] for i in wanted]), 0
            for i in wanted:
                fresh[i] = output.rows(slice(begin, begin + lens[i]))
                begin += lens[i]
                self._keep(keys[i], fresh[i])
        parts = [fresh[i] if i in fresh else self.kept[key] for i, key in enumerate(keys)]
        return TeacherOutput(
            torch.cat([part.features for part in parts]), torch.cat([part.hidden for part in parts])
        )

    def _keep(self, key: bytes, output: TeacherOutput) -> None:
        if key not in self.kept and self.num_bytes + output.num_bytes <= self.max_bytes:
            self.kept[key] = output.clone()  # a part would hold the whole forward
            self.num_bytes += output.num_bytes
