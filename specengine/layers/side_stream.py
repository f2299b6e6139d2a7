"""Two parts of a forward that do not read each other's results, at the same time on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

# Whether the second part of few rows has a stream of its own: small products do not fill the card.
BESIDE = False
_MOST_ROWS = 256


def both(
    x: Tensor, first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """first(x) and second(x), of x [T, ...]. Inside a capture they are branches of its graph."""
    if not (BESIDE and x.is_cuda and 0 < len(x) <= _MOST_ROWS):
        return first(x), second(x)
    main = torch.cuda.current_stream(x.device)
    side = _stream_beside(x.device, main.cuda_stream)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        found = second(x)
    out = first(x)
    # Before x can be freed, and what was computed here.
    main.wait_stream(side)
    return out, found


@cache
def _stream_beside(device: torch.device, stream: int) -> torch.cuda.Stream:
    """One for each stream: what runs on it must not meet kernels of another one's."""
    made: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return made
