"""What linear layers ask of one type of weight.

A type of weight is one dataclass (quantised.py, mxfp4.py), one LinearFormat beside what multiplies
with it, and one line of core/registry.py's LINEAR_FORMATS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.nn import functional as F

from specengine.kernels.linear.quantised import Fp8Input


class QuantisedWeight(Protocol):
    """A weight [N, K] of one linear layer in fewer bits than floating point has."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def num_bytes(self) -> int: ...

    def dequantised(self) -> Tensor: ...  # float32 [N, K]

    # Rows (dim 0) or columns (dim 1); None where they cut what has one scale.
    def narrow(self, dim: int, start: int, size: int) -> QuantisedWeight | None: ...


@dataclass(frozen=True)
class LinearFormat:
    """holds: the type of the weight. title: what error messages call it. join: weights [N_i, K] of
    one input -> one [sum N_i, K], or None where they differ in more than their numbers.
    take_rows: (weight, int64 rows) -> the weight of these rows; None: rows are not reordered.

    multiply: (x [T, K], weight, bias [N] or None) -> [T, N] of x's dtype; None: linear layers do
    not multiply with it, only experts. parts: (x, weight) -> float32 [P, T, N], whose sum is the
    product, or None where it is not split. gated: (x, weight, activation, bias) -> [T, N / 2], the
    gated activation behind the product, with the bits of the two apart; None: there is no such
    kernel. input: how multiply rounds its rows. waits: whether a norm right ahead of it may call
    its rows awaited. completes_input: as layers.linear.Linear has it.
    """

    holds: type
    title: str
    join: Callable[[Sequence[Any]], QuantisedWeight | None] = lambda weights: None
    take_rows: Callable[[Any, Tensor], QuantisedWeight] | None = None
    multiply: Callable[[Tensor, Any, Tensor | None], Tensor] | None = None
    parts: Callable[[Tensor, Any], Tensor | None] = lambda x, weight: None
    gated: Callable[[Tensor, Any, str, Tensor | None], Tensor] | None = None
    input: Callable[[Any], Fp8Input | None] = lambda weight: None
    waits: Callable[[Any], bool] = lambda weight: False
    completes_input: bool = False


PLAIN = LinearFormat(Tensor, "floating point", multiply=F.linear)
