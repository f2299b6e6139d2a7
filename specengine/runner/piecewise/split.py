"""Cuts the graph of a traced model at splitting operations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch.fx import GraphModule, Node
from torch.fx.passes.split_module import split_module


@dataclass(frozen=True)
class Part:
    """A submodule of the cut graph. is_split: it holds splitting operations alone."""

    name: str
    is_split: bool


@dataclass(frozen=True)
class CutGraph:
    """graph: calls its parts in order, by name."""

    graph: GraphModule
    parts: list[Part]

    @property
    def pieces(self) -> list[str]:
        """The parts between splitting operations."""
        return [part.name for part in self.parts if not part.is_split]


def cut(graph: GraphModule, operators: Mapping[Any, Callable[..., Any]]) -> CutGraph:
    """operators: those to cut at, and what is called in their place. Consecutive ones become one
    part. What runs before an operator in the graph runs before it in the parts."""
    places = _places(graph, operators)
    # With the original order: an operator that writes to its input must stay behind who made it.
    whole = split_module(
        graph,
        None,  # type: ignore[arg-type]
        lambda node: places[node],
        keep_original_order=True,
    )
    is_split = {places[node]: node.target in operators for node in graph.graph.nodes}
    names = [str(node.target) for node in whole.graph.nodes if node.op == "call_module"]
    parts = [Part(name, is_split[int(name.rpartition("_")[2])]) for name in names]
    for part in parts:
        if part.is_split:
            _call(cast(GraphModule, whole.get_submodule(part.name)), operators)
    return CutGraph(whole, parts)


def _call(part: GraphModule, operators: Mapping[Any, Callable[..., Any]]) -> None:
    for node in part.graph.nodes:
        node.target = operators.get(node.target, node.target)
    part.recompile()


def _places(graph: GraphModule, operators: Collection[Any]) -> dict[Node, int]:
    """The number of each node's part."""
    found: dict[Node, int] = {}
    number, was_split = 0, False
    for node in graph.graph.nodes:
        if node.op not in ("placeholder", "output", "get_attr"):
            is_split = node.target in operators
            number += is_split != was_split
            was_split = is_split
        found[node] = number
    return found
