"""How a traced model is cut, compiled once, kept on disk, captured by size and dispatched."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from specengine.core.batch import ForwardBatch
from specengine.core.config import ModelConfig
from specengine.core.errors import GraphInputError
from specengine.core.forward_mode import ForwardMode
from specengine.core.registry import (
    DEFAULT_SPLITTING_OPS,
    PIECEWISE_COMPILERS,
    SPLITTING_OPS,
    load_place,
)
from specengine.layers import split_ops
from specengine.layers.norm import RMSNorm
from specengine.runner import fallbacks
from specengine.runner.fallbacks import GraphStats
from specengine.runner.loader.load import load_model
from specengine.runner.loader.source import resolve_model
from specengine.runner.memory.graph_memory import GraphMemory
from specengine.runner.piecewise import forwards
from specengine.runner.piecewise.adaptors import Eager
from specengine.runner.piecewise.cache import CompileCache, lines_of
from specengine.runner.piecewise.forwards import PiecewiseForwards, WholeRun
from specengine.runner.piecewise.pieces import Piece, PieceRun
from specengine.runner.piecewise.split import cut
from specengine.runner.piecewise.trace import Trace, trace
from specengine.target.registry import find_model_class
from tests.support.piecewise import in_pieces, pieces_of
from tests.support.pretended_ranks import PretendedRanks
from tests.target.conftest import MiniRunner

CPU = torch.device("cpu")
TOKENS = [[5, 9, 40, 77, 9], [123, 300]]


@pytest.fixture(scope="module")
def model(small_models: dict[str, Path]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specengine.runner.loader.load.pack_linears", lambda *_: None)
        source = resolve_model(ModelConfig(model=str(small_models["llama"])))
        return load_model(source, find_model_class, torch.float32, CPU)


def names_of(graph: GraphModule) -> list[str]:
    """Of operators in order, without what only takes results apart."""
    return [
        getattr(node.target, "__name__", str(node.target))
        for node in graph.graph.nodes
        if node.op == "call_function"
    ]


@pytest.fixture(scope="module", autouse=True)
def _each_model_is_traced_once() -> Iterator[None]:
    """A trace takes half a second. Its graph is cut, each time a copy; it holds no weights."""
    found: dict[tuple[int, tuple[int, ...]], tuple[Any, Trace]] = {}

    def traced(model: Any, feature_layers: tuple[int, ...], device: torch.device) -> Trace:
        key = id(model), tuple(feature_layers)
        if key not in found:
            found[key] = model, trace(model, feature_layers, device)
        return replace(found[key][1], graph=copy.deepcopy(found[key][1].graph))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forwards, "trace", traced)
        yield


def test_consecutive_splitting_operations_become_one_part() -> None:
    class Chain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            a = torch.sin(x)
            b = torch.cos(a)
            c = torch.cos(b)
            return torch.sin(c) + a

    graph, pieces = cut(torch.fx.symbolic_trace(Chain()), {torch.cos: torch.cos})
    first, split, last = (name for name, _ in graph.named_children())
    assert pieces == [first, last]
    assert names_of(graph.get_submodule(split)) == ["cos", "cos"]  # type: ignore[arg-type]
    x = torch.randn(4)
    torch.testing.assert_close(graph(x), Chain()(x))


def test_model_is_cut_at_the_operations_that_were_asked_for(model: Any) -> None:
    attention = pieces_of(model, (8,))
    assert len(list(attention.graph.children())) == 2 * model.num_layers + 1
    ranks = pieces_of(model, (8,), splits=("all_reduce",))  # of one rank there are none
    assert len(list(ranks.graph.children())) == 1


def test_names_of_the_registry_are_operations_and_adaptors() -> None:
    for name, place in SPLITTING_OPS.items():
        found = load_place(place)
        assert isinstance(found, split_ops.SplitOp)
        assert found.name == name
    assert set(DEFAULT_SPLITTING_OPS) < set(SPLITTING_OPS)
    assert [load_place(place)().name for place in PIECEWISE_COMPILERS.values()] == [
        *PIECEWISE_COMPILERS
    ]


class CountingAdaptor(Eager):
    """Keeps text in place of an artefact."""

    name, keeps = "counting", True

    def save(self, made: Callable[..., Any], path: Path) -> None:
        path.write_text("piece")

    def load(self, path: Path) -> Callable[..., Any]:
        if path.read_text() != "piece":
            raise ValueError("not a piece")
        return lambda *_: [torch.zeros(1)]


@pytest.fixture(scope="module")
def parts(model: Any) -> list[GraphModule]:
    """Pieces of three layers, as they were traced."""
    made: list[GraphModule] = []

    class Watching(Eager):
        def compile(self, piece: GraphModule) -> Callable[..., Any]:
            made.append(piece)
            return piece.forward

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Eager, "compile", Watching.compile)
        pieces_of(model, (8,))
    return made


def test_pieces_that_are_alike_are_compiled_once_and_a_second_start_compiles_none(
    parts: list[GraphModule], tmp_path: Path
) -> None:
    first = CompileCache(CountingAdaptor(), CPU, tmp_path / "made")
    for part in parts:
        first.get(part)
    assert (first.compiled, first.loaded) == (3, 0)  # first, middle, last; of four
    second = CompileCache(CountingAdaptor(), CPU, tmp_path / "made")
    for part in parts:
        second.get(part)
    assert (second.compiled, second.loaded) == (0, 3)


def test_artefact_that_cannot_be_read_is_made_again(
    parts: list[GraphModule], tmp_path: Path
) -> None:
    CompileCache(CountingAdaptor(), CPU, tmp_path).get(parts[0])
    (path,) = tmp_path.iterdir()
    path.write_text("pie")
    again = CompileCache(CountingAdaptor(), CPU, tmp_path)
    again.get(parts[0])
    assert (again.compiled, again.loaded) == (1, 0)
    assert path.read_text() == "piece"


def test_key_follows_graph_code_and_versions(
    parts: list[GraphModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = CompileCache(Eager(), CPU, None)
    keys = {cache.key_of(parts[0]), cache.key_of(parts[1])}
    assert cache.key_of(parts[1]) == cache.key_of(parts[2])
    monkeypatch.setattr("specengine.runner.piecewise.cache.code_hash", lambda: "other")
    keys.add(cache.key_of(parts[0]))
    monkeypatch.undo()
    monkeypatch.setattr(torch, "__version__", "9.9")
    keys.add(cache.key_of(parts[0]))
    assert len(keys) == 4
    assert not any("layers" in line for line in lines_of(parts[1]))  # no names of weights


class Again:
    """Stands for a CUDA graph: calls the function again, and writes to its first outputs."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.run, self.outputs = run, run()

    def replay(self) -> None:
        new = self.run()
        for kept, found in zip(self.outputs, new, strict=True):
            kept.copy_(found)


def captured(pieces: PiecewiseForwards, size: int) -> None:
    """Capture a size, as on a GPU."""

    def record(run: Callable[[], Any]) -> tuple[Again, Any]:
        graph = Again(run)
        return graph, graph.outputs

    pieces.cache.record = record  # type: ignore[method-assign]
    pieces.record(WholeRun(pieces, size))


def extend(runner: MiniRunner, tokens: list[list[int]] = TOKENS) -> ForwardBatch:
    return runner.batch(ForwardMode.EXTEND, tokens)


def test_captured_pieces_give_what_pieces_give(model: Any) -> None:
    """Attention runs between the replays; nothing of the batch is in the graphs."""
    plain, replayed = pieces_of(model, (8, 12), (1,)), pieces_of(model, (8, 12), (1,))
    captured(replayed, 12)
    captured(replayed, 8)
    one, other = MiniRunner(model), MiniRunner(model)
    for tokens in (TOKENS, [[4, 5, 6, 7, 8, 9], [8, 15, 16]], [[1], [2]]):
        mine, its = extend(one, tokens), extend(other, tokens)
        torch.testing.assert_close(in_pieces(replayed, its), in_pieces(plain, mine))
        torch.testing.assert_close(its.layer_features[0], mine.layer_features[0])
    sizes = [sorted(piece.captured) for piece in replayed.graph.children() if type(piece) is Piece]
    assert sizes == [[8, 12]] * (model.num_layers + 1)


def test_capture_reads_no_batch_and_writes_no_kv(model: Any) -> None:
    runner = MiniRunner(model)
    before = [one.clone() for one in runner.pool.get_kv_buffer(0)]
    captured(pieces_of(model, (8,)), 8)
    for kept, found in zip(before, runner.pool.get_kv_buffer(0), strict=True):
        assert torch.equal(kept, found)


def test_padding_writes_no_kv_and_leaves_no_number_behind(model: Any) -> None:
    """Rows of padding hold zeros behind attention, not what the memory had before."""
    seen: list[Tensor] = []
    pieces, runner = pieces_of(model, (16,)), MiniRunner(model)
    run = pieces.graph.submod_2.run  # type: ignore[union-attr]

    def watched(*given: Any) -> Any:
        seen.extend(one for one in given if isinstance(one, Tensor) and one.shape[0] == 16)
        return run(*given)

    pieces.graph.submod_2.run = watched  # type: ignore[union-attr, assignment]
    slots = runner.pool.get_kv_buffer(0)[0].clone()
    batch = extend(runner)
    torch.use_deterministic_algorithms(True)  # new memory holds NaN
    try:
        in_pieces(pieces, batch)
    finally:
        torch.use_deterministic_algorithms(False)
    changed = (runner.pool.get_kv_buffer(0)[0] != slots).flatten(1).any(1).nonzero().flatten()
    assert sorted(changed.tolist()) == sorted(batch.out_cache_loc.tolist())
    assert not seen[0][7:].any()


def test_moved_input_of_a_piece_is_named() -> None:
    shared = PieceRun(size=4, checks=True)
    piece = Piece("submod_6", lambda x: (x + 1,), shared, is_last=True)
    x = torch.zeros(4)

    def record(run: Callable[[], Any]) -> tuple[Again, Any]:
        graph = Again(run)
        return graph, graph.outputs

    shared.record = record
    piece(x)
    shared.record = None
    x += 1
    assert piece(x)[0].tolist() == [2.0] * 4
    with pytest.raises(GraphInputError, match="submod_6 of 4 tokens"):
        piece(x.clone())


def test_reasons_are_counted(model: Any) -> None:
    pieces, runner = pieces_of(model, (4, 8)), MiniRunner(model)
    assert pieces.run(extend(runner, [[1] * 6, [2] * 3])) is None
    split = runner.batch(ForwardMode.SPLIT_PREFILL, [[1]])
    assert pieces.run(split) is None
    pieces.cache.memory = GraphMemory(budget=0)
    assert pieces.run(extend(runner, [[1]])) is None
    assert GraphStats.of(pieces.counters).fallbacks == {
        fallbacks.TOO_MANY_TOKENS: 1,
        fallbacks.SPLIT_BY_LAYERS: 1,
        fallbacks.MEMORY_SPENT: 1,
    }


def test_sizes_are_padded_up(model: Any) -> None:
    pieces = pieces_of(model, (8, 2, 32))
    assert [pieces.size_of(count) for count in (1, 2, 3, 8, 9, 32, 33)] == [
        *(2, 2, 8, 8, 32, 32),
        None,
    ]


def test_models_of_other_numbers_are_traced_with_their_own(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch would take a number that changes from trace to trace for an input of the graph."""
    monkeypatch.setattr(forwards, "trace", trace)
    eps = [norm.eps for norm in model.modules() if isinstance(norm, RMSNorm)]
    for factor in (1.0, 1e6):
        for norm in (one for one in model.modules() if isinstance(one, RMSNorm)):
            norm.eps = eps[0] * factor
        batch = extend(MiniRunner(model))
        with torch.inference_mode():
            expected = model(batch.input_ids, batch.positions, batch)
        found = in_pieces(pieces_of(model, (7,)), extend(MiniRunner(model)))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for norm, before in zip(
        (one for one in model.modules() if isinstance(one, RMSNorm)), eps, strict=True
    ):
        norm.eps = before


def test_sums_over_ranks_are_in_the_trace(
    small_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the graph is cut at them."""
    from specengine.core.parallel import split_over

    ranks = PretendedRanks(2)
    monkeypatch.setattr("specengine.runner.loader.load.pack_linears", lambda *_: None)
    source = resolve_model(ModelConfig(model=str(small_models["llama"])))
    with split_over(ranks):
        model: Any = load_model(source, find_model_class, torch.float32, CPU)
    runner = MiniRunner(model)
    batch = extend(runner)
    with torch.inference_mode():
        expected = model(batch.input_ids, batch.positions, batch)
    for splits, count in ((("attention",), 7), (("attention", "all_reduce"), 21)):
        pieces = pieces_of(model, (16,), splits=splits)
        pieces.context = replace(pieces.context, communicator=ranks)
        assert len(list(pieces.graph.children())) == count
        found = in_pieces(pieces, extend(MiniRunner(model)))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
