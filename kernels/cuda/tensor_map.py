"""How a matrix lies in memory, for a kernel that has boxes of it copied (the driver API's tensor
map objects)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_MOST_KEPT = 4096  # maps: buffers of eager forwards come and go
_ROW = 128  # bytes of a box's first dimension in shared memory, swizzled


@dataclass(frozen=True)
class TensorMap:
    """address, sizes and strides (elements, behind the first dimension, whose values lie together)
    of up to five dimensions, the innermost first; box: what one copy takes of each. Elements of 16
    bits. An argument of program.Kernel. The caller of its launch keeps the memory alive."""

    address: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


def tensor_map(
    tensor: Tensor, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]
) -> TensorMap:
    return TensorMap(tensor.data_ptr(), tensor.dtype, tuple(sizes), tuple(strides), tuple(box))


@lru_cache(_MOST_KEPT)
def encoded(of: TensorMap) -> Any:
    """The driver's form, of 128 bytes. Raises RuntimeError where the hardware cannot copy it so."""
    from cuda.bindings import driver

    if 2 * of.box[0] != _ROW:
        raise ValueError(f"rows of {2 * of.box[0]} bytes in shared memory: {_ROW} are swizzled")
    types = driver.CUtensorMapDataType
    is_bf16 = of.dtype == torch.bfloat16
    status, found = driver.cuTensorMapEncodeTiled(
        types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
        if is_bf16
        else types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        len(of.sizes),
        of.address,
        [driver.cuuint64_t(size) for size in of.sizes],
        [driver.cuuint64_t(2 * stride) for stride in of.strides],
        [driver.cuuint32_t(size) for size in of.box],
        [driver.cuuint32_t(1) for _ in of.sizes],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        # Lines of 128 bytes: with 256 a layer's weights took 3% longer (layer_tail_wgmma.cu).
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(status) != 0:
        raise RuntimeError(f"CUDA refuses a tensor map: {status} ({of})")
    return found
