"""One trace of a model's forward, through torch.compile, for any number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from specengine.core.model import DecoderModel
from specengine.layers.split_ops import TracedBatch

INPUTS = ("input_ids", "positions")  # of the traced function, int64 [T]
_TOKENS = 19  # of the example; torch.compile takes 0 and 1 for constants


@dataclass(frozen=True)
class Trace:
    """graph: all of a forward. given: what it takes, in order: the name of an input, an int where
    the number of tokens belongs, or a weight. It gives hidden states behind the final norm, [T, H],
    and the outputs of the feature layers side by side, [T, F], if there are any."""

    graph: GraphModule
    given: list[str | int | Tensor]


def trace(model: DecoderModel, feature_layers: tuple[int, ...], device: torch.device) -> Trace:
    """The model is not run. Raises what torch.compile raises where it cannot be traced as one graph
    (fullgraph)."""
    found: list[Trace] = []

    def backend(graph: GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        found.append(Trace(graph, _given(graph, examples)))
        outputs = [torch.empty(0, device=device) for _ in _outputs(graph)]
        return lambda *_: outputs

    def forward(input_ids: Tensor, positions: Tensor) -> list[Tensor]:
        batch = TracedBatch(feature_layers)
        hidden = model.forward(input_ids, positions, batch)  # type: ignore[arg-type]
        features = batch.layer_features
        return [hidden, torch.cat(features, dim=-1)] if features else [hidden]

    # torch.compile keeps what it made by code object: one for each trace.
    function = FunctionType(
        forward.__code__.replace(), forward.__globals__, closure=forward.__closure__
    )
    examples = [torch.zeros(_TOKENS, dtype=torch.int64, device=device) for _ in INPUTS]
    for one in examples:
        torch._dynamo.mark_dynamic(one, 0)
    # Numbers that differ from those of another model's trace in this process are constants, too.
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False, specialize_float=True):
        torch.compile(function, backend=backend, fullgraph=True)(*examples)
    (only,) = found
    return only


def _given(graph: GraphModule, examples: Sequence[Any]) -> list[str | int | Tensor]:
    by_target = {f"L_{name}_": name for name in INPUTS}
    nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
    found: list[str | int | Tensor] = []
    for node, example in zip(nodes, examples, strict=True):
        if isinstance(example, Tensor):
            found.append(by_target.get(str(node.target), example))
        elif isinstance(example, torch.SymInt) and example.node.hint == _TOKENS:
            found.append(_TOKENS)
        else:
            raise ValueError(f"the trace takes {node.target}, which is no number of tokens")
    return found


def _outputs(graph: GraphModule) -> Sequence[Any]:
    (outputs,) = graph.graph.output_node().args
    assert isinstance(outputs, Sequence)
    return outputs
