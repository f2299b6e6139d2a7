"""What a round costs, by its shape."""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specengine.core.errors import DataError

Curve = dict[int, float]


@dataclass(frozen=True)
class CostTable:
    """Milliseconds. verify: the target's forward by nodes a request, 1 being plain decoding.
    draft_step: one level of the draft model below the first, by topk; empty where no model drafts.
    round: what else a drafting round costs, the first level and the draft's catching up included.
    """

    verify: Curve
    draft_step: Curve
    round: float
    note: str

    @classmethod
    def read(cls, path: Path) -> CostTable:
        """A JSON object of `verify`, and perhaps `draft_step`, `round` and `note`. Raises
        DataError."""
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            table = cls(
                verify=_curve(raw["verify"]),
                draft_step=_curve(raw.get("draft_step", {})),
                round=float(raw.get("round", 0.0)),
                note=str(raw.get("note", path.name)),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path} is no table of step costs ({error!r}); it looks like "
                '{"verify": {"1": 3.1, "8": 3.4}, "draft_step": {"1": 0.4}, "round": 0.5}, in ms'
            ) from error
        if 1 not in table.verify:
            raise DataError(f"{path}: verify needs the cost of 1 node, which is plain decoding")
        return table

    @property
    def plain(self) -> float:
        """Of a plain decoding step."""
        return self.verify[1]

    def of_round(self, num_levels: int, topk: int, num_nodes: int) -> float:
        """Raises DataError for a shape outside of the table."""
        verify = _at(self.verify, num_nodes, "verify")
        levels = max(num_levels - 1, 0)
        drafting = levels * _at(self.draft_step, topk, "draft_step") if levels else 0.0
        return verify + drafting + self.round


def _curve(raw: dict[str, Any]) -> Curve:
    return {int(key): float(value) for key, value in sorted(raw.items(), key=lambda p: int(p[0]))}


def _at(curve: Curve, place: int, name: str) -> float:
    """Between two known places, on the straight line."""
    if place in curve:
        return curve[place]
    known = list(curve)
    index = bisect_left(known, place)
    if index == 0 or index == len(known):
        raise DataError(
            f"the table of step costs has {name} for {known or 'nothing'}, and {place} lies "
            "outside; measure it, or leave such settings out"
        )
    low, high = known[index - 1], known[index]
    share = (place - low) / (high - low)
    return curve[low] + share * (curve[high] - curve[low])
