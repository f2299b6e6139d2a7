"""Rounds as columns: what a recorder notes of each, and the table that statistics are made from.

Position d of a round (1, 2, …) is the d-th drafted token below the root. It is *tried* where all
above it was accepted, something was drafted there, and the answer had not ended before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class RoundChunk:
    """One round of a batch of B requests, as decided; its tokens are not cut yet."""

    request: Array  # int64 [B], the recorder's number of each request
    start: Array  # int64 [B], output tokens before the round
    context: Array  # int64 [B], tokens up to the root, which is included
    num_drafted: Array  # int64 [B]
    goes_on: Array  # bool [B], something was drafted below the last accepted node
    lengths: Array  # int64 [B], tokens decided: the accepted ones, and the bonus
    tokens: Array  # int64, theirs, one request after another
    entropy: Array  # float32, in nats, of the target's distribution of each of these tokens
    nodes: NodeChunk | None = None  # where the drafter says how sure it is


@dataclass(frozen=True)
class NodeChunk:
    """Drafted nodes, the root left out."""

    row: Array  # int64, index of the round
    confidence: Array  # float32 in 0..1, that the whole path down to the node is accepted
    stood: Array  # bool, the node was accepted


@dataclass(frozen=True)
class RoundTable:
    """n rounds, W places wide: place d - 1 holds position d; the bonus follows the last accepted
    one."""

    request: Array  # int64 [n]
    context: Array  # int64 [n]
    num_drafted: Array  # int64 [n]
    emitted: Array  # int64 [n], tokens that reached the answer
    stood: Array  # int64 [n], accepted tokens among them
    tried: Array  # int64 [n], positions tried
    is_cut: Array  # bool [n], the answer ended before the last token decided
    tokens: Array  # int64 [n, W], -1 beyond
    entropy: Array  # float32 [n, W], NaN beyond
    nodes: NodeChunk  # of rounds that were not cut

    def __len__(self) -> int:
        return len(self.request)


def build_table(chunks: list[RoundChunk], final_lens: Array) -> RoundTable:
    """final_lens [R]: output tokens that each request ended with. What a round emitted is how far
    the output had come when the next one began."""
    if not chunks:
        chunks = [_no_rounds()]
    request, start, context, num_drafted, goes_on, lengths = (
        np.concatenate([getattr(chunk, name) for chunk in chunks])
        for name in ("request", "start", "context", "num_drafted", "goes_on", "lengths")
    )
    emitted = _ends(request, start, final_lens) - start
    is_cut = emitted < lengths
    stood = np.where(is_cut, emitted, lengths - 1)
    return RoundTable(
        request=request,
        context=context,
        num_drafted=num_drafted,
        emitted=emitted,
        stood=stood,
        tried=stood + (goes_on & ~is_cut),
        is_cut=is_cut,
        tokens=_padded(np.concatenate([chunk.tokens for chunk in chunks]), lengths, -1),
        entropy=_padded(np.concatenate([chunk.entropy for chunk in chunks]), lengths, np.nan),
        nodes=_joined_nodes(chunks, is_cut),
    )


def _ends(request: Array, start: Array, final_lens: Array) -> Array:
    """Of each round, where the next one of its request starts, or where the request ended."""
    order = np.lexsort((start, request))
    ends = final_lens[request]
    same = request[order][1:] == request[order][:-1]
    ends[order[:-1][same]] = start[order[1:][same]]
    return ends


def _padded(flat: Array, lengths: Array, fill: float) -> Array:
    width = int(lengths.max(initial=1))
    padded = np.full((len(lengths), width), fill, dtype=flat.dtype)
    padded[np.arange(width) < lengths[:, None]] = flat
    return padded


def _joined_nodes(chunks: list[RoundChunk], is_cut: Array) -> NodeChunk:
    first_rows = np.cumsum([0, *(len(chunk.request) for chunk in chunks)])
    found = [
        NodeChunk(chunk.nodes.row + first, chunk.nodes.confidence, chunk.nodes.stood)
        for chunk, first in zip(chunks, first_rows, strict=False)
        if chunk.nodes is not None
    ] or [_no_nodes()]
    row, confidence, stood = (
        np.concatenate([getattr(nodes, name) for nodes in found])
        for name in ("row", "confidence", "stood")
    )
    seen = ~is_cut[row]
    return NodeChunk(row[seen], confidence[seen], stood[seen])


def _no_nodes() -> NodeChunk:
    return NodeChunk(np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, bool))


def _no_rounds() -> RoundChunk:
    none = np.empty(0, np.int64)
    return RoundChunk(
        none, none, none, none, np.empty(0, bool), none, none, np.empty(0, np.float32)
    )
