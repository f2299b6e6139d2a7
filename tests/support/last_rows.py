"""Which forwards leave rows of their last layer out."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from specengine.layers.decoder import DecoderLayer


def count_last(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of the last layer's output, a forward that leaves rows out."""
    counted, inner = list[int](), DecoderLayer.forward_last

    def forward_last(self: DecoderLayer, *given: Any) -> tuple[Tensor, Tensor]:
        out = inner(self, *given)
        counted.append(len(out[1]))
        return out

    monkeypatch.setattr(DecoderLayer, "forward_last", forward_last)
    return counted
