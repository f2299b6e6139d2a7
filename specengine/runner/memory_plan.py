"""Sizes the KV memory: total x fraction - used - peak + current - graphs, weights included in
`used`."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from specengine.core.errors import OutOfMemoryError

logger = logging.getLogger(__name__)
GIB = 1 << 30


@dataclass(frozen=True)
class MemoryPlan:
    """All in bytes but `num_tokens`, the KV slots that fit. `peak - current` is what a forward at
    full size needs for a moment on top of what stays."""

    total: int
    fraction: float
    used: int
    peak: int
    current: int
    bytes_per_token: int  # target and draft together
    limit_tokens: int  # the most that could ever be used: rows x context, or --max-total-tokens
    page_size: int
    graphs: int = 0  # that CUDA graphs are expected to take

    @property
    def kv_budget(self) -> int:
        held = self.used + self.peak - self.current + self.graphs
        return int(self.total * self.fraction) - held

    @property
    def graph_budget(self) -> int:
        """What graphs may take: what is kept for them, and half of what the fraction leaves."""
        return self.graphs + int(self.total * (1 - self.fraction)) // 2

    @property
    def num_tokens(self) -> int:
        """KV slots that fit, in whole pages."""
        tokens = min(self.kv_budget // self.bytes_per_token, self.limit_tokens)
        return max(tokens, 0) // self.page_size * self.page_size

    def check(self, needed_tokens: int) -> None:
        """Raise OutOfMemoryError unless `needed_tokens` slots fit, naming what would help."""
        if self.num_tokens >= needed_tokens:
            return
        missing = needed_tokens * self.bytes_per_token - self.kv_budget
        fraction = self.fraction + missing / self.total
        most = max(self.kv_budget, 0) // self.bytes_per_token
        if fraction <= 0.98:
            remedy = f"--mem-fraction-static {fraction + 0.005:.2f} fits"
        elif most >= self.page_size:
            remedy = f"--context-length {most} fits (or --max-total-tokens {most})"
        else:
            remedy = (
                f"the weights alone leave no room: {missing / GIB:.1f} GiB more memory, a smaller "
                "model or --quantization is needed"
            )
        raise OutOfMemoryError(
            f"{needed_tokens} KV tokens ({needed_tokens * self.bytes_per_token / GIB:.2f} GiB) do "
            f"not fit in {max(self.kv_budget, 0) / GIB:.2f} GiB ({self.describe()}); {remedy}"
        )

    def describe(self) -> str:
        return (
            f"{self.total / GIB:.1f} GiB x {self.fraction:g} - {self.used / GIB:.2f} used - "
            f"{self.peak / GIB:.2f} peak + {self.current / GIB:.2f} current - "
            f"{self.graphs / GIB:.2f} graphs"
        )

    def log(self) -> None:
        logger.info(
            "KV memory: %d tokens x %d B = %.2f GiB (%s)",
            self.num_tokens,
            self.bytes_per_token,
            self.num_tokens * self.bytes_per_token / GIB,
            self.describe(),
        )
