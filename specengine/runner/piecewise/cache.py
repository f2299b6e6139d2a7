"""Compiled pieces, in memory and on disk: pieces that are alike are compiled once, and a second
start compiles none.

The key of a piece is its graph, whose constants follow from the model's configuration; the sources
that gave it its meaning; the compiler, its version and the device.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from specengine.core.platform import platform_of
from specengine.runner.piecewise.adaptors import Adaptor, code_hash

logger = logging.getLogger(__name__)


class CompileCache:
    """folder: of the artefacts; None keeps none. compiled and loaded count pieces since start."""

    def __init__(self, adaptor: Adaptor, device: torch.device, folder: Path | None) -> None:
        self.adaptor, self.device = adaptor, device
        self.folder = folder if adaptor.keeps else None
        self.compiled = self.loaded = 0
        self._made: dict[str, Callable[..., Any]] = {}

    def get(self, piece: GraphModule) -> Callable[..., Any]:
        """What computes the piece."""
        if not self.adaptor.keeps:
            return self.adaptor.compile(piece)
        key = self.key_of(piece)
        if key not in self._made:
            self._made[key] = self._from_disk(key) or self._compile(key, piece)
        made = self._made[key]
        gives_many = isinstance(piece.graph.output_node().args[0], tuple | list)
        return made if gives_many else _Only(made)

    def key_of(self, piece: GraphModule) -> str:
        parts = [
            self.adaptor.name,
            torch.__version__,
            str(torch.version.cuda),
            platform_of(self.device).device_name(self.device),
            code_hash(),
            *lines_of(piece),
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]

    def _from_disk(self, key: str) -> Callable[..., Any] | None:
        path = None if self.folder is None else self.folder / key
        if path is None or not path.exists():
            return None
        try:
            found = self.adaptor.load(path)
        except Exception as error:  # of a file that is cut short, or that PyTorch will not read
            logger.warning("a compiled piece cannot be read and is made again: %s", error)
            return None
        self.loaded += 1
        return found

    def _compile(self, key: str, piece: GraphModule) -> Callable[..., Any]:
        start = perf_counter()
        made = self.adaptor.compile(piece)
        self.compiled += 1
        logger.info("compiled a piece in %.1f s", perf_counter() - start)
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.folder) as work:
                path = Path(work) / key
                self.adaptor.save(made, path)
                os.replace(path, self.folder / key)  # atomic: another process may do the same
        return made


class _Only:
    """What gives one tensor, where the graph gave it without a list."""

    def __init__(self, made: Callable[..., Any]) -> None:
        self.made = made

    def __call__(self, *given: Any) -> Any:
        (only,) = self.made(*given)
        return only


def default_folder() -> Path:
    folder = os.environ.get("SPECENGINE_CACHE_DIR")
    return (Path(folder) if folder else Path.home() / ".cache" / "specengine") / "piecewise"


def lines_of(piece: GraphModule) -> Iterator[str]:
    """A graph as text that is the same for graphs that are alike: nodes and symbols have numbers in
    place of names."""
    numbers: dict[Node, str] = {}
    symbols: dict[str, str] = {}

    def renamed(text: str) -> str:
        return re.sub(r"\bs\d+\b", lambda m: symbols.setdefault(m[0], f"T{len(symbols)}"), text)

    for node in piece.graph.nodes:
        given = map_arg((node.args, node.kwargs), lambda one: _Named(numbers[one]))
        what = _described(node.meta.get("example_value")) if node.op == "placeholder" else ""
        target = "" if node.op in ("placeholder", "output") else _target(node)
        numbers[node] = f"v{len(numbers)}"
        yield renamed(f"{numbers[node]} {node.op} {target} {given} {what}")


class _Named(str):
    def __repr__(self) -> str:
        return str(self)


def _target(node: Node) -> str:
    if isinstance(node.target, str):
        return node.target
    name = getattr(node.target, "__qualname__", None) or str(node.target)
    return f"{getattr(node.target, '__module__', '')}.{name} {node.target}".split(" at 0x")[0]


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {value.stride()} {value.dtype} {value.device}"
    return str(value)
