"""The trace file: what goes in comes out, as far as it was written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specengine.core.errors import ConfigError, DataError
from specengine.draft.trace.format import NODE, RECORD, TOKEN, RoundColumns
from specengine.draft.trace.reader import Trace
from specengine.draft.trace.writer import TraceWriter

HEADER = {"is_sampled": False, "model": "tiny"}


def columns(request: int, drafted: int) -> RoundColumns:
    records = np.array([(request, 7, 20, drafted + 1, 2, 1)], RECORD)
    nodes = np.array([(40 + i, i, 0.5, 0.25) for i in range(drafted)], NODE)
    return RoundColumns(records, nodes, np.array([40, 41], TOKEN))


def write(path: Path, rounds: int, max_bytes: int = 1 << 20) -> TraceWriter:
    writer = TraceWriter(path, HEADER, max_bytes)
    writer.add_request({"rid": "a"})
    for count in range(rounds):
        writer.add_round(columns(0, count))
    return writer


def test_rounds_come_back(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    writer = write(path, 3)
    writer.add_end(0, 13)
    writer.close()
    trace = Trace.read(path)
    assert trace.header == {"format": 1, **HEADER}
    assert trace.requests == [{"rid": "a"}]
    assert trace.ends.tolist() == [(0, 13)]
    assert trace.rounds.records["num_nodes"].tolist() == [1, 2, 3]
    assert trace.rounds.nodes["token"].tolist() == [40, 40, 41]
    assert trace.rounds.tokens.tolist() == [40, 41] * 3
    assert not trace.is_full
    assert not trace.is_cut


def test_every_cut_leaves_the_rounds_before_it(tmp_path: Path) -> None:
    path, cut = tmp_path / "trace", tmp_path / "cut"
    write(path, 1).close()
    first = path.stat().st_size
    path.unlink()
    write(path, 2).close()
    data = path.read_bytes()
    for size in range(first, len(data) + 1):
        cut.write_bytes(data[:size])
        trace = Trace.read(cut)
        assert len(trace.rounds.records) == (2 if size == len(data) else 1)
        assert trace.is_cut == (first < size < len(data))


def test_a_damaged_round_ends_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    write(path, 2).close()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    trace = Trace.read(path)
    assert len(trace.rounds.records) == 1
    assert trace.is_cut


def test_a_full_trace_says_so_and_stays_within_its_size(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    writer = write(path, 100, max_bytes=1000)
    writer.close()
    assert writer.is_full
    assert path.stat().st_size <= 1000
    trace = Trace.read(path)
    assert trace.is_full
    assert not trace.is_cut
    assert 2 < len(trace.rounds.records) < 100


def test_a_file_that_is_there_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="is there already"):
        TraceWriter(path, HEADER, 1000)
    assert path.read_text() == "mine"


@pytest.mark.parametrize("data", [b"", b"SPECTRACE", b"something else altogether"])
def test_other_files_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "trace"
    path.write_bytes(data)
    with pytest.raises(DataError, match="is not a trace"):
        Trace.read(path)


def test_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    TraceWriter(path, {**HEADER, "format": 2}, 1000).close()
    with pytest.raises(DataError, match="format 2"):
        Trace.read(path)
