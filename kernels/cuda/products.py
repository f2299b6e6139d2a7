"""The few-row operations in terms of one launch: what is fused with a product, and its outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Around:
    """What is fused before and after a product."""

    norm_weight: Tensor | None = None
    eps: float = 0.0
    bias: Tensor | None = None
    residual: Tensor | None = None
    gated: bool = False
    beside: bool = False  # of the kernel ahead, as few_row.linear says of into

    def defines(self, x: Tensor, out: Tensor) -> tuple[tuple[str, int], ...]:
        """What the kernels take at compile time."""
        return (
            ("TYPE", 0 if x.dtype == torch.bfloat16 else 1),
            ("NORM", int(self.norm_weight is not None)),
            ("GATED", int(self.gated)),
            ("BIAS", int(self.bias is not None)),
            ("RESIDUAL", int(self.residual is not None)),
            ("WIDE_OUT", int(out.dtype == torch.float32)),
            ("BESIDE", int(self.beside)),
        )


@dataclass(frozen=True)
class Products:
    """launch: (x, weight, out, around) -> out."""

    launch: Callable[[Tensor, Tensor, Tensor, Around], Tensor]

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, into: Tensor | None = None
    ) -> Tensor:
        out = _outputs(x, weight.shape[0]) if into is None else into
        return self.launch(x, weight, out, Around(bias=bias, beside=into is not None))

    def norm_linear(
        self,
        x: Tensor,
        norm_weight: Tensor,
        eps: float,
        weight: Tensor,
        bias: Tensor | None,
        out_dtype: torch.dtype | None,
    ) -> Tensor:
        out = _outputs(x, weight.shape[0], out_dtype)
        return self.launch(x, weight, out, Around(norm_weight, eps, bias))

    def norm_gated_linear(
        self, x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor
    ) -> Tensor:
        out = _outputs(x, weight.shape[0] // 2)
        return self.launch(x, weight, out, Around(norm_weight, eps, gated=True))

    def linear_add(
        self, x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None
    ) -> Tensor:
        out = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
        return self.launch(x, weight, out, Around(bias=bias, residual=residual))


def _outputs(x: Tensor, num_outs: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty((x.shape[0], num_outs), dtype=dtype or x.dtype, device=x.device)
