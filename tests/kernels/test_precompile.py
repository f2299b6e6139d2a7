"""Kernels compiled ahead: all that is asked for, once, by other threads; none is launched."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from specengine.kernels import compilations, precompile
from specengine.kernels.cuda import program
from tests.kernels import offline_triton

SOURCE = Path("some.cu")


def test_triton_kernels_are_compiled_and_not_launched(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    seen = offline_triton.run("tests.kernels.offline_precompile", tmp_path)
    two = {"in process": 2, "slots": [0] * 4 * 16}  # widths 3 and 4 have one in common
    assert seen["first"] == {"compiles": True, "compiled": 2, **two}
    assert seen["again"] == seen["disk"] == {"compiles": False, "compiled": 0, **two}
    assert seen["restored"]
    assert seen["launchers"] == [False] * 4  # two kernels, compiled and then read from disk
    assert seen["broken"]["in process"] == 0, "what was half made would be launched as it is"
    assert seen["compilers"] == [], "imported by precompiling"


def test_cuda_kernels_are_compiled_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, object]] = []

    def binary(source: Path, defines: tuple[tuple[str, int], ...], device: int) -> bytes:
        asked.append((defines, threading.current_thread() is threading.main_thread()))
        compilations.note()
        return b""

    monkeypatch.setattr(program, "_binary", binary)
    monkeypatch.setattr(program, "_loaded", lambda *_: pytest.fail("loaded"))
    with precompile.precompile() as stage:
        for rows in (1, 2, 1):
            kernel = program.compiled(SOURCE, "some", (("ROWS", rows),), 0, 0)
            kernel.launch((1, 1, 1), 32, 0, (torch.empty(3),))
        assert stage.compiles()
    assert sorted(asked) == [((("ROWS", 1),), False), ((("ROWS", 2),), False)]
    assert stage.tally.kernels == 2


def test_afterwards_kernels_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    with precompile.precompile():
        assert precompile.current() is not None
    assert precompile.current() is None
    monkeypatch.setattr(program, "_loaded", lambda *given: given)
    assert program.compiled(SOURCE, "some", (), 5, 0) == (SOURCE, "some", (), 5, 0)


def test_a_kernel_that_does_not_compile_says_so_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_binary", lambda *_: 1 / 0)
    with precompile.precompile() as stage:
        program.compiled(SOURCE, "some", (), 0, 0)
        assert not stage.compiles()


def test_what_nobody_wrote_is_zero() -> None:
    x = torch.full((1000,), 7)
    with precompile.precompile():
        made = [
            torch.empty(1000, dtype=torch.int64),
            torch.empty_like(x),
            torch.empty_strided((10, 100), (100, 1)),
            x.new_empty(1000),
            x.new_empty_strided((1000,), (1,)),
        ]
        assert torch.full((3,), 7).tolist() == [7] * 3
    assert not any(one.any() for one in made)


def test_descriptors_of_other_tiles_are_other_forms() -> None:
    """Of other tensors with the same tiles they are the same."""
    TensorDescriptor = pytest.importorskip("triton.tools.tensor_descriptor").TensorDescriptor
    codes, others = torch.zeros(64, 256, dtype=torch.int8), torch.zeros(32, 512, dtype=torch.int8)
    form = precompile._trait(TensorDescriptor.from_tensor(codes, [64, 128]))
    assert form == precompile._trait(TensorDescriptor.from_tensor(others, [64, 128]))
    assert form != precompile._trait(TensorDescriptor.from_tensor(codes, [32, 128]))
    assert form != precompile._trait(TensorDescriptor.from_tensor(codes.bool(), [64, 128]))
    assert hash(form)


def test_other_threads_precompile_nothing() -> None:
    seen = []
    with precompile.precompile():
        thread = threading.Thread(target=lambda: seen.append(precompile.current()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_tallies_count_what_is_compiled_while_they_are_open() -> None:
    with compilations.tally() as outer:
        compilations.note()
        with compilations.tally() as inner:
            compilations.note()
        compilations.note()
    compilations.note()
    assert (outer.kernels, inner.kernels) == (3, 1)


LAUNCH = """
import subprocess
import torch
from specengine.kernels.precompile import precompile
from specengine.kernels.kv.row_places_triton import row_places
table = torch.arange(256, dtype=torch.int32, device="cuda").view(4, 64)
rows = torch.arange(4, device="cuda")
with precompile() as stage:
    row_places(table, rows, rows, 3, 0, None)
assert stage.tally.kernels == 1, stage.tally
subprocess.Popen = None
print(row_places(table, rows, rows, 3, 0, None).slots_T.tolist())
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_precompiled_kernel_is_launched_without_a_compiler(tmp_path: Path) -> None:
    expected = [row * 64 + row + column for row in range(4) for column in range(3)]
    assert _run(LAUNCH, TRITON_CACHE_DIR=str(tmp_path)) == str(expected)


def _run(script: str, **environment: str) -> str:
    """The last line that it prints, without Triton's interpreter."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=kept | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]
