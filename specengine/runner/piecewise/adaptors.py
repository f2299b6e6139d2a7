"""What compiles the pieces of a traced model."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

import specengine
from specengine.kernels.opaque import PLAIN_FORMS


class Adaptor(ABC):
    """A way to compile. Pieces take and give what their graph does."""

    name: str
    keeps = False  # what it makes is worth a place in the cache on disk

    @abstractmethod
    def compile(self, piece: GraphModule) -> Callable[..., Any]: ...

    def save(self, made: Callable[..., Any], path: Path) -> None:
        raise NotImplementedError("nothing was compiled")

    def load(self, path: Path) -> Callable[..., Any]:
        raise NotImplementedError("nothing was compiled")


class Eager(Adaptor):
    """The operations of the graph one by one, as a forward without a graph runs them: the engine's
    own kernels. There is nothing to compile."""

    name = "eager"

    def compile(self, piece: GraphModule) -> Callable[..., Any]:
        return piece.forward


class Inductor(Adaptor):
    """torch.compile's code generator, which fuses the engine's operations in their plain form
    (kernels/opaque.py). One artefact serves all sizes."""

    name, keeps = "inductor", True

    def compile(self, piece: GraphModule) -> Callable[..., Any]:
        from torch._inductor import config, standalone_compile

        graph = deepcopy(piece)
        for node in graph.graph.nodes:
            if node.op == "call_function":
                node.target = PLAIN_FORMS.get(node.target, node.target)
        output = graph.graph.output_node()
        if not isinstance(output.args[0], tuple | list):
            output.args = ((output.args[0],),)
        graph.recompile()
        examples = [
            node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"
        ]
        # PyTorch's own cache refuses functions whose code it cannot hash: it is given our hash.
        names = {f"{one.__module__}.{one.__name__}": code_hash() for one in PLAIN_FORMS.values()}
        with config.patch(unsafe_marked_cacheable_functions=names):
            return standalone_compile(graph, examples, dynamic_shapes="from_graph")

    def save(self, made: Callable[..., Any], path: Path) -> None:
        made.save(path=str(path), format="binary")  # type: ignore[attr-defined]

    def load(self, path: Path) -> Callable[..., Any]:
        from torch._inductor.standalone_compile import CompiledArtifact

        return CompiledArtifact.load(path=str(path), format="binary")


_SOURCES = ("kernels", "layers", "target", "runner/piecewise")


@cache
def code_hash() -> str:
    """Of the sources that a traced model runs through."""
    root = Path(specengine.__file__).parent
    found = hashlib.sha256()
    for name in _SOURCES:
        for path in sorted((root / name).rglob("*.py")):
            found.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return found.hexdigest()
