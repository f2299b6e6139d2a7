"""One int object for each token id."""

from __future__ import annotations

import numpy as np
from torch import Tensor


class SharedInts:
    """Tensors into lists, of ints that all of them share.

    Of a round's own ints, those of one request lie pages apart, a round on each. Code that walks an
    answer then waits for memory at every token: the prefix cache, the detokenizer, and what frees
    the answer.
    """

    def __init__(self, count: int) -> None:
        """count: of ints from 0 on; others are made anew."""
        self._ints = np.arange(count).astype(object)

    def lists_of(self, values: Tensor) -> list[list[int]]:
        """values: int64 [R, C], on the host. As `values.tolist()`."""
        found = values.numpy()
        if found.size and found.min() >= 0 and found.max() < len(self._ints):
            found = self._ints[found]
        lists: list[list[int]] = found.tolist()
        return lists
