"""Checks that the inputs of CUDA graphs have not moved (--debug-cuda-graph): a graph uses the
addresses that it was captured with, even after a tensor there was freed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specengine.core.errors import GraphInputError
from specengine.core.request import Req

_DECLARED = ("_parameters", "_buffers", "_modules")  # what an nn.Module shows as attributes


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
        yield from _walk(name, owner, seen)


def _walk(path: str, value: object, seen: set[int], is_weight: bool = False) -> Iterator[Input]:
    if isinstance(value, Tensor):
        if value.layout is torch.strided:  # others have no address, and do not occur on a GPU
            yield Input(path, value, is_weight)
    elif isinstance(value, dict | list | tuple):
        if _is_new(value, seen):
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            for key, one in pairs:
                yield from _walk(f"{path}[{key}]", one, seen)
    elif _is_walked(value) and _is_new(value, seen):
        skipped = {name for cls in type(value).__mro__ for name in vars(cls).get("unguarded", ())}
        for name, one in vars(value).items():
            if name in _DECLARED and isinstance(value, nn.Module):
                for declared, inner in one.items():
                    yield from _walk(f"{path}.{declared}", inner, seen, name != "_modules")
            elif name not in skipped:
                yield from _walk(f"{path}.{name}", one, seen)


def _is_new(value: object, seen: set[int]) -> bool:
    """By identity: owners keep their values alive during the walk."""
    is_new = id(value) not in seen
    seen.add(id(value))
    return is_new


def _is_walked(value: object) -> bool:
    """Only objects of this package and modules; requests are not inputs of graphs."""
    if isinstance(value, type | Req) or not hasattr(value, "__dict__"):
        return False
    bases = type(value).__mro__
    ours = any(cls.__module__.partition(".")[0] == "specengine" for cls in bases)
    return ours or isinstance(value, nn.Module)
