"""How prompts run beside rounds."""

from __future__ import annotations

from dataclasses import dataclass

from specengine.core.options import option
from specengine.core.section import Section


@dataclass(frozen=True, kw_only=True)
class SplitConfig(Section):
    enable_pdmux: bool = option(
        False, "run long prompts a few layers at a time, in turns with rounds"
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
        (1.0,),
        "shares of the GPU's SMs that prompts may have, such as 0.5,0.76,1, to choose from by "
        "measurement; 1 or none: all, in turns with rounds",
    )

    @property
    def sm_parts(self) -> list[float]:
        """Shares that prompts have beside rounds."""
        return [one for one in self.pdmux_sm_shares or () if one < 1.0]

    @property
    def takes_turns(self) -> bool:
        """Whether prompts may have all SMs, in turns with rounds."""
        return self.pdmux_sm_shares is None or 1.0 in self.pdmux_sm_shares

    @property
    def num_lanes(self) -> int:
        """Streams on a GPU that prompts may run on: of each part, and of all SMs."""
        return 1 + len(self.sm_parts) if self.enable_pdmux else 0

    def _check_ranges(self) -> None:
        self._at_least(1, "pdmux_min_tokens", "pdmux_layers")
        self._require(self.pdmux_tpot_ratio > 1.0, "pdmux_tpot_ratio", "must be above 1")
        shares = self.pdmux_sm_shares
        self._require(
            shares is None or (len(shares) > 0 and all(0.0 < one <= 1.0 for one in shares)),
            "pdmux_sm_shares",
            "give shares above 0 and up to 1, such as 0.5,0.76,1",
        )
        if not self.enable_pdmux:
            self._refuse_given(self.options(), "--enable-pdmux")
