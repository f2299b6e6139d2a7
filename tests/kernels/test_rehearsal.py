"""Kernels compiled ahead: all that is asked for, once, by other threads; none is launched."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from specengine.kernels import compilations, rehearsal
from specengine.kernels.cuda import program
from tests.kernels import offline_triton

SOURCE = Path("some.cu")


def test_triton_kernels_are_compiled_and_not_launched(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    seen = offline_triton.run("tests.kernels.offline_rehearsal", tmp_path)
    two = {"in process": 2, "slots": [0] * 4 * 16}  # widths 3 and 4 have one in common
    assert seen["first"] == {"compiles": True, "compiled": 2, **two}
    assert seen["again"] == seen["disk"] == {"compiles": False, "compiled": 0, **two}
    assert seen["restored"]


def test_cuda_kernels_are_compiled_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, object]] = []

    def binary(source: Path, defines: tuple[tuple[str, int], ...], device: int) -> bytes:
        asked.append((defines, threading.current_thread() is threading.main_thread()))
        compilations.note()
        return b""

    monkeypatch.setattr(program, "_binary", binary)
    monkeypatch.setattr(program, "_loaded", lambda *_: pytest.fail("loaded"))
    with rehearsal.rehearsal() as stage:
        for rows in (1, 2, 1):
            kernel = program.compiled(SOURCE, "some", (("ROWS", rows),), 0, 0)
            kernel.launch((1, 1, 1), 32, 0, (torch.empty(3),))
        assert stage.compiles()
    assert sorted(asked) == [((("ROWS", 1),), False), ((("ROWS", 2),), False)]
    assert stage.tally.kernels == 2


def test_afterwards_kernels_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    with rehearsal.rehearsal():
        assert rehearsal.current() is not None
    assert rehearsal.current() is None
    monkeypatch.setattr(program, "_loaded", lambda *given: given)
    assert program.compiled(SOURCE, "some", (), 5, 0) == (SOURCE, "some", (), 5, 0)


def test_a_kernel_that_does_not_compile_says_so_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_binary", lambda *_: 1 / 0)
    with rehearsal.rehearsal() as stage:
        program.compiled(SOURCE, "some", (), 0, 0)
        assert not stage.compiles()


def test_what_nobody_wrote_is_zero() -> None:
    x = torch.full((1000,), 7)
    with rehearsal.rehearsal():
        made = [
            torch.empty(1000, dtype=torch.int64),
            torch.empty_like(x),
            torch.empty_strided((10, 100), (100, 1)),
            x.new_empty(1000),
            x.new_empty_strided((1000,), (1,)),
        ]
        assert torch.full((3,), 7).tolist() == [7] * 3
    assert not any(one.any() for one in made)


def test_other_threads_rehearse_nothing() -> None:
    seen = []
    with rehearsal.rehearsal():
        thread = threading.Thread(target=lambda: seen.append(rehearsal.current()))
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
