"""The weights of one model put in the place of another's, so that all that points there is valid:
CUDA graphs, the drafter that borrows the head, tables of addresses.

Two models are alike where the same code built them: module by module the same parameters, and the
same numbers beside them. First everything is compared, then everything is copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from specengine.core.errors import ModelLoadError
from specengine.layers.head import Head

# What holds weights that were packed or quantised: Linear's, and Experts'.
_PACKED = ("kernel", "kernels", "packed")
_PLAIN = (bool, int, float, str, type(None))


def check_alike(old: nn.Module, new: nn.Module) -> None:
    """Raises ModelLoadError, naming the place, where `new` cannot take the place of `old`."""
    for name, mine, other in _modules(old, new):
        _check_numbers(name, mine, other)
        _check_tensors(name, mine, other)
    for mine_head, other_head in _heads(old, new):
        if mine_head.has_copies != other_head.has_copies:  # else the target's own rows are written
            raise ModelLoadError("one of the two drafts has copies of the target's head, one not")


def put_weights(old: nn.Module, new: nn.Module) -> None:
    """Copy the weights of `new` over those of `old`. `check_alike` has held. Modules that the two
    share stay as they are."""
    with torch.no_grad():
        for _, mine, other in _modules(old, new):
            for place, tensor in _tensors(mine).items():
                tensor.copy_(_tensors(other)[place])
            for kind in _PACKED:
                _put_packed(mine, other, kind)
        for mine_head, other_head in _heads(old, new):
            if mine_head.ids is not None and other_head.ids is not None:
                mine_head.ids.copy_(other_head.ids)


def weights_of(model: nn.Module) -> Iterator[Tensor]:
    """All that `put_weights` writes over, but for the tokens of a head."""
    for module in model.modules():
        yield from _tensors(module).values()
        for kind in _PACKED:
            yield from _inside(getattr(module, kind, None))


def refresh_head(draft: nn.Module) -> None:
    """Copy the rows of the target's head that the draft has copies of: they have changed."""
    head = getattr(draft, "head", None)
    if isinstance(head, Head):
        head.refresh()


def _modules(old: nn.Module, new: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    mine, others = dict(old.named_modules()), dict(new.named_modules())
    if mine.keys() != others.keys():
        name = min(mine.keys() ^ others.keys())
        raise ModelLoadError(f"{name} is in one of the two models alone: these are other weights")
    for name, module in mine.items():
        if module is not others[name]:
            yield name, module, others[name]


def _heads(old: nn.Module, new: nn.Module) -> Iterator[tuple[Head, Head]]:
    for _, mine, other in _modules(old, new):
        for name, value in vars(mine).items():
            if isinstance(value, Head):
                yield value, vars(other)[name]


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    found = (module.named_parameters(recurse=False), module.named_buffers(recurse=False))
    return {name: tensor for pairs in found for name, tensor in pairs}


def _check_tensors(name: str, mine: nn.Module, other: nn.Module) -> None:
    ours, theirs = _tensors(mine), _tensors(other)
    packed = any(getattr(one, kind, None) is not None for one in (mine, other) for kind in _PACKED)
    if ours.keys() != theirs.keys() and not packed:
        raise ModelLoadError(f"{name} has {sorted(theirs)} where {sorted(ours)} are wanted")
    for place in ours.keys() & theirs.keys():
        have, want = theirs[place], ours[place]
        if (have.shape, have.dtype) != (want.shape, want.dtype):
            raise ModelLoadError(
                f"{name}.{place} has shape {list(have.shape)} of {have.dtype}, the model that runs "
                f"has {list(want.shape)} of {want.dtype}"
            )
    for kind in _PACKED:
        _check_packed(f"{name}.{kind}", getattr(mine, kind, None), getattr(other, kind, None))


def _check_numbers(name: str, mine: nn.Module, other: nn.Module) -> None:
    for field, value in vars(mine).items():
        found = vars(other).get(field)
        is_plain = isinstance(value, _PLAIN) and isinstance(found, _PLAIN)
        if is_plain and not field.startswith("_") and field not in _PACKED and value != found:
            raise ModelLoadError(f"{name}.{field} is {found}, and {value} in the model that runs")


def _check_packed(name: str, mine: Any, other: Any) -> None:
    """Where graphs hold addresses, each tensor inside must find its place."""
    ours, theirs = list(_inside(mine)), list(_inside(other))
    if not any(tensor.is_cuda for tensor in ours):
        return
    forms = [[(tensor.shape, tensor.dtype) for tensor in side] for side in (ours, theirs)]
    if forms[0] != forms[1]:
        raise ModelLoadError(f"{name} is quantised in another form than in the model that runs")


def _put_packed(mine: nn.Module, other: nn.Module, kind: str) -> None:
    """On a CPU nothing holds addresses, and the form may follow from the values."""
    held = getattr(mine, kind, None)
    ours = list(_inside(held))
    if any(tensor.is_cuda for tensor in ours):
        for tensor, found in zip(ours, _inside(getattr(other, kind)), strict=True):
            tensor.copy_(found)
    elif held is not None or getattr(other, kind, None) is not None:
        setattr(mine, kind, getattr(other, kind))
        for place in ("weight", "gate_up", "down"):
            if place in mine._parameters:
                mine._parameters[place] = other._parameters[place]


def _inside(value: Any) -> Iterator[Tensor]:
    """Every tensor that an object holds, in the order of its fields."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _inside(one)
    elif type(value).__module__.startswith("specengine."):
        for one in vars(value).values():
            yield from _inside(one)
