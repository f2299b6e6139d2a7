"""The guard of a graph finds inputs that moved and names them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from specengine.core.errors import GraphInputError
from specengine.kernels.sample.types import ChoiceTable
from specengine.runner.graph_guard import GraphGuard, inputs_of
from specengine.runner.memory.graph_memory import GraphMemory


class Buffers(GraphMemory):
    """An object of the package: its base class is."""

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
    """An object of another package: not walked."""

    def __init__(self) -> None:
        self.states = torch.zeros(3)


class MoreBuffers(Buffers):
    """Adds to the unguarded attributes of its base class."""

    unguarded = ("more",)

    def __init__(self) -> None:
        super().__init__()
        self.more = torch.zeros(1)
        self.others = OthersBuffers()


def guard_of(**owners: object) -> GraphGuard:
    return GraphGuard(partial(inputs_of, owners))


def test_inputs_are_named_by_their_path_of_attributes() -> None:
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


def test_moved_tensor_is_named_in_the_error() -> None:
    buffers = Buffers()
    guard = guard_of(graphs=buffers)
    guard.check()
    buffers.states.fill_(7)
    buffers.of_this_round = torch.ones(2)
    guard.check()
    before = buffers.layers[1]
    buffers.layers[1] = before.clone()
    with pytest.raises(GraphInputError, match=r"with graphs\.layers\[1\] at Location\(addr"):
        guard.check()
    buffers.layers[1] = before.view(1, 2)
    with pytest.raises(GraphInputError, match=r"graphs\.layers\[1\] at .*shape=\(1, 2\)"):
        guard.check()
    buffers.layers[1] = before
    guard.check()


def test_late_tensor_is_checked_from_its_first_check_on() -> None:
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


def test_late_weight_is_refused() -> None:
    buffers = Buffers()
    guard = guard_of(graphs=buffers)
    buffers.model[1].bias = nn.Parameter(torch.zeros(2))
    with pytest.raises(GraphInputError, match=r"with graphs\.model\.1\.bias at None"):
        guard.check()
