"""What captured rounds take, when nothing else runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specengine.engine.round_form import Form, RoundGraph
from specengine.kernels.accept_chain import RoundState

if TYPE_CHECKING:
    from specengine.engine.graph_round import GraphRound

_TIMED = 4  # replays of a graph whose time is taken; even, since rounds take turns
_ALIGNED = 256  # slots: texts begin where pages do
_BESIDE = 64  # slots behind a text: rounds write there


def seconds_of(flying: GraphRound, form: Form, text: int) -> float:
    """The best of a few replays. text: tokens of each request, at most `most_text`."""
    graph = flying.graph(form)
    flying.rows.zero_()
    given = flying.rows[: form.batch_size], flying.table, flying.state, num_slots(flying), text
    with standing(*given):
        return least_seconds(graph, _TIMED)


def most_text(flying: GraphRound) -> int:
    """0 where there are too few slots."""
    most = num_slots(flying) // _ALIGNED * _ALIGNED - _ALIGNED
    return max(min(flying.table.shape[1], most) - _BESIDE, 0)


def num_slots(flying: GraphRound) -> int:
    """Of the KV pool, the reserved page included."""
    runner = flying.runner
    if not runner.attn_layers:
        return 0
    k_cache, _ = runner.pools.token_to_kv_pool.get_kv_buffer(runner.attn_layers[0].layer_id)
    return len(k_cache)


@contextmanager
def standing(
    rows_B: Tensor, table: Tensor, state: RoundState, slots: int, text: int
) -> Iterator[None]:
    """Rounds meanwhile are of requests that have so many tokens each, in slots of their own as far
    as there are as many: whatever lies there is read, and what is written means nothing. Nobody may
    have a row, or KV. Afterwards all are as empty as before.

    rows_B: of the page table, that rounds take; zeros. table: int32 [rows, context].
    """
    if not text:
        yield
        return
    size, width = len(rows_B), min(text + _BESIDE, table.shape[1])
    each = -(-width // _ALIGNED) * _ALIGNED
    places = max((slots - _ALIGNED) // each, 1)
    rows, device = slice(1, size + 1), table.device
    firsts_B = _ALIGNED + torch.arange(size, device=device) % places * each
    slots_BW = firsts_B[:, None] + torch.arange(width, device=device)
    try:
        table[rows, :width] = slots_BW.clamp(max=slots - 1).int()
        state.lens[rows] = text
        rows_B.copy_(torch.arange(1, size + 1, device=device))
        yield
    finally:
        for one in (rows_B, table[rows], state.lens[rows]):
            one.zero_()


def least_seconds(graph: RoundGraph, replays: int) -> float:
    """Of a replay."""
    times = []
    for _ in range(replays):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return float(min(times))
