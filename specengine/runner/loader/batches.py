"""From a list of moves to batches: bytes of one file that are read together, and what becomes of
them. Nothing is read here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from specengine.layers.moves import Move
from specengine.runner.loader.mapped_files import FileSpan, num_bytes_spanned

ALIGNMENT = 512  # bytes; where reads begin in a buffer

Find = Callable[[Tensor], FileSpan | None]


@dataclass(frozen=True)
class Read:
    """Bytes `start` to `stop` of the file, to a buffer from byte `at`."""

    start: int
    stop: int
    at: int

    @property
    def end(self) -> int:
        """Behind its last byte in the buffer."""
        return self.at + self.stop - self.start


@dataclass(frozen=True)
class Piece:
    """A move whose tensor begins at byte `start` of the file and at byte `at` of a buffer, a
    multiple of its element's size. It has the strides of the file there."""

    move: Move
    start: int
    at: int


@dataclass
class Batch:
    """Pieces of one file, and the reads that bring all of their bytes into one buffer."""

    path: Path
    reads: list[Read] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Bytes of the buffer that are used."""
        return self.reads[-1].end if self.reads else 0


def batches_of(moves: Sequence[Move], find: Find, limit: int) -> list[Batch]:
    """In the files' order, none of more than `limit` bytes. A move of more is cut into several.
    Bytes that several pieces read, such as rows of which each has every other, are read once.
    find: where a move's tensor lies; it has to be known."""
    found = [(_known(find, one.tensor), one) for move in moves for one in _cut(move, limit)]
    found.sort(key=lambda pair: (pair[0].path, pair[0].start, pair[0].stop))
    batches: list[Batch] = []
    for span, move in found:
        if not batches or not _put(batches[-1], span, move, limit):
            batches.append(Batch(span.path))
            _put(batches[-1], span, move, limit)
    return batches


def _known(find: Find, tensor: Tensor) -> FileSpan:
    span = find(tensor)
    assert span is not None, "a mover is given what it owns"
    return span


def _cut(move: Move, limit: int) -> Iterator[Move]:
    """Halves of halves, along the dimension whose entries lie farthest apart in the file."""
    tensor = move.tensor
    if not tensor.numel():
        return
    if num_bytes_spanned(tensor) <= limit:
        yield move
        return
    reach = [(size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
    dim = reach.index(max(reach))
    count = tensor.shape[dim]
    for start, size in ((0, count // 2), (count // 2, count - count // 2)):
        place, part = move.place.narrow(dim, start, size), tensor.narrow(dim, start, size)
        yield from _cut(Move(move.name, place, part), limit)


def _put(batch: Batch, span: FileSpan, move: Move, limit: int) -> bool:
    """False where it does not fit. Spans come in ascending order of their starts."""
    if span.path != batch.path:
        return False
    last = batch.reads[-1] if batch.reads else None
    joins = last is not None and span.start <= last.stop
    if last is not None and joins and not (span.start - last.start) % move.tensor.element_size():
        read = replace(last, stop=max(last.stop, span.stop))
        if read.end > limit:
            return False
        batch.reads[-1] = read
    else:
        at = -(-batch.size // ALIGNMENT) * ALIGNMENT
        read = Read(span.start, span.stop, at)
        if read.end > limit:
            return False
        batch.reads.append(read)
    batch.pieces.append(Piece(move, span.start, read.at + span.start - read.start))
    return True
