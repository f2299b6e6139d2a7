"""Two parts of a captured forward that do not read each other's results, at the same time on a GPU.

Small products do not fill a GPU, so that those of a shared expert of few rows take hardly any time
beside the experts that are chosen. In the graph they are two branches.

Why the branches are in order:

- The fork and the join are events, whole edges of the graph. A kernel that starts before the one
  ahead has ended (programmatic dependent launch) reads only weights, or what was complete when the
  one ahead started, until it has waited for all kernels that it depends on; the first kernels of
  the branches and the one behind the join do so as well.
- Memory of PyTorch's allocator belongs to the stream that it was allocated on. What the first part
  frees is used again behind it alone, and so is what the second part frees. x and what was
  allocated before outlive the join, as `both` returns behind it. Both parts may fill memory that
  was allocated before, each its own piece. The second part's result is read by the first stream,
  and is given up behind the join: its memory is used again by a later second part at the earliest,
  which the next fork puts behind that reading.
- Products whose sums are split keep counters for each stream (split_sum_triton), and cuBLAS a
  workspace. The warm-up before a capture makes both: it takes the same streams, which nothing else
  in the process has, and captures are made one at a time.

The second stream has no priority: with it, the kernels of a shared expert that is large go before
those that all else waits for (`models-kernels` of benchmarks/results).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from specengine.core.platforms.cuda_streams import capture_streams

_MOST_ROWS = 256  # more fill a GPU by themselves


class _Permission(threading.local):
    is_given = False


_permission = _Permission()


@contextmanager
def side_streams(are_allowed: bool) -> Iterator[None]:
    """Within, and on this thread, `both` may use a second stream: of a capture, and of the warm-up
    before it, on a stream of all SMs. The kernels of a part of the SMs must stay there, and a
    stream beside theirs would have all."""
    _permission.is_given, before = are_allowed, _permission.is_given
    try:
        yield
    finally:
        _permission.is_given = before


def both(
    x: Tensor, first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """first(x) and second(x), of x [T, ...]; where `side_streams` allows it, and for few rows, the
    second on a stream of its own, which ends before the current one goes on."""
    if not (_permission.is_given and x.is_cuda and 0 < len(x) <= _MOST_ROWS):
        return first(x), second(x)
    main = torch.cuda.current_stream(x.device)
    side: Any = capture_streams(x.device.index).beside
    side.wait_stream(main)
    try:
        with torch.cuda.stream(side):
            beside = second(x)
        out = first(x)
    except BaseException:  # x is freed next
        with suppress(RuntimeError):  # of a capture that is invalid by now: the first error counts
            main.wait_stream(side)
        raise
    main.wait_stream(side)
    return out, beside
