"""What graphs take on a card that other processes use, too."""

from __future__ import annotations

import pytest

from specengine.core.platforms.cuda import CudaPlatform


def count_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on graphs take what this process's allocator holds more. What the card has less
    changes with whatever other processes do: tests run several to a card."""
    monkeypatch.setattr(CudaPlatform, "free_memory", lambda _: 0)
