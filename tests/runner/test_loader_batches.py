from __future__ import annotations

import random
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from specengine.layers.moves import Move
from specengine.runner.loader.batches import ALIGNMENT, Batch, Read, batches_of
from specengine.runner.loader.mapped_files import FileSpan, MappedFiles, num_bytes_spanned


def _mapped(folder: Path, **tensors: Tensor) -> tuple[MappedFiles, dict[str, Tensor]]:
    save_file(tensors, folder / "model.safetensors")
    files = MappedFiles()
    return files, dict(files.tensors(folder / "model.safetensors"))


def _move(tensor: Tensor, name: str = "one") -> Move:
    return Move(name, torch.empty(tensor.shape, dtype=tensor.dtype), tensor)


def _bytes(batches: list[Batch]) -> int:
    return sum(read.stop - read.start for batch in batches for read in batch.reads)


def test_neighbours_in_the_file_are_one_read(tmp_path: Path) -> None:
    files, tensors = _mapped(tmp_path, a=torch.ones(8, 4), b=torch.ones(16), c=torch.ones(4))
    moves = [_move(one, name) for name, one in tensors.items()]
    (batch,) = batches_of(moves, files.find, 1 << 20)
    assert [read.stop - read.start for read in batch.reads] == [4 * (32 + 16 + 4)]
    assert [piece.at for piece in batch.pieces] == [0, 128, 192]


def test_rows_that_take_turns_are_read_once(tmp_path: Path) -> None:
    files, tensors = _mapped(tmp_path, a=torch.ones(64, 4))
    moves = [_move(tensors["a"][::2]), _move(tensors["a"][1::2])]
    assert _bytes(batches_of(moves, files.find, 1 << 20)) == 64 * 4 * 4


def test_only_the_rows_of_a_rank_are_read(tmp_path: Path) -> None:
    files, tensors = _mapped(tmp_path, a=torch.ones(64, 4), b=torch.ones(8, 4))
    moves = [_move(tensors["a"].narrow(0, 16, 16)), _move(tensors["b"].narrow(0, 0, 4))]
    (batch,) = batches_of(moves, files.find, 1 << 20)
    assert [read.stop - read.start for read in batch.reads] == [256, 64]
    assert batch.reads[1].at % ALIGNMENT == 0
    assert batch.size == ALIGNMENT + 64


def test_the_order_of_moves_changes_nothing(tmp_path: Path) -> None:
    files, tensors = _mapped(tmp_path, **{f"t{i}": torch.ones(i + 1, 5) for i in range(20)})
    moves = [_move(one.narrow(0, 0, len(one) // 2 + 1), name) for name, one in tensors.items()]
    expected = batches_of(moves, files.find, 256)
    random.Random(0).shuffle(moves)
    assert batches_of(moves, files.find, 256) == expected
    assert len(expected) > 3


def test_what_is_larger_than_a_batch_is_cut(tmp_path: Path) -> None:
    files, tensors = _mapped(tmp_path, a=torch.ones(33, 7), b=torch.ones(3, 300).bfloat16())
    moves = [_move(one) for one in (tensors["a"], tensors["b"], tensors["a"].t())]
    batches = batches_of(moves, files.find, 200)
    assert max(batch.size for batch in batches) <= 200
    pieces = [piece.move for batch in batches for piece in batch.pieces]
    assert all(num_bytes_spanned(piece.tensor) <= 200 for piece in pieces)
    assert sum(piece.place.numel() for piece in pieces) == 2 * 33 * 7 + 900
    for piece in pieces:
        assert piece.place.shape == piece.tensor.shape


def test_a_span_at_another_offset_within_elements_is_a_read_of_its_own() -> None:
    """A view of bfloat16 cannot begin at an odd byte of a buffer."""
    path, first, second = Path("f"), torch.empty(5, dtype=torch.uint8), torch.empty(2).bfloat16()
    spans = {id(first): FileSpan(path, 3, 8), id(second): FileSpan(path, 8, 12)}
    moves = [_move(first), _move(second)]
    (batch,) = batches_of(moves, lambda tensor: spans[id(tensor)], 4096)
    assert batch.reads == [Read(3, 8, 0), Read(8, 12, ALIGNMENT)]


def test_files_do_not_share_a_batch() -> None:
    one, other = torch.ones(4), torch.ones(4)
    spans = {id(one): FileSpan(Path("b"), 0, 16), id(other): FileSpan(Path("a"), 16, 32)}
    batches = batches_of([_move(one), _move(other)], lambda tensor: spans[id(tensor)], 4096)
    assert [batch.path.name for batch in batches] == ["a", "b"]
    assert not batches_of([_move(torch.empty(0))], lambda tensor: None, 4096)
