"""Feed-forward layers: gated (GLU variants, Shazeer 2020) and plain."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from torch import Tensor

from specengine.core.errors import ModelLoadError
from specengine.core.parallel import even_cut
from specengine.kernels.linear import few_row
from specengine.kernels.linear.activation import ACTIVATIONS, act_and_mul
from specengine.kernels.linear.quantised import Fp8Input
from specengine.kernels.opaque import is_traced
from specengine.layers.linear import ColumnParallelLinear, Linear, MergedLinear, RowParallelLinear
from specengine.layers.module import Module
from specengine.layers.norm import RMSNorm
from specengine.layers.split_ops import Numbered, run_module

if TYPE_CHECKING:
    from specengine.layers.layer_spec import LayerSpec


class FeedForward(Module):
    """down(inner(x)). A rank has some of the intermediate features."""

    down_proj: RowParallelLinear

    @abstractmethod
    def inner(self, x: Tensor) -> Tensor:
        """[T, hidden_size] -> [T, intermediate_size]."""

    @property
    @abstractmethod
    def up(self) -> Linear:
        """What reads the input: gate and up as one, or up alone."""

    @property
    def takes(self) -> Fp8Input | None:
        """As layers.linear.Linear has it: of the input."""
        return self.up.takes

    @property
    def waits(self) -> bool:
        """As layers.linear.Linear has it: what reads the input."""
        return self.up.waits

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden_size] -> the same shape."""
        return self.down_proj.forward(self.inner(x))

    def own_part(self, x: Tensor) -> Tensor:
        """What this rank adds to it."""
        return self.down_proj.own_part(self.inner(x))

    def parts(self, x: Tensor) -> Tensor:
        """The same, perhaps in parts, for RMSNorm.add."""
        return self.down_proj.parts(self.inner(x))


class GatedMLP(FeedForward, Numbered):
    """down(act(gate(x)) * up(x)). activation: a key of kernels.linear.activation.ACTIVATIONS; any
    other raises ModelLoadError."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, bias: bool = False, activation: str = "silu"
    ) -> None:
        super().__init__()
        self.activation = known_activation(activation)
        part = even_cut(intermediate_size, "intermediate features")
        self.gate_up_proj = MergedLinear(hidden_size, [part.size] * 2, bias, [part] * 2)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, bias, part)

    @property
    def up(self) -> Linear:
        return self.gate_up_proj

    def inner(self, x: Tensor) -> Tensor:
        gated, into = self.gate_up_proj.gated_kernel, self.down_proj.takes
        if gated is None or into is not None:  # which it would not round rows to
            return act_and_mul(self.gate_up_proj.forward(x), self.activation, into=into)
        if is_traced():
            return run_module(self, x, self.down_proj.in_features)
        return gated(x, self.activation)

    def run_module(self, x: Tensor) -> Tensor:
        """The product with the down projection is in the trace."""
        return self.inner(x)

    def few_rows(self, stream: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor | None]:
        """The stream [T, hidden_size] with what this adds to it, behind its norm: a kernel a
        weight, of silu without biases. None: nothing is left to add."""
        gate_up = self.gate_up_proj.plain
        gated = few_row.norm_gated_linear(stream, norm.weight, norm.eps, gate_up)
        return self.down_proj.add_few_rows(gated, stream), None


class PlainMLP(FeedForward):
    """down(act(up(x))). activation: as for GatedMLP."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, bias: bool, activation: str
    ) -> None:
        super().__init__()
        self.activation = known_activation(activation)
        part = even_cut(intermediate_size, "intermediate features")
        self.up_proj = ColumnParallelLinear(hidden_size, part, bias)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, bias, part)

    @property
    def up(self) -> Linear:
        return self.up_proj

    def inner(self, x: Tensor) -> Tensor:
        return ACTIVATIONS[self.activation](self.up_proj.forward(x))


def known_activation(name: str) -> str:
    """Raises ModelLoadError for one that nothing computes."""
    if name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ModelLoadError(f"activation {name!r} is not supported; known: {known}")
    return name


def make_mlp(spec: LayerSpec) -> FeedForward:
    """The dense one that a layer's description asks for."""
    given = spec.hidden_size, spec.intermediate_size, spec.mlp_bias, spec.activation
    return GatedMLP(*given) if spec.gated_mlp else PlainMLP(*given)
