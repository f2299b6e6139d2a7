"""How prompts run beside rounds."""

from __future__ import annotations

from dataclasses import dataclass

from specengine.core.options import option
from specengine.core.section import Section


@dataclass(frozen=True, kw_only=True)
class SplitConfig(Section):
    enable_pdmux: bool = option(
        False, "run long prompts a few layers at a time beside rounds, on a part of the GPU"
    )
    pdmux_min_tokens: int | None = option(
        None, "prompt tokens a forward from which it is split; default 512 on a GPU, 64 on CPU"
    )
    pdmux_layers: int | None = option(
        None, "layers a call of a split prompt; default: by measured costs"
    )
    pdmux_tpot_ratio: float = option(
        1.5, "how much longer a token may take beside prompts than without"
    )
    pdmux_sm_shares: tuple[float, ...] | None = option(
        (0.5, 0.76),
        "shares of the GPU's SMs that prompts may have, to choose from; none: all, behind rounds",
    )

    @property
    def num_lanes(self) -> int:
        """Streams on a GPU that prompts may run on: of each share, and of all SMs."""
        return 1 + len(self.pdmux_sm_shares or ()) if self.enable_pdmux else 0

    def _check_ranges(self) -> None:
        self._at_least(1, "pdmux_min_tokens", "pdmux_layers")
        self._require(self.pdmux_tpot_ratio > 1.0, "pdmux_tpot_ratio", "must be above 1")
        shares = self.pdmux_sm_shares
        self._require(
            shares is None or (len(shares) > 0 and all(0.0 < one < 1.0 for one in shares)),
            "pdmux_sm_shares",
            "give shares between 0 and 1, such as 0.5,0.76",
        )
        if not self.enable_pdmux:
            self._refuse_given(self.options(), "--enable-pdmux")
