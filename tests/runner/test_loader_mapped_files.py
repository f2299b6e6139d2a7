from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from specengine.core.errors import ModelLoadError
from specengine.runner.loader.mapped_files import MappedFiles

TYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32),
    *(torch.int16, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.float8_e8m0fnu, torch.uint32),  # the last is the library's to read
)


def test_tensors_of_all_types_are_those_that_were_saved(tmp_path: Path) -> None:
    made = {f"t{i}": torch.randn(5, 3).abs().to(dtype) for i, dtype in enumerate(TYPES)}
    made |= {"number": torch.tensor(3.5), "empty": torch.empty(0, 4)}
    save_file(made, tmp_path / "f.safetensors", metadata={"format": "pt"})
    found = dict(MappedFiles().tensors(tmp_path / "f.safetensors"))
    assert found.keys() == made.keys()
    for name, tensor in made.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name].contiguous().view(-1).view(torch.uint8),
                           tensor.view(-1).view(torch.uint8))  # fmt: skip


def test_a_view_is_found_in_its_file_and_a_copy_is_not(tmp_path: Path) -> None:
    files, paths = MappedFiles(), [tmp_path / f"{name}.safetensors" for name in "abc"]
    views = []
    for number, path in enumerate(paths):
        save_file({"x": torch.full((8, 4), float(number)), "y": torch.ones(2)}, path)
        views.append(dict(files.tensors(path)))
    for path, tensors in zip(paths, views, strict=True):
        rows = tensors["x"][2:6, 1:3]
        span = files.find(rows)
        assert span is not None
        assert (span.path, span.stop - span.start) == (path, (3 * 4 + 2) * 4)
        read = torch.frombuffer(
            bytearray(path.read_bytes()[span.start : span.stop]), dtype=torch.float32
        )
        assert torch.equal(read[:2], rows[0])
        assert files.find(rows.contiguous()) is None
        assert files.find(torch.ones(8, 4)) is None
        assert files.find(rows.to("meta")) is None
    other = dict(MappedFiles().tensors(paths[0]))["x"]
    assert files.find(other) is None


def test_a_view_that_was_written_to_is_not_taken_for_the_file(tmp_path: Path) -> None:
    path, files = tmp_path / "f.safetensors", MappedFiles()
    save_file({"norm.weight": torch.zeros(4)}, path)
    norm = dict(files.tensors(path))["norm.weight"]
    assert files.find(norm) is not None
    norm[1:3].add_(1)
    assert files.find(norm) is None


def test_the_file_stays_as_it_is_when_a_tensor_is_written_to(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    save_file({"x": torch.zeros(4)}, path)
    dict(MappedFiles().tensors(path))["x"].fill_(7)
    assert torch.equal(dict(MappedFiles().tensors(path))["x"], torch.zeros(4))


def test_tensors_that_no_writer_aligned_are_read(tmp_path: Path) -> None:
    header = {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    text = json.dumps(header).encode()
    text += b" " * (1 + -len(text) % 8)  # an odd number of bytes
    data = torch.tensor([1.5, -2.0])
    path = tmp_path / "f.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data.numpy().tobytes())
    files = MappedFiles()
    ((_, tensor),) = files.tensors(path)
    assert torch.equal(tensor, data)
    assert files.find(tensor) is None


def test_a_file_that_is_not_whole_is_named(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    save_file({"x": torch.zeros(400)}, path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelLoadError, match=r"f\.safetensors is not a readable safetensors file"):
        dict(MappedFiles().tensors(path))
