"""What graphs of forwards take from the host: views of one buffer of integers, which crosses to the
device in one copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from specengine.core.batch import ModelWorkerBatch
from specengine.core.columns import columns_size, joined_columns, parted_columns
from specengine.runner.forward_graphs.keys import ForwardKey, PrefillKey

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class PrefillInputs:
    """Inputs of a prefill of T tokens and R requests, int64.

    Padding tokens belong to request R, which uses row 0 of the page table. They attend to
    themselves: rows that attention skips would keep old values of the buffer, and a NaN written
    to slot 0 would stay there. Padding requests have no tokens.
    """

    tokens_T: Tensor
    requests_T: Tensor
    positions_T: Tensor
    rows: Tensor  # [R + 1] of the page table
    seq_lens: Tensor  # [R + 1]
    qo_indptr: Tensor  # [R + 2]
    logits_rows: Tensor  # [R]

    @classmethod
    def of(cls, buffer: Tensor, key: PrefillKey) -> PrefillInputs:
        sizes = _prefill_sizes(key)
        return cls(*parted_columns(buffer[: columns_size(sizes)], sizes))


def _prefill_sizes(key: PrefillKey) -> list[int]:
    requests = key.requests + 1
    return [key.tokens] * 3 + [requests, requests, requests + 1, key.requests]


def num_prefill_inputs(key: PrefillKey) -> int:
    return columns_size(_prefill_sizes(key))


def pack_prefill(batch: ModelWorkerBatch, key: PrefillKey) -> Ints:
    """The values of PrefillInputs for a batch that fits the key, in the order of the fields."""
    requests, spare = key.requests, key.tokens - batch.num_tokens
    counts, prefixes = np.array((batch.extend_lens, batch.prefix_lens), dtype=np.int64)
    ends = counts.cumsum()
    positions = (prefixes - ends + counts).repeat(counts) + np.arange(batch.num_tokens)
    seq_lens = _padded(prefixes + counts, requests + 1)
    seq_lens[requests] = spare
    starts = _padded(ends - counts, requests + 2, ends[-1])
    starts[-1] = key.tokens
    return joined_columns(
        (
            _padded(batch.input_ids.numpy(), key.tokens),
            _padded(np.arange(len(counts)).repeat(counts), key.tokens, requests),
            np.concatenate((positions, np.arange(spare))),
            _padded(batch.req_pool_indices, requests + 1),
            seq_lens,
            starts,
            _padded(batch.logits_rows or (), requests),
        )
    )


@dataclass(frozen=True)
class ForwardInputs:
    """Inputs of a ragged forward of N requests and T tokens, int64."""

    rows_N: Tensor  # of the page table
    prefix_lens_N: Tensor
    extend_lens_N: Tensor
    seq_lens_N: Tensor
    logits_rows_N: Tensor
    qo_indptr: Tensor  # [N + 1]
    row_T: Tensor  # of the page table
    place_T: Tensor  # where in its row a token's KV slot is
    base_T: Tensor  # position of the depth 0 of a token's tree
    token_T: Tensor
    depth_T: Tensor

    @classmethod
    def of(cls, buffer: Tensor, key: ForwardKey) -> ForwardInputs:
        return cls(*parted_columns(buffer, _forward_sizes(key)))


def _forward_sizes(key: ForwardKey) -> list[int]:
    return [key.num_requests] * 5 + [key.num_requests + 1] + [key.num_tokens] * 5


def num_forward_inputs(key: ForwardKey) -> int:
    return columns_size(_forward_sizes(key))


def pack_forward(batch: ModelWorkerBatch, tokens: Tensor, key: ForwardKey) -> Ints:
    """The values of ForwardInputs, in the order of the fields. Tokens and depths that lie on a
    device are left zero."""
    spare, past = key.num_tokens - batch.num_tokens, key.num_past or 0
    filling = [min(key.width, spare - done) for done in range(0, spare, key.width)]
    others = key.num_requests - batch.batch_size
    counts = _ints([*batch.extend_lens, *filling, *[0] * (others - len(filling))])
    rows = _ints([*batch.req_pool_indices, *[0] * others])
    prefix = _ints([*batch.prefix_lens, *[past] * others])
    indptr = np.concatenate(([0], counts.cumsum()))
    first_T, row_T = prefix.repeat(counts), rows.repeat(counts)
    place_T = first_T + np.arange(key.num_tokens) - indptr[:-1].repeat(counts)
    chosen = _padded(batch.logits_rows or (), key.num_requests)
    depths = () if batch.tree is None else _on_host(batch.tree.depths_T)
    columns = [
        *(rows, prefix, counts, prefix + counts, chosen, indptr, row_T, place_T, first_T - past),
        _padded(_on_host(tokens), key.num_tokens),
        _padded(depths, key.num_tokens),
    ]
    return joined_columns(columns)


def _ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int64)


def _on_host(values: Tensor) -> Any:
    return values.numpy() if values.device.type == "cpu" else ()


def _padded(values: ArrayLike, size: int, padding: int = 0) -> Ints:
    out = np.full(size, padding, dtype=np.int64)
    found = np.asarray(values, dtype=np.int64)
    out[: len(found)] = found
    return out
