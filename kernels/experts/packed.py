"""Experts whose weights have 8 or 4 bits, stacked as the products of this folder read them.

A format is one file in formats/ and one line of core/registry.py's EXPERT_FORMATS: an ExpertFormat,
which says what one expert's weight is and how a Triton program sums products with it. One expert's
weight is a dataclass of tensors and numbers (kernels/linear/quantised.py); all that stacks, cuts
and multiplies works on any such.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

from specengine.kernels.experts.tiles import PACKED, TileTable
from specengine.kernels.experts.types import Activation, Chosen
from specengine.kernels.linear import fp8_linear_ref
from specengine.kernels.linear.quantised import Fp8Input


@runtime_checkable
class OneExpert(Protocol):
    """A weight [N, K] of one expert."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def num_bytes(self) -> int: ...

    def dequantised(self) -> Tensor: ...  # float32 [N, K]


@dataclass(frozen=True)
class Operands:
    """What a format's Triton function is given beside inputs: four tensors and constants of its
    own, and the columns that one step may take at most, and takes at least."""

    tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    form: tuple[int, ...]
    most_columns: int
    least_columns: int = 32


class FewRows(Protocol):
    """Both products for few rows, where it takes them: x [T, H] -> float32 [K, T, H], parts as
    experts.experts says, into `into` where it is given."""

    def takes(self, x: Tensor, num_chosen: int, weights: PackedExpertWeights) -> bool: ...

    def experts(
        self,
        x: Tensor,
        chosen: Chosen,
        weights: PackedExpertWeights,
        *,
        into: Tensor | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True)
class Wide:
    """widen: (all experts' weights, a type) -> [E, N, K] of it, by a kernel. least_rows: mean rows
    an expert from which widening once and a dense product take less time than the format's sums."""

    widen: Callable[[PackedExperts, torch.dtype], Tensor]
    least_rows: float


@dataclass(frozen=True)
class ExpertFormat:
    """holds: type of one expert's weight. operands: (all experts' weights, the type that inputs
    had before they were rounded, their scales or None) -> Operands. sums: a Triton function,
    packed_triton.py says of which arguments.

    arrange: from what it holds to what is kept and multiplied, or None where products of that would
    be others. tiles: which its products take. few: a kernel of its own for few rows.
    wide: for very many.
    """

    holds: type
    operands: Callable[[PackedExperts, torch.dtype, Tensor | None], Operands]
    sums: Any
    arrange: Callable[[Any], OneExpert | None] = lambda one: one
    tiles: TileTable = PACKED
    few: FewRows | None = None
    wide: Wide | None = None


@dataclass(frozen=True)
class PackedExperts:
    """Weights [N, K] of E experts in one format.

    first: expert 0's, for what is no tensor. tensors: by field of it, [E, ...]. input: how rows are
    rounded before they are multiplied, where the format says so; of experts' published scales the
    largest, which clips nothing.
    """

    format: ExpertFormat
    first: Any
    tensors: dict[str, Tensor]
    input: Fp8Input | None = None

    @classmethod
    def of(cls, format: ExpertFormat, count: int, experts: Iterator[Any]) -> PackedExperts | None:
        """Takes `count` experts one by one, so that no two are in memory together with their
        copies. None where they differ in more than their numbers, or the format does not arrange
        them."""
        first: Any = format.arrange(next(experts))
        if first is None:
            return None
        held = {name: one.new_empty((count, *one.shape)) for name, one in _tensors(first)}
        scales: list[Tensor] = []
        for index in range(count):
            one = first if index == 0 else format.arrange(next(experts))
            if one is None or not _is_like(one, first):
                return None
            for name, tensor in _tensors(one):
                _bytes_of(held[name][index]).copy_(_bytes_of(tensor))
            scale = getattr(getattr(one, "input", None), "scale", None)
            scales += [] if scale is None else [scale]
        form: Fp8Input | None = getattr(first, "input", None)
        if form is not None and scales:
            form = replace(form, scale=torch.stack(scales).amax(0))
        kept = replace(first, **{name: tensor[0] for name, tensor in held.items()})
        return cls(format, kept, held, form)

    @property
    def shape(self) -> tuple[int, int, int]:
        """E, N, K."""
        return len(next(iter(self.tensors.values()))), *self.first.shape

    @property
    def num_bytes(self) -> int:
        return sum(one.numel() * one.element_size() for one in self.tensors.values())

    def one(self, expert: int) -> Any:
        """A view of one expert's weight."""
        return replace(self.first, **{name: one[expert] for name, one in self.tensors.items()})

    def product(self, x: Tensor, expert: int, bias: Tensor | None) -> Tensor:
        """``round_input(x) @ w.T + bias`` with one expert, the reference: [R, K] -> [R, N]. The
        weight is dequantised for it, sums are float32."""
        rows = x.float()
        if self.input is not None:
            codes, scale = fp8_linear_ref.quantise_rows(x, self.input)
            rows = codes.float() * scale.repeat_interleave(x.shape[1] // scale.shape[1], 1)
        wide = None if bias is None else bias.float()
        return F.linear(rows, self.one(expert).dequantised(), wide).to(x.dtype)


_SILU = Activation()


@dataclass(frozen=True)
class PackedExpertWeights:
    """As ExpertWeights, in a format."""

    gate_up: PackedExperts  # [E, 2 I, H], gate rows before up rows
    down: PackedExperts  # [E, H, I]
    gate_up_bias: Tensor | None = None  # [E, 2 I]
    down_bias: Tensor | None = None  # [E, H]
    activation: Activation = _SILU
    weighs_input: bool = False

    @property
    def num_experts(self) -> int:
        return self.gate_up.shape[0]

    @property
    def inner(self) -> int:
        return self.down.shape[2]


def _tensors(one: Any) -> list[tuple[str, Tensor]]:
    found = ((field.name, getattr(one, field.name)) for field in fields(one))
    return [(name, value) for name, value in found if isinstance(value, Tensor)]


def _is_like(one: Any, first: Any) -> bool:
    """Whether both are the same but for the numbers in their tensors."""
    if type(one) is not type(first):
        return False
    for field in fields(first):
        mine, other = getattr(one, field.name), getattr(first, field.name)
        if isinstance(mine, Tensor) and isinstance(other, Tensor):
            if (mine.shape, mine.dtype) != (other.shape, other.dtype):
                return False
        elif isinstance(mine, Fp8Input) and isinstance(other, Fp8Input):
            if (mine.scale is None, mine.group) != (other.scale is None, other.group):
                return False
        elif isinstance(mine, Tensor) or isinstance(other, Tensor) or mine != other:
            return False
    return True


def _bytes_of(tensor: Tensor) -> Tensor:
    """float8 has no kernels that copy all layouts: bytes are bytes."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
