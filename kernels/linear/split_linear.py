"""A product that leaves its sum in parts, for the norm behind it to add up.

A wide weight has too few tiles of outputs for all multiprocessors, so that cuBLAS cuts the sum over
the inputs into parts, too, and adds them up in a kernel of its own, after which the norm starts one
more. `norm.sum_add_rms_norm` does both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.kernels.linear import split_linear_ref

PARTS = 2
# Where it was ahead of cuBLAS and its sum on an H200 (benchmarks/results, wide-rows).
_FEWEST_ROWS, _MOST_ROWS = 9, 256
_LEAST_OUTPUTS = 2048


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether to take it for rows [T, in] on a GPU."""
    if not x.is_cuda or x.dim() != 2 or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    is_wide = weight.shape[0] >= _LEAST_OUTPUTS and weight.shape[1] % (64 * PARTS) == 0
    return is_wide and _FEWEST_ROWS <= len(x) <= _MOST_ROWS and x.is_contiguous()


def split_linear(x: Tensor, weight: Tensor) -> Tensor:
    """``out[p] = x[:, p-th part of the inputs] @ weight[:, the same].T``, in float32.

    x: [T, in], weight: [out, in], both contiguous and of one dtype; PARTS divides in.
    Returns float32 [PARTS, T, out]. Any device.
    """
    if not x.is_cuda:
        return split_linear_ref.split_linear(x, weight, PARTS)
    rows, width = len(x), x.shape[1] // PARTS
    inputs_PTI = x.view(rows, PARTS, width).transpose(0, 1)
    weights_PIO = weight.view(len(weight), PARTS, width).permute(1, 2, 0)
    return torch.bmm(inputs_PTI, weights_PIO, out_dtype=torch.float32)
