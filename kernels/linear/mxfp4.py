"""MXFP4 (OCP Microscaling Formats 1.0, 2023): 32 neighbours of 4 bits (e2m1) share a power of 2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specengine.kernels.linear.linear_format import LinearFormat
from specengine.kernels.linear.quantised import pack_int4, unpack_int4

BLOCK = 32
_BIAS = 127
_MAX_EXPONENT = 2  # of e2m1: its largest value is 6 = 1.5 * 2 ** 2
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Between two magnitudes lies what is rounded to the one whose last bit is 0.
_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def dequantise(blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """blocks: uint8 [..., G, 16], two codes a byte, the first in the low bits; a code is a sign and
    three bits of magnitude. scales: uint8 [..., G], exponents + 127 -> [..., 32 G] of `dtype`."""
    values = torch.tensor(_MAGNITUDES, device=blocks.device)
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    signed = values[(codes & 7).long()] * torch.where(codes >= 8, -1.0, 1.0)
    exponents = scales.to(torch.int32) - _BIAS
    return torch.ldexp(signed, exponents.unsqueeze(-1)).flatten(-2).to(dtype)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse, to the nearest, ties to even: [..., 32 G] -> blocks and scales. What lies beyond
    a block's largest value, 6 * 2 ** e, is clipped, as the specification has it."""
    groups = weight.float().view(*weight.shape[:-1], -1, BLOCK)
    largest = groups.abs().amax(-1)
    exponents = torch.where(largest > 0, torch.frexp(largest)[1] - 1, 0) - _MAX_EXPONENT
    exponents = exponents.clamp(-_BIAS, _BIAS)
    scaled = torch.ldexp(groups, -exponents.unsqueeze(-1))
    magnitude = torch.bucketize(scaled.abs(), torch.tensor(_MIDDLES, device=weight.device))
    ties = torch.isin(scaled.abs(), torch.tensor(_MIDDLES[1::2], device=weight.device))
    magnitude = (magnitude + ties).to(torch.uint8)  # bucketize leaves ties below
    codes = magnitude | ((scaled < 0).to(torch.uint8) << 3)
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    return blocks, (exponents + _BIAS).to(torch.uint8)


@dataclass(frozen=True)
class Mxfp4Weight:
    """w[n, k] = value of code[n, k] * 2 ** (scale[n, k // 32] - 127).

    codes: uint8 [N, K / 2], 4 bits each, packed as those of IntWeight; scale: uint8 [N, K / 32].
    """

    codes: Tensor
    scale: Tensor

    @classmethod
    def of(cls, blocks: Tensor, scales: Tensor) -> Mxfp4Weight:
        """blocks, scales: [N, G, 16] and [N, G], as checkpoints have them (`dequantise`)."""
        codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(1)
        return cls(pack_int4(codes), scales.contiguous())

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * 2

    @property
    def num_bytes(self) -> int:
        return self.codes.numel() + self.scale.numel()

    def dequantised(self) -> Tensor:
        """float32 [N, K]."""
        codes = unpack_int4(self.codes).view(*self.scale.shape, BLOCK // 2, 2)
        return dequantise(codes[..., 0] | codes[..., 1] << 4, self.scale)

    def narrow(self, dim: int, start: int, size: int) -> Mxfp4Weight | None:
        """Some rows (dim 0) or some columns (dim 1). None: columns begin or end amid a block."""
        if dim == 0:
            rows = slice(start, start + size)
            return replace(self, codes=self.codes[rows], scale=self.scale[rows])
        if start % BLOCK or size % BLOCK:
            return None
        codes = self.codes.narrow(1, start // 2, size // 2).contiguous()
        scale = self.scale.narrow(1, start // BLOCK, size // BLOCK).contiguous()
        return replace(self, codes=codes, scale=scale)


def join_mxfp4(parts: Sequence[Mxfp4Weight]) -> Mxfp4Weight:
    """Weights of one input as one, their rows one below the other."""
    codes = torch.cat([one.codes for one in parts])
    return Mxfp4Weight(codes, torch.cat([one.scale for one in parts]))


FORMAT = LinearFormat(Mxfp4Weight, "MXFP4", join=join_mxfp4)
