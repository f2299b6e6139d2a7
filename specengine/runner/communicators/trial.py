"""Whether a kernel that adds up what two ranks have gives the sums of NCCL."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specengine.core.platform import platform_of
from specengine.kernels.ranks import pair_sum
from specengine.runner.capture import capture

Sum = Callable[[Tensor, Tensor | None], Tensor]  # of x over ranks; and a stream that is added

SIZES = (8, 3 * 576, 4096, 7 * 4096, pair_sum.LARGEST // 4)  # numbers of a sum
_TURNS = 20
_REPLAYS = 5


class Trial:
    """Sums of several sizes and types with and without a stream. Each method raises RuntimeError
    where one has other bits than NCCL's. Both ranks call it; it waits for the other rank as long as
    a sum does."""

    def __init__(
        self, rank: int, device: torch.device, by_nccl: Callable[[Tensor], Tensor]
    ) -> None:
        self._rank, self._device, self._by_nccl = rank, device, by_nccl

    def run_once(self, run: Sum) -> None:
        calls, expected = self._drawn()
        _compare([run(*call) for call in calls], expected)

    def run_in_turns(self, run: Sum) -> None:
        """First each sum by itself, so that a rank that waits in vain does so for one sum, or two;
        then one after another, without a look in between. Ends at the first that differs: `run`
        must not wait for ever."""
        calls, expected = self._drawn()
        for call, one in zip(calls, expected, strict=True):
            _compare([run(*call)], [one])
        for _ in range(_TURNS):
            _compare([run(*call) for call in calls], expected)
            calls, expected = _negated(calls), [-one for one in expected]

    def run_in_graph(self, run: Sum) -> None:
        """As `run_in_turns`, replayed; what is added changes from replay to replay."""
        calls, expected = self._drawn()
        graph, found = capture(
            lambda: [run(*call) for call in calls], None, platform_of(self._device)
        )
        for _ in range(_REPLAYS):
            graph.replay()
            _compare(found, expected)
            expected = [-one for one in expected]
            for given in calls:
                for one in given:
                    if one is not None:
                        one.neg_()

    def _drawn(self) -> tuple[list[tuple[Tensor, Tensor | None]], list[Tensor]]:
        """What is added, and what NCCL gives. Of very different magnitudes: roundings differ."""
        own, shared = (torch.Generator(self._device).manual_seed(seed) for seed in (self._rank, 2))
        calls: list[tuple[Tensor, Tensor | None]] = []
        expected = []
        for dtype in pair_sum.DTYPES:
            for size in SIZES:
                x, stream = (
                    self._numbers(size, own).to(dtype),
                    self._numbers(size, shared).to(dtype),
                )
                calls += [(x, None), (x.clone(), stream)]
                summed = self._by_nccl(x.clone())
                expected += [summed, stream + summed]
        return calls, expected

    def _numbers(self, size: int, makes: torch.Generator) -> Tensor:
        a, b = torch.randn(2, size, generator=makes, device=self._device)
        found: Tensor = a * (4 * b).exp()
        return found


def _negated(calls: list[tuple[Tensor, Tensor | None]]) -> list[tuple[Tensor, Tensor | None]]:
    return [(-x, None if stream is None else -stream) for x, stream in calls]


def _compare(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        if not torch.equal(one, other):
            raise RuntimeError(f"other sums than NCCL's, or none, of {one.numel()} of {one.dtype}")
