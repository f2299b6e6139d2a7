"""The memory of CUDA graphs: the pool that they share, what they took, and what they may take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class GraphMemory:
    """Of the graphs of one engine, which share a pool: no two of them run at once.

    budget: bytes that were kept free for them; None is as much as there is.
    """

    def __init__(self, budget: int | None = None) -> None:
        self.budget = budget
        self.used = 0  # bytes, measured
        self._pool: Any = None

    @property
    def pool(self) -> Any:
        if self._pool is None and torch.cuda.is_available():
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    @property
    def is_spent(self) -> bool:
        return self.budget is not None and self.used >= self.budget

    @contextmanager
    def measured(self) -> Iterator[None]:
        """What is captured inside counts as used."""
        if not torch.cuda.is_available():
            yield
            return
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        yield
        torch.cuda.empty_cache()
        self.used += free - torch.cuda.mem_get_info()[0]
