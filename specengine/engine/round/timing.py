"""How long captured rounds take when nothing else runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from specengine.core.platform import Graph, Platform
from specengine.engine.round.executor import RoundExecutor
from specengine.kernels.accept.types import RoundState

_REPLAYS = 4  # of a graph that is timed; even, since rounds take turns
_ALIGNED = 256  # slots: contexts begin where pages do
_APART = 7919  # step between the tokens of two synthetic requests
_BESIDE = 64  # slots behind a context, where rounds write


def seconds_of(
    rounds: RoundExecutor,
    batch_size: int,
    num_steps: int,
    num_nodes: int | None = None,
    context: int = 0,
) -> float:
    """The best of a few replays, on requests of so many tokens, at most `max_context`, whose last
    tokens differ: rows of one token would all choose the same experts, and read fewer than rounds
    do."""
    key = rounds.plain_key(batch_size, num_steps, num_nodes)
    graph = rounds.graph(key)
    rounds.clear_rows()
    with pretend_context(
        rounds.rows[:batch_size], rounds.table, rounds.state, num_kv_slots(rounds), context
    ):
        return least_seconds(
            graph.graph,
            _REPLAYS,
            rounds.runner.platform,
            before=lambda: _pretend_tokens(rounds, batch_size),
        )


def _pretend_tokens(rounds: RoundExecutor, batch_size: int) -> None:
    """Give each request another root, and other drafts where the host finds them."""
    state, vocab = rounds.state, rounds.runner.model.vocab_size
    places = torch.arange(len(state.roots), device=state.roots.device)
    state.roots.copy_(places * _APART % vocab)
    rounds.source.pretend(batch_size, vocab)


def max_context(rounds: RoundExecutor) -> int:
    """The longest context of a request that can be timed; 0 where there are too few slots."""
    most = num_kv_slots(rounds) // _ALIGNED * _ALIGNED - _ALIGNED
    return max(min(rounds.table.shape[1], most) - _BESIDE, 0)


def num_kv_slots(rounds: RoundExecutor) -> int:
    """Slots of the KV pool, the reserved page included."""
    runner = rounds.runner
    if not runner.attn_layers:
        return 0
    k_cache, _ = runner.pools.token_to_kv_pool.get_kv_buffer(runner.attn_layers[0].layer_id)
    return len(k_cache)


@contextmanager
def pretend_context(
    rows_B: Tensor, table: Tensor, state: RoundState, slots: int, context: int
) -> Iterator[None]:
    """Rounds inside see requests of so many tokens each, in slots of their own as far as the pool
    has as many: requests that share slots attend to the same KV, and choose the same experts. They
    read whatever lies there, and what they write means nothing; of no context, nodes beyond _BESIDE
    write to slot 0. No request may have a row, or KV. Afterwards all rows are as empty as before.

    rows_B: of the page table, that rounds take; zeros. table: int32 [rows, context length].
    """
    size, width = len(rows_B), min(context + _BESIDE, table.shape[1])
    each = -(-width // _ALIGNED) * _ALIGNED
    places = max((slots - _ALIGNED) // each, 1)
    count = min(size, len(table) - 1)  # requests beyond take rows of others again
    rows, device = slice(1, count + 1), table.device
    firsts_B = _ALIGNED + torch.arange(count, device=device) % places * each
    slots_BW = firsts_B[:, None] + torch.arange(width, device=device)
    try:
        table[rows, :width] = slots_BW.clamp(max=max(slots - 1, 0)).int()
        state.lens[rows] = context
        rows_B.copy_(1 + torch.arange(size, device=device) % max(count, 1))
        yield
    finally:
        for one in (rows_B, table[rows], state.lens[rows], state.roots):
            one.zero_()


def least_seconds(
    graph: Graph, replays: int, platform: Platform, before: Callable[[], None] = lambda: None
) -> float:
    """Seconds of a replay. before: called ahead of each, not timed."""
    times = []
    for _ in range(replays):
        before()
        start, end = platform.new_event(timing=True), platform.new_event(timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return float(min(times))
