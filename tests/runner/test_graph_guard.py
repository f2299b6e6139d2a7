"""What the guard of a graph finds, and what it says of it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from specengine.core.errors import GraphInputError
from specengine.kernels.sample_rows import ChoiceTable
from specengine.runner.graph_guard import GraphGuard, inputs_of
from specengine.runner.memory.graph_memory import GraphMemory


class Buffers(GraphMemory):
    """Of the package, as whoever takes part in a graph is."""

    unguarded = ("of_this_round",)

    def __init__(self) -> None:
        super().__init__()
        self.states = torch.zeros(3)
        self.table = ChoiceTable.of(2, torch.device("cpu"))
        self.layers = [torch.zeros(2), torch.zeros(2)]
        self.cache: dict[int, Tensor] = {4: torch.zeros(4)}
        self.late: Tensor | None = None
        self.of_this_round = torch.zeros(1)
        self.model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
        self.model.register_buffer("angles", torch.zeros(2))
        self.itself = self


class OthersBuffers:
    """What other packages keep is theirs."""

    def __init__(self) -> None:
        self.states = torch.zeros(3)


class MoreBuffers(Buffers):
    """What a base class keeps to itself stays so."""

    unguarded = ("more",)

    def __init__(self) -> None:
        super().__init__()
        self.more = torch.zeros(1)
        self.others = OthersBuffers()


def guard_of(**owners: object) -> GraphGuard:
    return GraphGuard(partial(inputs_of, owners))


def test_every_tensor_by_its_path() -> None:
    names = [one.name for one in inputs_of({"graphs": MoreBuffers(), "batch": torch.zeros(1)})]
    assert names == [
        "graphs.states",
        "graphs.table.words",
        "graphs.layers[0]",
        "graphs.layers[1]",
        "graphs.cache[4]",
        "graphs.model.angles",
        "graphs.model.0.weight",
        "graphs.model.0.bias",
        "graphs.model.1.weight",
        "batch",
    ]


def test_one_that_moved_is_named() -> None:
    buffers = Buffers()
    guard = guard_of(graphs=buffers)
    guard.check()
    buffers.states.fill_(7)
    buffers.of_this_round = torch.ones(2)
    guard.check()
    before = buffers.layers[1]
    buffers.layers[1] = before.clone()
    with pytest.raises(
        GraphInputError, match=r"captured with graphs\.layers\[1\] at Location\(addr"
    ):
        guard.check()
    buffers.layers[1] = before.view(1, 2)
    with pytest.raises(GraphInputError, match=r"graphs\.layers\[1\] at .*shape=\(1, 2\)"):
        guard.check()
    buffers.layers[1] = before
    guard.check()


def test_what_comes_late_stays_from_then_on() -> None:
    buffers = Buffers()
    guard = guard_of(graphs=buffers)
    buffers.late = torch.zeros(2)
    buffers.cache[8] = torch.zeros(8)
    guard.check()
    buffers.cache[8] = buffers.cache[8].clone()
    with pytest.raises(GraphInputError, match=r"graphs\.cache\[8\] at"):
        guard.check()
    del buffers.cache[8]
    with pytest.raises(GraphInputError, match=r"graphs\.cache\[8\] at .* now it is at None"):
        guard.check()


def test_a_weight_that_comes_late_is_told() -> None:
    buffers = Buffers()
    guard = guard_of(graphs=buffers)
    buffers.model[1].bias = nn.Parameter(torch.zeros(2))
    with pytest.raises(GraphInputError, match=r"with graphs\.model\.1\.bias at None"):
        guard.check()
