"""The memory of CUDA graphs: the pool that they share, what they took, and what they may take."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from specengine.runner.fallbacks import MEMORY_SPENT
from specengine.runner.forward_graphs.keys import MAX_TOKENS

logger = logging.getLogger(__name__)
T = TypeVar("T")

_LAUNCHES = 64 << 10  # bytes of one graph's launches, a layer: a guess on the safe side
_AHEAD = 0.75  # of the budget
_LITTLE = 16 << 20  # bytes that a graph may add to what is spent


@dataclass(frozen=True)
class GraphDemand:
    """What the graphs of an engine are captured for."""

    batch_sizes: tuple[int, ...]
    nodes: int  # tokens that a round runs of each request at most
    depths: int  # kinds of rounds, one graph each a batch size
    num_layers: int
    vocab_size: int
    bytes_per_token: int  # that a forward needs for a moment, without logits
    prompts: tuple[int, ...] = ()  # tokens of each graph of prefills
    kept_weights: int = 0  # rows of drafts' weights a token, beside the target's logits

    @property
    def num_bytes(self) -> int:
        """An estimate: logits that plain decoding and verification leave in float32, each size its
        own; what the largest forward needs, which the others share; the same of prefills, which
        leave hidden states and features, a quarter of that; and the launches."""
        rows = min(self.batch_sizes[-1] * self.nodes, MAX_TOKENS)
        kept = sum(self.batch_sizes) + (2 * rows if self.nodes > 1 else 0)
        moment = rows * (self.bytes_per_token + (6 + 4 * self.kept_weights) * self.vocab_size)
        graphs = len(self.batch_sizes) * (2 + self.depths)
        prefills = (max(self.prompts, default=0) + sum(self.prompts) // 4) * self.bytes_per_token
        launches = (graphs + len(self.prompts)) * self.num_layers * _LAUNCHES
        return kept * 4 * self.vocab_size + moment + prefills + launches


class GraphMemory:
    """Of the graphs of one engine, which share a pool, for no two of them run at once.

    What a graph gives lies in the pool, where graphs that were captured before it write when they
    run: read it, or copy it, before any other graph of the pool runs.

    budget: bytes that were kept free for them; None is as much as there is.
    """

    def __init__(self, budget: int | None = None) -> None:
        self.budget = budget
        self.used = 0  # bytes, measured
        self._is_measuring = False
        self._pool: Any = None

    @property
    def pool(self) -> Any:
        if self._pool is None and torch.cuda.is_available():
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    @property
    def is_spent(self) -> bool:
        return self.budget is not None and self.used >= self.budget

    @property
    def has_plenty(self) -> bool:
        """Of what may be captured ahead, so that enough is left for what somebody asks for."""
        return self.budget is None or self.used < _AHEAD * self.budget

    @contextmanager
    def measured(self) -> Iterator[Callable[[], int]]:
        """Count what is captured inside as used. Gives a function that tells the bytes so far.
        Inside another `measured` it counts nothing: the outer one does."""
        if self._is_measuring or not torch.cuda.is_available():
            yield lambda: 0
            return
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        self._is_measuring = True
        try:
            yield lambda: free - torch.cuda.mem_get_info()[0]
        finally:  # what a failed capture has left is used, too
            self._is_measuring = False
            torch.cuda.empty_cache()
            self.used += free - torch.cuda.mem_get_info()[0]

    def affordable(self, wanted: Sequence[T], what: str) -> Iterator[T]:
        """One by one, to be captured meanwhile, and from large to small: when the budget is spent,
        those that are left out are served by larger ones.

        None is left out for nothing: they share the pool, and often the first has all that the
        others need, and spends the budget alone. What they add is seen by the second.
        """
        added = 0  # by the last one, but for the first
        with self.measured() as taken:
            for index, one in enumerate(wanted):
                before = taken()
                spent = self.budget is not None and self.used + before >= self.budget
                if spent and added > _LITTLE:
                    left = ", ".join(map(str, wanted[index:]))
                    logger.warning("%s: no %s of %s", MEMORY_SPENT, what, left)
                    return
                yield one
                added = taken() - before if index else 0

    def log(self) -> None:
        if self.used and self.budget is not None:
            used, budget = self.used / (1 << 30), self.budget / (1 << 30)
            logger.info("graphs take %.2f GiB, and may take %.2f GiB", used, budget)
