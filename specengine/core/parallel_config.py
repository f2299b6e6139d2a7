"""How many ranks share a model."""

from __future__ import annotations

from dataclasses import dataclass

from specengine.core.options import option
from specengine.core.section import Section


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Section):
    tp_size: int = option(1, "ranks that share each layer: a process each, and on GPUs a card each")
    draft_tp_size: int | None = option(
        None, "ranks that share the draft model, 1 or all: 1 keeps it whole on each; default: all"
    )

    dp_size: int = option(
        1, "engines behind one endpoint, each with requests of its own, and on GPUs its own cards"
    )
    enable_dp_attention: bool = option(
        False, "let the engines of --dp-size share the experts of one model, in place of copies"
    )
    enable_symm_mem: bool | None = option(
        None,
        "sum few rows over two cards in one kernel, by memory that each has mapped of the other; "
        "default: with --tp-size 2 alone",
    )

    @property
    def splits_draft(self) -> bool:
        return self.draft_tp_size in (None, self.tp_size)

    def _check_ranges(self) -> None:
        self._at_least(1, "tp_size", "dp_size")
        self._require(
            self.dp_size > 1 or not self.enable_dp_attention,
            "enable_dp_attention",
            "needs a --dp-size of 2 at least",
        )
        self._require(
            self.draft_tp_size in (None, 1, self.tp_size),
            "draft_tp_size",
            f"must be 1, or the {self.tp_size} of --tp-size",
        )
