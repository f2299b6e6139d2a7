"""Writes a trace, a round at a time."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from specengine.core.errors import ConfigError
from specengine.draft.trace.format import (
    CHUNK_HEAD,
    END,
    FULL,
    HEADER_SIZE,
    LAST,
    MAGIC,
    REQUEST,
    ROUND,
    VERSION,
    RoundColumns,
)

logger = logging.getLogger(__name__)


class TraceWriter:
    """Appends whole chunks and hands each to the operating system at once: what was written stays
    readable when the process dies. Past `max_bytes` it writes that it stopped, and stops."""

    def __init__(self, path: Path, header: dict[str, Any], max_bytes: int) -> None:
        """Raises ConfigError where the file is there already or cannot be made."""
        self.path = path
        self.is_full = False
        self._max_bytes = max_bytes
        try:
            self._file = path.open("xb")
        except FileExistsError as error:
            raise ConfigError(
                f"--trace {path} is there already and is kept; give another name"
            ) from error
        except OSError as error:
            raise ConfigError(f"--trace {path} cannot be written: {error}") from error
        text = json.dumps({"format": VERSION, **header}).encode()
        self._size = 0
        self._append(MAGIC + HEADER_SIZE.pack(len(text), crc32(text)) + text)

    def add_round(self, columns: RoundColumns) -> None:
        self._add_chunk(ROUND, columns.to_bytes())

    def add_request(self, about: dict[str, Any]) -> None:
        """Requests are numbered from 0, in the order in which they are added."""
        self._add_chunk(REQUEST, json.dumps(about).encode())

    def add_end(self, request: int, num_tokens: int) -> None:
        self._add_chunk(END, np.array([(request, num_tokens)], LAST).tobytes())

    def close(self) -> None:
        with suppress(OSError):  # of a disk that was full
            self._file.close()

    def _add_chunk(self, kind: bytes, payload: bytes) -> None:
        if self.is_full or self._file.closed:
            return
        room = self._max_bytes - self._size - CHUNK_HEAD.size
        if len(payload) + CHUNK_HEAD.size > room:  # leave room for the last word
            self.is_full = True
            kind, payload = FULL, b""
            logger.warning(
                "the trace %s is full and stops here; --trace-max-mb gives it more room", self.path
            )
        self._append(CHUNK_HEAD.pack(kind, len(payload), crc32(payload)) + payload)

    def _append(self, data: bytes) -> None:
        """A disk that takes no more ends the trace and nothing else."""
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            self.is_full = True
            logger.warning("the trace %s ends here: %s", self.path, error)
            return
        self._size += len(data)
