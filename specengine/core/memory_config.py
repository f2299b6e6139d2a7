"""How much memory an engine takes, and what it keeps there."""

from __future__ import annotations

from dataclasses import dataclass

from specengine.core.options import option
from specengine.core.section import Section


@dataclass(frozen=True, kw_only=True)
class MemoryConfig(Section):
    mem_fraction_static: float | None = option(
        None, "share of memory for weights and KV; default 0.88 on a GPU, 0.25 on CPU"
    )
    max_total_tokens: int | None = option(None, "KV slots; default: what the memory allows")
    page_size: int = option(1, "KV slots a page")
    disable_radix_cache: bool = option(False, "keep no KV of finished requests")
    max_state_snapshots: int | None = option(
        None,
        "snapshots of recurrent state in the prefix cache, each as large as a request's; default "
        "32, or as many as requests may run, and fewer where memory is short",
    )
    enable_sleep_mode: bool = option(
        False, "let the engine give its memory back and take it again: sleep, wake"
    )

    def _check_ranges(self) -> None:
        fraction, size = self.mem_fraction_static, self.page_size
        self._require(
            fraction is None or 0.0 < fraction <= 1.0,
            "mem_fraction_static",
            "must lie above 0 and be at most 1, such as 0.8",
        )
        self._require(
            size >= 1 and size & (size - 1) == 0, "page_size", "must be a power of two, such as 16"
        )
        self._at_least(size, "max_total_tokens")  # a page
        self._at_least(0, "max_state_snapshots")
