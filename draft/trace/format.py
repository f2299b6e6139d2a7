"""The trace format: what each round drafted, and with which probabilities of target and drafter.

docs/laboratory/trace_format.md describes the file. Everything is little-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

MAGIC = b"SPECTRACE"
VERSION = 1
HEADER_SIZE = struct.Struct("<II")  # bytes of the JSON that follows, and its CRC-32
CHUNK_HEAD = struct.Struct("<4sII")  # kind, bytes of the payload, its CRC-32
REQUEST, ROUND, END, FULL = b"REQS", b"RNDS", b"ENDS", b"FULL"
ROUND_COUNTS = struct.Struct("<III")  # records, nodes, tokens

# One request in one round. `position` counts the output tokens before the round. `limit` is the
# most nodes that the request could use, root included. `accepted` is what the verifier decided,
# without the bonus token, before the end of the output cut it.
RECORD = np.dtype(
    [
        ("request", "<u4"),
        ("position", "<u4"),
        ("limit", "<u4"),
        ("num_nodes", "<u2"),
        ("num_tokens", "<u2"),
        ("accepted", "<u2"),
    ]
)
# One drafted node. The root is left out, and is parent 0. NaN where a value is not known.
_NODE = [("token", "<u4"), ("parent", "<u2"), ("target_prob", "<f4"), ("path_prob", "<f4")]
NODE = np.dtype(_NODE)
SAMPLED_NODE = np.dtype([*_NODE, ("draft_prob", "<f4"), ("chance", "<f4"), ("missing", "<f4")])
TOKEN = np.dtype("<u4")
# The end of a request: how many output tokens it has in all.
LAST = np.dtype([("request", "<u4"), ("num_tokens", "<u4")])


def node_dtype(is_sampled: bool) -> Any:
    """is_sampled: drafts are drawn from distributions, which the rules of acceptance weigh."""
    return SAMPLED_NODE if is_sampled else NODE


@dataclass(frozen=True)
class RoundColumns:
    """Rounds of any number, in the order in which they ran.

    records: RECORD [R]. nodes: NODE or SAMPLED_NODE, num_nodes - 1 a record. tokens: TOKEN,
    num_tokens a record, what was emitted.
    """

    records: Array
    nodes: Array
    tokens: Array

    def to_bytes(self) -> bytes:
        counts = ROUND_COUNTS.pack(len(self.records), len(self.nodes), len(self.tokens))
        return counts + self.records.tobytes() + self.nodes.tobytes() + self.tokens.tobytes()

    @classmethod
    def from_bytes(cls, payload: bytes, nodes: Any) -> RoundColumns:
        """nodes: their dtype. Raises ValueError where the sizes do not add up."""
        columns, start = [], ROUND_COUNTS.size
        counts = ROUND_COUNTS.unpack_from(payload)
        for count, dtype in zip(counts, (RECORD, nodes, TOKEN), strict=True):
            columns.append(np.frombuffer(payload, dtype, count, start))
            start += count * dtype.itemsize
        if start != len(payload):
            raise ValueError(f"{len(payload) - start} bytes too many")
        return cls(*columns)
