"""What a layer of the gated delta rule reads, keeps of each request, and keeps of verified nodes.

Shape legend, beside that of core/batch.py: G key heads, M value heads (a multiple of G), C channels
of the convolution, K and E dimensions of a key and of a value, P slots of the state pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

CHUNK = 64  # tokens of a prompt that are solved for together


@dataclass(frozen=True)
class DeltaShape:
    """Sizes of a layer. Value heads that read one key head lie side by side."""

    num_key_heads: int
    num_heads: int  # of values, and of the state
    key_dim: int
    value_dim: int
    conv_width: int  # inputs that each output of the convolution sees, its own included

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def channels(self) -> int:
        """C: queries, keys, values."""
        return 2 * self.key_size + self.value_size

    @property
    def group(self) -> int:
        """Value heads of each key head."""
        return self.num_heads // self.num_key_heads


@dataclass(frozen=True)
class DeltaWeights:
    conv_CW: Tensor  # [C, conv_width], the oldest input first
    decay_log_M: Tensor  # log of the decay's rate
    time_bias_M: Tensor


@dataclass(frozen=True)
class DeltaInputs:
    """Projections of T tokens."""

    mixed_TC: Tensor  # before the convolution: queries, keys, values
    write_TM: Tensor  # before the sigmoid: how much of a value is written
    decay_TM: Tensor  # before the softplus: how much of the state is kept


@dataclass(frozen=True)
class DeltaState:
    """What a layer keeps of the text before the next token, one slot a request."""

    inputs: Tensor  # [P, conv_width - 1, C], the last inputs of the convolution, the oldest first
    memory: Tensor  # float32 [P, M, K, E]


@dataclass(frozen=True)
class NodeUpdates:
    """How each verified node changes the state of its parent, one row a node::

        memory = decay * memory + key outer delta

    So a node's state follows from the state before the tree and the updates along its path. They
    are a node's checkpoint, in K + E + 1 numbers a head instead of K * E.
    """

    inputs: Tensor  # [N, C]
    keys: Tensor  # float32 [N, G, K], of length 1
    deltas: Tensor  # float32 [N, M, E]
    decays: Tensor  # float32 [N, M]


@dataclass(frozen=True)
class NodeBatch:
    """The nodes of a verification; a decode is one node a request, the root.

    Node i of request b is row starts[b] + i. It sees the nodes before it, or under a tree those of
    its row of mask_BNN, whose numbers rise along a path.
    """

    rows_B: Tensor  # int64, slots of the state pool; 0 pads
    starts: Tensor  # int64 [B + 1]
    width: int  # nodes of a request at most
    mask_BNN: Tensor | None = None  # bool; of trees


@dataclass(frozen=True)
class Save:
    """Keep the state behind the first `length` of a request's new tokens in a slot."""

    request: int  # index into the batch
    length: int
    slot: int


def _sent(values: Tensor, device: torch.device) -> Tensor:
    """values, of the host, on the device. The host does not wait: a copy from pageable memory would
    wait for all that the stream was given, which beside rounds is another prompt's layers."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class PromptBatch:
    """Whole runs of tokens, all of which are kept, several a request. lens, prefix_lens: of the
    host. A request without tokens before these has nothing in its slot yet."""

    rows_B: Tensor  # int64, slots of the state pool
    lens: Sequence[int]
    prefix_lens: Sequence[int]
    saves: Sequence[Save] = ()  # rising within a request

    @cached_property
    def places(self) -> PromptPlaces:
        """The same on the device, made once for all layers of a forward."""
        saves: list[list[Save]] = [[] for _ in self.lens]
        for one in self.saves:
            saves[one.request].append(one)
        width = max(map(len, saves))
        nothing = Save(0, 0, 0)
        padded = [[*found, *[nothing] * (width - len(found))] for found in saves]
        starts = [0, *accumulate(self.lens)]
        given = [
            starts,
            [int(one == 0) for one in self.prefix_lens],
            [one.length for found in padded for one in found],
            [one.slot for found in padded for one in found],
        ]
        packed = torch.tensor([number for column in given for number in column], dtype=torch.int64)
        columns = torch.split(_sent(packed, self.rows_B.device), [len(one) for one in given])
        starts_device, are_new, save_lens, save_slots = columns
        requests = torch.repeat_interleave(starts_device.diff(), output_size=starts[-1])
        return PromptPlaces(starts_device, are_new, save_lens, save_slots, width, requests)

    @cached_property
    def chunks(self) -> PromptChunks:
        """The requests' tokens in chunks, which end at saves too. Made once for all layers of a
        forward."""
        table, firsts = list[list[int]](), [0]
        for index, count in enumerate(self.lens):
            ends = {one.length: one.slot for one in self.saves if one.request == index}
            start = 0
            for end in sorted({*ends, count}):
                for first in range(start, end, CHUNK):
                    last = min(first + CHUNK, end)
                    slot = ends.get(end, -1) if last == end else -1
                    table.append([index, first, last - first, slot])
                start = end
            firsts.append(len(table))
        numbers = [number for row in table for number in row]
        packed = torch.tensor([*numbers, *firsts], dtype=torch.int64)
        packed = _sent(packed, self.rows_B.device)
        return PromptChunks(packed[: 4 * len(table)].view(-1, 4), packed[4 * len(table) :])


@dataclass(frozen=True)
class PromptChunks:
    """int64 [N, 4]: a chunk's request, its first token within that, its tokens, and the slot for
    the state behind it, -1 for none. firsts: int64 [B + 1], chunks of request b are firsts[b] ..
    firsts[b + 1] - 1."""

    table: Tensor
    firsts: Tensor


@dataclass(frozen=True)
class PromptPlaces:
    """int64. S saves of each request at most; those that there are not have the length 0."""

    starts: Tensor  # [B + 1]
    are_new: Tensor  # [B]
    save_lens: Tensor  # [B * S]
    save_slots: Tensor  # [B * S]
    num_saves: int  # S
    requests: Tensor  # [T], of each token


@dataclass(frozen=True)
class StatePaths:
    """Which nodes of each request are accepted."""

    rows_B: Tensor  # int64, slots of the state pool; row 0 pads
    starts_B: Tensor  # int64, row of each root among the updates
    accepted_B: Tensor  # int64, accepted nodes below the root
    nodes_BW: Tensor | None  # int64, the path, the root first; None: nodes 0 .. W - 1
    width: int  # W, above every accepted_B
