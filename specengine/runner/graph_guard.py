"""Checks that the inputs of CUDA graphs have not moved (--debug-cuda-graph): a graph uses the
addresses that it was captured with, even after a tensor there was freed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from specengine.core.errors import GraphInputError
from specengine.core.request import Req

_DECLARED = ("_parameters", "_buffers", "_modules")  # what an nn.Module shows as attributes
_PLAIN = frozenset((int, float, bool, str, type(None)))  # hold no tensor, and are most attributes
Path = tuple[Any, str, object]  # the path above or None, the form of what is added, and that


@dataclass(frozen=True)
class Location:
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Location:
        return cls(tensor.data_ptr(), tuple(tensor.shape), tensor.stride())


@dataclass(frozen=True)
class Input:
    """is_weight: a parameter or buffer of a model, which must exist at capture; other tensors
    may be made at their first use."""

    name: str
    tensor: Tensor
    is_weight: bool = False


class GraphGuard:
    """Remembers the locations of the inputs of one or more graphs. Inputs that appear later are
    remembered from the first check that finds them. find: gives the inputs as they are now."""

    def __init__(self, find: Callable[[], Iterator[Input]]) -> None:
        self.find = find
        self.known = {one.name: Location.of(one.tensor) for one in find()}

    def check(self) -> None:
        """Raise GraphInputError, naming the first input that is not where it was."""
        found = {one.name: one for one in self.find()}
        places = {name: Location.of(one.tensor) for name, one in found.items()}
        late = {name for name, one in found.items() if one.is_weight} - self.known.keys()
        for name in sorted(self.known.keys() | late):
            before, now = self.known.get(name), places.get(name)
            if before != now:
                raise GraphInputError(
                    f"a CUDA graph was captured with {name} at {before}, and now it is at {now}: "
                    "write into the captured tensor instead of replacing it, or capture again"
                )
        self.known = places


def inputs_of(owners: Mapping[str, object]) -> Iterator[Input]:
    """Every tensor that the owners hold, directly or through objects of this package, by its path
    of attributes. So an added buffer is checked without further code. A class names in `unguarded`
    the attributes that no graph reads, and those that graphs make."""
    seen: set[int] = set()
    for name, owner in owners.items():
        yield from _walk((None, "{}", name), owner, seen)


def _name(path: Path) -> str:
    """Made of the paths of tensors alone: most of what is walked holds none, and keys may be
    long."""
    above, form, last = path
    return ("" if above is None else _name(above)) + form.format(last)


def _walk(path: Path, value: object, seen: set[int], is_weight: bool = False) -> Iterator[Input]:
    kind: Any = type(value)
    if kind in _PLAIN:
        return
    if isinstance(value, Tensor):
        if value.layout is torch.strided:  # others have no address, and do not occur on a GPU
            yield Input(_name(path), value, is_weight)
    elif isinstance(value, dict | list | tuple):
        if _is_new(value, seen):
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            for key, one in pairs:
                if type(one) not in _PLAIN:
                    yield from _walk((path, "[{}]", key), one, seen)
    elif _is_walked(kind) and hasattr(value, "__dict__") and _is_new(value, seen):
        skipped = _unguarded(kind)
        for name, one in vars(value).items():
            if name in _DECLARED and isinstance(value, nn.Module):
                for declared, inner in one.items():
                    yield from _walk((path, ".{}", declared), inner, seen, name != "_modules")
            elif type(one) not in _PLAIN and name not in skipped:
                yield from _walk((path, ".{}", name), one, seen)


def _is_new(value: object, seen: set[int]) -> bool:
    """By identity: owners keep their values alive during the walk."""
    is_new = id(value) not in seen
    seen.add(id(value))
    return is_new


@cache
def _is_walked(kind: type) -> bool:
    """Only objects of this package and modules; requests are not inputs of graphs."""
    if issubclass(kind, type | Req):
        return False
    ours = any(cls.__module__.partition(".")[0] == "specengine" for cls in kind.__mro__)
    return ours or issubclass(kind, nn.Module)


@cache
def _unguarded(kind: type) -> frozenset[str]:
    """Attributes that the class and its bases name so."""
    return frozenset(name for cls in kind.__mro__ for name in vars(cls).get("unguarded", ()))
