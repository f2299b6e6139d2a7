"""Reads a trace back, as far as it was written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from specengine.core.errors import DataError
from specengine.draft.trace.format import (
    CHUNK_HEAD,
    END,
    FULL,
    HEADER_SIZE,
    LAST,
    MAGIC,
    RECORD,
    REQUEST,
    ROUND,
    TOKEN,
    VERSION,
    Array,
    RoundColumns,
    node_dtype,
)


@dataclass(frozen=True)
class Trace:
    """requests: what was said of each. ends: LAST, those that came to an end. is_full: the writer
    stopped at its limit. is_cut: the file ends inside a chunk, or in a damaged one; what lies
    before it is here."""

    header: dict[str, Any]
    requests: list[dict[str, Any]]
    rounds: RoundColumns
    ends: Array
    is_full: bool
    is_cut: bool

    @classmethod
    def read(cls, path: Path) -> Trace:
        """Raises DataError where the file is no trace, or of another version."""
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DataError(f"the trace {path} cannot be read: {error}") from error
        header, end = _header(path, data)
        nodes = node_dtype(header["is_sampled"])
        requests: list[dict[str, Any]] = []
        rounds: list[RoundColumns] = []
        ends: list[Array] = []
        is_full = False
        for kind, payload in _chunks(data, end):
            end += CHUNK_HEAD.size + len(payload)
            if kind == REQUEST:
                requests.append(json.loads(payload))
            elif kind == ROUND:
                rounds.append(RoundColumns.from_bytes(payload, nodes))
            elif kind == END:
                ends.append(np.frombuffer(payload, LAST))
            elif kind == FULL:
                is_full = True
            else:
                raise DataError(f"the trace {path} has chunks of an unknown kind {kind!r}")
        joined = _joined(rounds, nodes)
        return cls(header, requests, joined, _concat(ends, LAST), is_full, end < len(data))


def _header(path: Path, data: bytes) -> tuple[dict[str, Any], int]:
    start = len(MAGIC) + HEADER_SIZE.size
    if not data.startswith(MAGIC) or len(data) < start:
        raise DataError(f"{path} is not a trace; `--trace FILE` makes one")
    size, check = HEADER_SIZE.unpack_from(data, len(MAGIC))
    text = data[start : start + size]
    if len(text) < size or crc32(text) != check:
        raise DataError(f"the header of the trace {path} is damaged")
    header: dict[str, Any] = json.loads(text)
    if header["format"] != VERSION:
        raise DataError(f"the trace {path} has format {header['format']}; this reads {VERSION}")
    return header, start + size


def _chunks(data: bytes, start: int) -> Iterator[tuple[bytes, bytes]]:
    """Kind and payload of each whole chunk."""
    while start + CHUNK_HEAD.size <= len(data):
        kind, size, check = CHUNK_HEAD.unpack_from(data, start)
        begin = start + CHUNK_HEAD.size
        payload = data[begin : begin + size]
        if len(payload) < size or crc32(payload) != check:
            return
        start = begin + size
        yield kind, payload


def _joined(rounds: list[RoundColumns], nodes: Any) -> RoundColumns:
    return RoundColumns(
        _concat([one.records for one in rounds], RECORD),
        _concat([one.nodes for one in rounds], nodes),
        _concat([one.tokens for one in rounds], TOKEN),
    )


def _concat(parts: list[Array], dtype: Any) -> Array:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)
