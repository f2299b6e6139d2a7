"""What a device can do at most: bytes and operations a second, measured in a moment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch

_SECONDS = 0.15  # of each measurement


@dataclass(frozen=True)
class Card:
    """copy: bytes a second, those read and those written together. matmul: operations a second of a
    large matrix product in `dtype`, a multiplication and an addition counted as two."""

    name: str
    dtype: str
    copy: float
    matmul: float
    is_copy_given: bool = False

    def seconds(self, num_bytes: float, operations: float = 0.0) -> float:
        """The least time that this takes."""
        return max(num_bytes / self.copy, operations / self.matmul)


def card_line(card: Card) -> str:
    return (
        f"{card.name}: copy {card.copy / 1e12:.2f} TB/s{' (given)' if card.is_copy_given else ''}, "
        f"{card.dtype} product {card.matmul / 1e12:.3g} Tflop/s."
    )


def measure_card(device: torch.device, dtype: torch.dtype, copy: float | None = None) -> Card:
    """copy: what to take instead of measuring, in bytes a second."""
    is_cuda = device.type == "cuda"
    return Card(
        name=torch.cuda.get_device_name(device) if is_cuda else "CPU",
        dtype=str(dtype).removeprefix("torch."),
        copy=copy or _copy_rate(device, (1 << 30) if is_cuda else (1 << 26)),
        matmul=_matmul_rate(device, dtype, 8192 if is_cuda else 512),
        is_copy_given=copy is not None,
    )


def _copy_rate(device: torch.device, num_bytes: int) -> float:
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / _best_seconds(device, lambda: target.copy_(source))


def _matmul_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    a = torch.randn(size, size, device=device).to(dtype)
    b, out = torch.randn_like(a), torch.empty_like(a)
    return 2 * size**3 / _best_seconds(device, lambda: torch.mm(a, b, out=out))


def _best_seconds(device: torch.device, run: Callable[[], object]) -> float:
    """Of one run, the best of some."""
    _timed(device, run)
    best, start = float("inf"), perf_counter()
    while perf_counter() - start < _SECONDS:
        best = min(best, _timed(device, run))
    return best


def _timed(device: torch.device, run: Callable[[], object]) -> float:
    if device.type != "cuda":
        start = perf_counter()
        run()
        return perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000
