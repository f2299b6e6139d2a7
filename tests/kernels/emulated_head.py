"""The head's kernel on a CPU, for whoever asks a head for its best tokens."""

from __future__ import annotations

import pytest

from specengine.kernels import head_best, head_best_cuda
from tests.kernels.emulated_cuda import Compiled


def emulate_head(compiled: Compiled, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls with backend "cuda" run from now on, on so many blocks."""
    monkeypatch.setattr(head_best_cuda, "compiled", compiled)
    for module in (head_best, head_best_cuda):
        monkeypatch.setattr(module, "multiprocessors", lambda _: blocks)


def let_heads_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Hopper with everything installed."""
    for has in ("has_dependent_launch", "has_much_shared"):
        monkeypatch.setattr(head_best, has, lambda _: True)
    monkeypatch.setattr(head_best.program, "available", lambda: True)
