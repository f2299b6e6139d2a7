"""Which multiprocessor has which share of a kernel whose blocks exchange values all the time.

How long values travel hangs on where blocks sit. Hardware deals blocks out by turns among clusters
of multiprocessors, which is good, but begins with another cluster now and then: on one H200 rounds
of 8 rows of a 135M model took 331 or 346 us, for a whole answer or a part of it. So a few ways to
sit are tried once, and the best is kept to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import cache

import torch

MOST_SMS = 1024  # as in sm_placement.cuh
_APART = 2  # between the ways that are tried: multiprocessors come in pairs
_PASSES = 2  # over all ways: clocks may rise meanwhile
_TIMED = 2  # launches


class SMPlacement:
    """numbers: int32 [MOST_SMS], of blocks by multiprocessor, -1 where that is not said.
    taken, seen: int32 [blocks], of the kernel (sm_placement.cuh). Launches that may overlap must
    not share `taken`. Raises RuntimeError in a capture, whose replays would make them anew."""

    def __init__(self, blocks: int, device: torch.device) -> None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("run the kernel once before capturing it: its blocks need numbers")
        self.numbers = torch.full((MOST_SMS,), -1, dtype=torch.int32, device=device)
        self.taken = torch.zeros(blocks, dtype=torch.int32, device=device)
        self.seen = torch.full((blocks,), -1, dtype=torch.int32, device=device)
        self.are_chosen = device.type != "cuda"

    @classmethod
    @cache
    def of(cls, kernel: Hashable, blocks: int, device: torch.device) -> SMPlacement:
        """kernel: whatever launches have in common for which one choice is made."""
        return cls(blocks, device)

    @torch.inference_mode()
    def choose(
        self, launch: Callable[[], object], seconds: Callable[[Callable[[], object]], float]
    ) -> None:
        """Place blocks in the order in which they came by themselves, from the first block on for
        which that is fastest.

        launch: the kernel, with a block on each multiprocessor; it may run again and again, and its
        blocks wait for each other as they will later.
        seconds: that a launch takes. Where two blocks had one multiprocessor, they sit as they
        like."""
        self.are_chosen = True
        launch()
        seen = self.seen.tolist()
        if len(set(seen)) < len(seen) or not 0 <= min(seen) <= max(seen) < MOST_SMS:
            return

        ways = [seen[first:] + seen[:first] for first in range(0, len(seen), _APART)]
        best = [math.inf] * len(ways)
        for _ in range(_PASSES):
            for place, way in enumerate(ways):
                self._sit(way)
                best[place] = min(best[place], seconds(launch))
        self._sit(ways[best.index(min(best))])

    def _sit(self, order: Sequence[int]) -> None:
        """order: multiprocessors by number."""
        numbers = torch.full((MOST_SMS,), -1, dtype=torch.int32)
        numbers[torch.tensor(order)] = torch.arange(len(order), dtype=torch.int32)
        self.numbers.copy_(numbers)


def seconds_of_launch(launch: Callable[[], object]) -> float:
    """Seconds of one of a few launches in a row, the host being ahead."""
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    launch()
    start.record()
    for _ in range(_TIMED):
        launch()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / _TIMED
