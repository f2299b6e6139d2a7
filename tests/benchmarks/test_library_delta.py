"""The gated delta rule by a library beside ours: what each way computes, by float64, on the CPU."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import pytest
import torch

from benchmarks.kernels import library_delta as bench
from specengine.kernels.delta.types import DeltaShape

SHAPE = DeltaShape(num_key_heads=2, num_heads=4, key_dim=16, value_dim=16, conv_width=4)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.bench, "SHAPE", SHAPE)
    monkeypatch.setattr(bench.bench, "CUDA", torch.device("cpu"))
    monkeypatch.setattr(bench, "CHECKED", 2)
    monkeypatch.setattr(bench, "DTYPE", torch.float32)


@pytest.mark.parametrize("name", bench.KINDS)
def test_ours_is_near_float64(name: str) -> None:
    kind = bench.KINDS[name]
    width = min(kind.checked or kind.widths[-1], 70)
    assert bench.error_of(kind, kind.ways[bench.OURS], width) < 1e-5


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (name, told)
        for name, kind in bench.KINDS.items()
        # Triton's interpreter does not run the kernels of chunks: their loop counts in Python.
        for told in kind.ways
        if told != bench.OURS and name != "prompt"
    ],
)
def test_the_library_is_near_float64(name: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fla.ops.gated_delta_rule")
    monkeypatch.setattr(bench, "tuned_quickly", lambda: bench.tuned_by(bench.asked))
    kind = bench.KINDS[name]
    with bench.tuned_quickly():
        assert bench.error_of(kind, kind.ways[told], kind.widths[-1]) < 1e-5


def test_a_wrong_memory_is_seen() -> None:
    def untouched(work: bench.Work) -> object:
        run = bench.our_decode(work)
        before = work.memory(0).clone()
        return lambda layer: (run(layer)[0], before)

    assert bench.error_of(bench.KINDS["decode"], untouched, 1) > 0.1  # type: ignore[arg-type]


def test_leaves_say_every_node_once_and_paths_from_the_root() -> None:
    work = bench.Work(2, 8, 1, is_tree=True)
    leaves = bench.Leaves.of(work)
    rows, bounds = leaves.rows.tolist(), leaves.bounds.tolist()
    paths = [rows[start:end] for start, end in pairwise(bounds)]
    first = [[0, 1, 4], [0, 2, 5], [0, 2, 6], [0, 1, 3, 7]]
    assert paths == [*first, *([8 + node for node in path] for path in first)]
    assert leaves.paths == 4
    assert leaves.rows[leaves.firsts].tolist() == list(range(16))


def test_inputs_are_arranged_as_the_library_keeps_them() -> None:
    work = bench.Work(3, 1, 1)
    inputs = work.inputs(0)
    assert inputs.shape == (3, SHAPE.channels, SHAPE.conv_width)
    assert inputs.is_contiguous()
    assert torch.equal(inputs[:, :, 1:], work.pool.state(0).inputs[1:].transpose(1, 2))


def test_a_library_that_is_missing_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(_: str) -> ModuleType:
        raise ModuleNotFoundError("No module named 'fla'")

    monkeypatch.setattr(bench, "import_module", missing)
    monkeypatch.setattr(bench, "tuned_quickly", lambda: bench.tuned_by(bench.asked))
    bench.library.cache_clear()
    ways = bench.usable("tree", bench.KINDS["tree"])
    assert list(ways) == [bench.OURS]
    assert "fla-core: ModuleNotFoundError: No module named 'fla'" in capsys.readouterr().out


def test_configurations_are_chosen_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")

    def kernel(x_ptr: object, SIZE: object) -> None:
        pass

    configs = [triton.Config({"SIZE": size}) for size in (1, 2)]
    tuner = triton.autotune(configs=configs, key=["x_ptr"])(triton.jit(kernel))
    chosen = triton.heuristics({})(tuner)
    for name, of in (("fla.some", chosen), ("fla.again", tuner), ("flat", object())):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(kernel=of))  # type: ignore[arg-type]
    assert tuner in bench.tuners()
    tuner.cache["before"] = configs[0]
    with bench.tuned_by(bench.asked):
        assert not tuner.cache
        assert tuner.do_bench is bench.asked
        tuner.cache["within"] = configs[1]
    assert not tuner.cache
