"""Options of traces, which `specengine replay` reads."""

from __future__ import annotations

from dataclasses import dataclass

from specengine.core.options import option
from specengine.core.section import Section


@dataclass(frozen=True, kw_only=True)
class TraceConfig(Section):
    trace: str | None = option(None, "record drafts into this new file, for `specengine replay`")
    trace_every_position: bool = option(
        False, "draft at every position: rounds emit one token, and replay is exact"
    )
    trace_max_mb: int = option(256, "size at which a trace stops, in MiB")

    def _check_ranges(self) -> None:
        self._require(self.trace != "", "trace", "must not be empty")
        self._require(
            self.trace is not None or not self.trace_every_position,
            "trace_every_position",
            "name the file with --trace",
        )
        self._at_least(1, "trace_max_mb")
