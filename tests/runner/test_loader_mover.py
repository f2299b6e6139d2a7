"""What reaches a model's places when threads read files, on the host and, with a platform that is
faked, by the buffers of a device."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from specengine.core.config import ModelConfig
from specengine.core.errors import ModelLoadError
from specengine.core.parallel import split_over
from specengine.layers.in_place import weights_of
from specengine.layers.moves import Move
from specengine.runner.loader import landing, mover
from specengine.runner.loader.batches import batches_of
from specengine.runner.loader.landing import DeviceLanding
from specengine.runner.loader.load import load_model
from specengine.runner.loader.mapped_files import MappedFiles
from specengine.runner.loader.mover import FileMover
from specengine.runner.loader.source import resolve_model
from specengine.target.registry import find_model_class
from tests.support.fake_platform import FakePlatform
from tests.support.families import save_small_model
from tests.support.pretended_ranks import PretendedRanks
from tests.support.quantised import FORMATS, quantise_model

CPU = torch.device("cpu")


@pytest.fixture(params=["host", "device"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """device: bytes go by the buffers of a device, which is the host."""
    place: str = request.param
    if place == "device":
        _use_fake_device(monkeypatch)
    return place


def _use_fake_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (landing, mover):
        monkeypatch.setattr(module, "platform_of", lambda device: FakePlatform())
    monkeypatch.setattr(mover, "_is_host", lambda device: False)


def _fake_device(size: int) -> DeviceLanding:
    after = FakePlatform().new_event()
    after.record()
    return DeviceLanding(CPU, size, after)


def _files(folder: Path, num_files: int = 3) -> tuple[MappedFiles, dict[str, Tensor]]:
    files = MappedFiles()
    found: dict[str, Tensor] = {}
    for number in range(num_files):
        path = folder / f"part-{number}.safetensors"
        made = {f"{number}.{i}": torch.randn(3 + i, 40) for i in range(8)}
        made[f"{number}.half"] = torch.randn(30, 40).bfloat16()
        save_file(made, path)
        found |= dict(files.tensors(path))
    return files, found


def _moves(tensors: dict[str, Tensor]) -> list[Move]:
    return [
        Move(name, torch.zeros(tensor.shape, dtype=tensor.dtype), tensor)
        for name, tensor in tensors.items()
    ]


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: x,
    "rows": lambda x: x[2:9],
    "columns": lambda x: x[:, 5:17],
    "turned": lambda x: x.t(),
    "every other row": lambda x: x[1::2],
    "one number": lambda x: x[1, 3],
    "none": lambda x: x[:0],
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("batch_bytes", [64, 1 << 20])
def test_places_have_the_bits_of_their_views(
    change: str, dtype: torch.dtype, batch_bytes: int, where: str, tmp_path: Path
) -> None:
    files, tensors = _files(tmp_path, 1)
    source = CHANGES[change](tensors["0.half"])
    other = torch.zeros((2, *source.shape), dtype=dtype)  # a place beside that stays as it is
    rows = torch.zeros((*source.shape, 3), dtype=dtype)  # a place that is no block of memory
    moves = [Move("a", other[1], source), Move("b", rows[..., 1], source)]
    FileMover(files, 2, batch_bytes).move(moves)
    assert torch.equal(other[1], source.to(dtype))
    assert torch.equal(rows[..., 1], source.to(dtype))
    assert not other[0].any()
    assert not rows[..., 0].any()


@pytest.mark.parametrize("num_threads", [1, 4])
def test_the_order_of_moves_changes_no_bit(num_threads: int, where: str, tmp_path: Path) -> None:
    files, tensors = _files(tmp_path)
    for seed in range(3):
        moves = _moves(tensors)
        random.Random(seed).shuffle(moves)
        FileMover(files, num_threads, 512).move(moves)
        assert all(torch.equal(move.place, move.tensor) for move in moves)


def test_a_file_that_shrank_ends_all_threads_with_the_tensor_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _use_fake_device(monkeypatch)
    files, tensors = _files(tmp_path)
    moves = _moves(tensors)
    os.truncate(tmp_path / "part-1.safetensors", 700)
    before = threading.active_count()
    with pytest.raises(ModelLoadError, match=r"part-1\.safetensors ends .* with tensor 1\.\w+: it"):
        FileMover(files, 4, 512).move(moves)
    assert threading.active_count() == before


def test_a_file_that_is_gone_is_named_with_its_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _use_fake_device(monkeypatch)
    files, tensors = _files(tmp_path)
    moves = _moves(tensors)
    (tmp_path / "part-2.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"part-2\.safetensors cannot be read \(tensors 2\."):
        FileMover(files, 2).move(moves)


def test_no_batch_begins_behind_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, tensors = _files(tmp_path)
    landed: list[str] = []

    class Broken:
        def __init__(self, device: torch.device, size: int, after: object) -> None: ...

        def land(self, file: int, batch: Any) -> None:
            landed.append(batch.pieces[0].move.name)
            raise RuntimeError(f"batch {len(landed)}")

        def end(self) -> None:
            landed.append("end")

    _use_fake_device(monkeypatch)
    monkeypatch.setattr(mover, "DeviceLanding", Broken)
    with pytest.raises(RuntimeError, match="batch 1"):
        FileMover(files, 1, 512).move(_moves(tensors))
    assert landed[1:] == ["end"]


def test_a_landing_that_failed_ends_behind_what_the_device_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, tensors = _files(tmp_path, 1)
    monkeypatch.setattr(landing, "platform_of", lambda device: FakePlatform())
    move = Move("0.half", torch.zeros(7), tensors["0.half"])  # a copy that PyTorch refuses
    (batch,) = batches_of([move], files.find, 1 << 20)
    one = _fake_device(batch.size)
    with batch.path.open("rb") as file, pytest.raises(RuntimeError):
        one.land(file.fileno(), batch)
    assert not one.event.query()
    one.end()
    assert one.event.query()


def test_open_files_and_bytes_in_flight_have_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, tensors = _files(tmp_path, 6)
    opened: set[int] = set()
    most, sizes, open_before, close_before = [0], [], os.open, os.close

    def opening(*given: Any) -> int:
        found = open_before(*given)
        opened.add(found)
        most[0] = max(most[0], len(opened))
        return found

    def closing(file: int) -> None:
        opened.discard(file)
        close_before(file)

    def made(device: torch.device, size: int, after: object) -> DeviceLanding:
        sizes.append(size)
        return DeviceLanding(device, size, after)

    _use_fake_device(monkeypatch)
    monkeypatch.setattr(mover, "DeviceLanding", made)
    monkeypatch.setattr(os, "open", opening)
    monkeypatch.setattr(os, "close", closing)
    moves = _moves(tensors)
    FileMover(files, 3, 640).move(moves)
    assert 1 <= most[0] <= 3
    assert not opened
    assert len(sizes) == 3
    assert max(sizes) <= 640
    assert all(torch.equal(move.place, move.tensor) for move in moves)


@contextmanager
def _copied_at_once() -> Iterator[None]:
    """As without a mover: each tensor by `copy_`, in the order of the files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileMover, "owns", lambda self, tensor: False)
        yield


def _load(folder: Path, device: torch.device = CPU) -> nn.Module:
    source = resolve_model(ModelConfig(model=str(folder)))
    return load_model(source, find_model_class, torch.bfloat16, device, packs=False)


def _check_same(one: nn.Module, other: nn.Module) -> None:
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("family", ["llama", "qwen3moe", "gptoss", "llama4", "deepseekv3", "phi3"])
@pytest.mark.parametrize("size", [1, 2])
def test_models_are_filled_as_by_copies_one_by_one(
    family: str, size: int, where: str, small_models: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(mover, "BATCH_BYTES", 4096)
    for rank in range(size):
        with split_over(PretendedRanks(size, rank)):
            with _copied_at_once():
                expected = _load(small_models[family])
            _check_same(_load(small_models[family]), expected)


@pytest.mark.parametrize("form", ["fp8 tensor", "gptq"])
def test_quantised_models_are_filled_as_by_copies_one_by_one(form: str, tmp_path: Path) -> None:
    plain = save_small_model(
        "qwen3moe", tmp_path / "plain", 3, moe_intermediate_size=64, intermediate_size=128
    )
    folder = quantise_model(plain, tmp_path, FORMATS[form]).quantised
    with _copied_at_once():
        expected = _load(folder)
    _check_same(_load(folder), expected)


def test_a_checkpoint_that_does_not_fit_is_refused_before_bytes_are_read(
    small_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = MappedFiles()
    tensors = dict(files.tensors(small_models["llama"] / "model.safetensors"))
    last = sorted(tensors)[-1]
    for path in small_models["llama"].glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    save_file({k: v for k, v in tensors.items() if k != last}, tmp_path / "model.safetensors")
    _use_fake_device(monkeypatch)
    moved: list[Any] = []
    monkeypatch.setattr(FileMover, "move", lambda self, moves: moved.append(moves))
    with pytest.raises(ModelLoadError, match=f"missing tensor {last}"):
        _load(tmp_path)
    assert not moved


def test_an_error_of_a_thread_ends_the_load_of_a_model(
    small_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: Any) -> int:
        raise OSError(5, "Input/output error")

    _use_fake_device(monkeypatch)
    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(ModelLoadError, match=r"cannot be read \(tensors .*: .*Input/output error"):
        _load(small_models["llama"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("batch_bytes", [64, 1 << 20])
def test_places_on_a_card_have_the_bits_of_their_views(
    change: str, dtype: torch.dtype, batch_bytes: int, tmp_path: Path
) -> None:
    files, tensors = _files(tmp_path, 1)
    source = CHANGES[change](tensors["0.half"])
    rows = torch.zeros((*source.shape, 3), dtype=dtype, device="cuda")
    whole = torch.zeros(source.shape, dtype=dtype, device="cuda")
    moves = [Move("a", whole, source), Move("b", rows[..., 1], source)]
    FileMover(files, 4, batch_bytes).move(moves)
    assert torch.equal(whole.cpu(), source.to(dtype))
    assert torch.equal(rows.cpu()[..., 1], source.to(dtype))
    assert not rows[..., 0].any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("form", [None, "fp8 tensor", "gptq"])
@pytest.mark.parametrize("size", [1, 2])
def test_models_on_a_card_are_filled_as_by_copies_one_by_one(
    form: str | None, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"moe_intermediate_size": 64, "intermediate_size": 128}
    folder = save_small_model("qwen3moe", tmp_path / "plain", 3, **fields)
    if form is not None:
        folder = quantise_model(folder, tmp_path, FORMATS[form]).quantised
    monkeypatch.setattr(mover, "BATCH_BYTES", 4096)
    for rank in range(size):
        with split_over(PretendedRanks(size, rank)):
            with _copied_at_once():
                expected = _load(folder, torch.device("cuda"))
            found = _load(folder, torch.device("cuda"))
        for one, other in zip(weights_of(found), weights_of(expected), strict=True):
            assert torch.equal(
                one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
            )
