"""Cuts the graph of a traced model at splitting operations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

from torch.fx import GraphModule, Node
from torch.fx.passes.split_module import split_module


def cut(
    graph: GraphModule, operators: Mapping[Any, Callable[..., Any]]
) -> tuple[GraphModule, list[str]]:
    """A graph that calls its parts in order, and the names of the pieces: of the parts between
    splitting operations. operators: those to cut at, and what is called in their place. Consecutive
    ones become one part. What runs before an operator in the graph runs before it in the parts."""
    places = _places(graph, operators)
    # With the original order: an operator that writes to its input must stay behind that input's
    # maker.
    whole = split_module(
        graph,
        None,  # type: ignore[arg-type]
        lambda node: places[node],
        keep_original_order=True,
    )
    is_split = {places[node]: node.target in operators for node in graph.graph.nodes}
    pieces = []
    for name in (str(node.target) for node in whole.graph.nodes if node.op == "call_module"):
        if is_split[int(name.rpartition("_")[2])]:
            _call(cast(GraphModule, whole.get_submodule(name)), operators)
        else:
            pieces.append(name)
    return whole, pieces


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
