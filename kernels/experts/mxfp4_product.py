"""Shapes of the products of experts in MXFP4."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Product:
    """Shapes of one of the two products. width: outputs of an expert, or of its gate."""

    num_rows: int
    num_chosen: int
    num_experts: int
    columns: int
    width: int
    is_down: bool

    @property
    def num_slots(self) -> int:
        return self.num_rows * self.num_chosen
