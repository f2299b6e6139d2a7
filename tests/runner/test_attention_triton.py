"""The Triton backend against dense attention, eagerly and, on a GPU, in a CUDA graph."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from specengine.core.batch import ForwardMode
from specengine.core.errors import ConfigError
from specengine.runner.attention import make_attention_backend
from tests.runner.attention_cases import (
    BUSHY,
    FORK,
    MAX_CONTEXT,
    ROOT_ALONE,
    Case,
    Layer,
    dense_attention,
    every_mode,
    overwrite,
)

HAS_CUDA = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def device() -> torch.device:
    """A GPU, or the CPU with Triton's interpreter (tests/conftest.py turns it on)."""
    return torch.device("cuda" if HAS_CUDA else "cpu")


def check(case: Case, tolerance: float = 3e-6) -> None:
    backend = make_attention_backend("triton", device())
    case.device = device()
    batch, q = case.batch(backend), case.q()
    backend.init_forward_metadata(batch)
    forward = backend.forward_decode if case.mode.is_decode() else backend.forward_extend
    out = forward(q, case.layer, batch)
    expected = dense_attention(case, batch, q)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window", [None, 5])
def test_decode(window: int | None) -> None:
    lens = [(3, 1), (0, 1), (40, 1)]
    check(Case(lens, ForwardMode.DECODE, layer=Layer(sliding_window=window)))


@pytest.mark.parametrize("window", [None, 6])
def test_extend(window: int | None) -> None:
    check(Case([(0, 5), (20, 3), (7, 11), (30, 1), (2, 0)], layer=Layer(sliding_window=window)))


@pytest.mark.parametrize("window", [None, 6])
def test_sinks(window: int | None) -> None:
    sinks = torch.linspace(-2.0, 3.0, 6, device=device())
    layer = Layer(sliding_window=window, sinks=sinks)
    check(Case([(0, 5), (20, 3), (30, 1)], layer=layer), 1e-5)
    check(Case([(3, 1), (40, 1)], ForwardMode.DECODE, layer=layer), 1e-5)


@pytest.mark.parametrize("window", [None, 6])
def test_softcap(window: int | None) -> None:
    layer = Layer(sliding_window=window, softcap=0.5)
    check(Case([(0, 5), (20, 3), (30, 1)], layer=layer), 1e-5)
    check(Case([(3, 1), (40, 1)], ForwardMode.DECODE, layer=layer), 1e-5)


@pytest.mark.parametrize("window", [None, 2])
def test_trees(window: int | None) -> None:
    lens = [(11, 7), (0, 4), (25, 1)]
    trees = [BUSHY, FORK, ROOT_ALONE]
    layer = Layer(sliding_window=window)
    check(Case(lens, ForwardMode.TARGET_VERIFY, trees=trees, layer=layer))


@pytest.mark.parametrize("chunk", [1, 4, 9, 64])
def test_chunks(chunk: int) -> None:
    """Borders before, amid and behind the new tokens, and between the levels of a tree."""
    layer = Layer(attention_chunk=chunk)
    check(Case([(3, 1), (0, 1), (8, 1), (9, 1), (40, 1)], ForwardMode.DECODE, layer=layer))
    check(Case([(0, 5), (20, 3), (7, 11), (30, 1), (2, 0)], layer=layer))
    trees, lens = [BUSHY, FORK, ROOT_ALONE], [(7, 7), (0, 4), (26, 1)]
    check(Case(lens, ForwardMode.TARGET_VERIFY, trees=trees, layer=layer))


@pytest.mark.parametrize("case", every_mode())
def test_values_that_are_a_part_of_keys(case: Case) -> None:
    case.layer = Layer(num_heads=4, num_kv_heads=1, head_dim=24, value_dim=16)
    check(case)


@pytest.mark.parametrize("window", [None, 4])
def test_a_tree_that_grows_by_a_level(window: int | None) -> None:
    layer, mode = Layer(sliding_window=window), ForwardMode.DRAFT_EXTEND
    check(Case([(16, 2), (9, 2)], mode, trees=[BUSHY, BUSHY], num_past=5, layer=layer))


def test_a_captured_plan_is_shaped_for_the_longest_request() -> None:
    backend = make_attention_backend("triton", device())
    case = Case([(0, 1)], ForwardMode.DECODE, device=device())
    plan = backend.init_forward_metadata_capture(case.batch(backend))
    assert plan.metadata.max_keys == MAX_CONTEXT


def test_without_triton_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specengine.runner.attention.triton_backend.has_triton", lambda: False)
    with pytest.raises(ConfigError, match=r"specengine\[cuda\]"):
        make_attention_backend("triton", torch.device("cpu"))


def test_on_a_cpu_without_the_interpreter_the_error_says_what_runs_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="needs a CUDA device; use torch"):
        make_attention_backend("triton", torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device")
@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY])
def test_a_replayed_graph_follows_lengths_rows_and_trees(mode: ForwardMode) -> None:
    """Captured on one batch; replayed after lengths, page table, q and mask changed in place."""
    cuda = torch.device("cuda")
    backend = make_attention_backend("triton", cuda)
    if mode.is_decode():
        short = Case([(0, 1), (0, 1)], mode, device=cuda)
        long = Case([(37, 1), (62, 1)], mode, device=cuda, seed=5)
    else:
        short = Case([(0, 7), (0, 7)], mode, trees=[BUSHY, BUSHY], device=cuda)
        star = [-1, 0, 0, 0, 0, 0, 0]
        long = Case([(50, 7), (19, 7)], mode, trees=[star, BUSHY], device=cuda, seed=5)
    batch, q = short.batch(backend), short.q()
    plan = backend.init_forward_metadata_capture(batch)
    forward = backend.forward_decode if mode.is_decode() else backend.forward_extend
    forward(q, short.layer, batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward(q, short.layer, batch)

    later = long.batch(backend)
    overwrite(batch, later)
    q.copy_(long.q())
    backend.init_forward_metadata_replay(batch, plan)
    graph.replay()
    expected = dense_attention(long, later, long.q())
    torch.testing.assert_close(out.double().cpu(), expected, rtol=3e-6, atol=3e-6)
