"""Kernels of clusters that hold a row, on a CPU."""

from __future__ import annotations

import pytest

from specengine.kernels.accept import accept_sibling_cuda
from specengine.kernels.sample import draw_siblings_cuda, row_cluster, sample_rows_cuda
from tests.kernels.emulated_cuda import Compiled


def emulate_rows(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls with backend "cuda" run from now on, on small blocks."""
    monkeypatch.setattr(row_cluster, "_WARPS", (2, 8))
    for module in (accept_sibling_cuda, draw_siblings_cuda, sample_rows_cuda):
        monkeypatch.setattr(module, "compiled", compiled)
