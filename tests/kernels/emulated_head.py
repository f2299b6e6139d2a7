"""The head's kernels on a CPU, for all code that asks a head for its best tokens."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from specengine.kernels.cuda.program import PendingKernel
from specengine.kernels.head import head_best, head_best_cuda, head_stream, head_topk_cuda
from tests.kernels.emulated_cuda import Compiled


def emulate_head(compiled: Compiled, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls with backend "cuda" run from now on, on so many blocks."""
    for module in (head_best_cuda, head_topk_cuda):
        monkeypatch.setattr(module, "compiled", compiled)
    for module in (head_best, head_best_cuda, head_topk_cuda):
        monkeypatch.setattr(module, "multiprocessors", lambda _: blocks)


def let_heads_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Hopper with everything installed."""
    for has in ("has_dependent_launch", "has_much_shared"):
        monkeypatch.setattr(head_stream, has, lambda _: True)
    monkeypatch.setattr(head_stream.program, "available", lambda: True)


def forms_asked_for(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Tiles of rows of every form that the kernel of this module is compiled in from now on; none
    runs."""
    asked = set[int]()

    def compiled(
        _: Path, name: str, defines: tuple[tuple[str, int], ...], *__: int
    ) -> PendingKernel:
        asked.add(dict(defines)["NT"])
        return PendingKernel(None)

    monkeypatch.setattr(module, "compiled", compiled)
    return asked
