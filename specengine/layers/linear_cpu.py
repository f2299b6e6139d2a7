"""Weights of linear layers in the forms that CPUs multiply fastest.

The choice is measured (benchmarks/results, cpu-linear). float32: MKL's packed format, which eight
rows cost what one does; where every weight is a bfloat16 number, as most checkpoints' are, compiled
C over the bfloat16 weight, which loses nothing and is half as much to keep and to read. bfloat16:
the same, or oneDNN on CPUs with bfloat16 instructions. int8 and int4: PyTorch's weight-only
kernels, whose activations are bfloat16. On the CPUs measured, each of them gives a row the same
bits whatever other rows there are, which F.linear does not; so the number of rows never
changes the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specengine.core.errors import ConfigError, ModelLoadError
from specengine.kernels.native import linear as native
from specengine.layers.experts import Experts
from specengine.layers.linear import Linear, LinearKernel, LMHead

INT4_GROUP_SIZE = 32

# MKL lays a packed matrix out for a number of rows, and multiplies any other number with it too:
# 512 is as fast as any for few rows, and the fastest for many.
_MKL_ROWS = 512


class MklLinear:
    """float32, packed by MKL. Results do not depend on the number of rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, _MKL_ROWS)
        self.bias = bias
        # The operator reads the plain weight's shape only, as long as its argument says that the
        # packed one was made for the rows at hand; so one shared element replaces the weight.
        self.shape_only = torch.empty(1).expand(weight.shape)
        self.multiply = torch.ops.mkl._mkl_linear.default

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self.multiply(x, self.packed, self.shape_only, self.bias, x.shape[0])
        return out


class NativeLinear:
    """A bfloat16 weight in panels, or a float32 one of bfloat16 numbers; float32 or bfloat16 in and
    out, sums in float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.panels = native.pack(weight)
        self.bias = torch.zeros(weight.shape[0], dtype=torch.float32)
        if bias is not None:
            self.bias.copy_(bias)

    def __call__(self, x: Tensor) -> Tensor:
        return native.linear(x, self.panels, self.bias)

    @staticmethod
    def fits(weight: Tensor) -> bool:
        """It loses nothing, and the compiled form is there."""
        if not native.fits(weight):
            return False
        is_exact = weight.dtype == torch.bfloat16  # and need not be compared
        return is_exact or torch.equal(weight.to(torch.bfloat16).to(weight), weight)


class OneDnnLinear:
    """bfloat16, in oneDNN's blocked layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        self.bias = bias
        self.multiply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self.multiply(x, self.packed, self.bias, "none", [], "")
        return out


class Int8Linear:
    """Weights rounded to 8 bits, one scale an output row; bfloat16 in and out."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        scale_N = (weight.float().abs().amax(dim=1) / 127).clamp_min(1e-12).to(torch.bfloat16)
        codes = (weight.float() / scale_N.float()[:, None]).round().clamp(-127, 127)
        self.codes_NK = codes.to(torch.int8)
        self.scale_N = scale_N
        self.bias = bias
        self.multiply = torch.ops.aten._weight_int8pack_mm.default

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self.multiply(x.contiguous(), self.codes_NK, self.scale_N)
        return out if self.bias is None else out + self.bias

    @staticmethod
    def fits(weight: Tensor) -> bool:
        """The operator reads out of bounds when in_features is no multiple of 16."""
        return weight.shape[1] % 16 == 0


class Int4Linear:
    """Weights rounded to 4 bits, w = (code - 8) * scale + middle with one pair for `group_size`
    neighbours in a row; bfloat16 in and out."""

    def __init__(self, weight: Tensor, bias: Tensor | None, group_size: int) -> None:
        codes, scale_middle = quantize_int4(weight, group_size)
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        self.scale_middle = scale_middle
        self.group_size = group_size
        self.bias = bias
        self.multiply = torch.ops.aten._weight_int4pack_mm_for_cpu.default

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.contiguous()
        out: Tensor = self.multiply(rows, self.packed, self.group_size, self.scale_middle)
        return out if self.bias is None else out + self.bias

    @staticmethod
    def fits(weight: Tensor, group_size: int) -> bool:
        return weight.shape[0] % 16 == 0 and weight.shape[1] % group_size == 0


def quantize_int4(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Codes 0 .. 15, int32 [N, K], and (scale, middle), bfloat16 [K / group_size, N, 2].

    The grid spans a group's least to greatest weight, so that a matrix that was quantised in this
    way before (GGUF's Q4_1, groups of 32) keeps its values.
    """
    groups = weight.float().view(weight.shape[0], -1, group_size)
    low, high = groups.aminmax(dim=-1, keepdim=True)
    scale = ((high - low) / 15).clamp_min(1e-12).to(torch.bfloat16)
    middle = (low + 8 * scale.float()).to(torch.bfloat16)
    codes = ((groups - middle.float()) / scale.float()).round() + 8
    scale_middle = torch.cat([scale, middle], dim=-1).transpose(0, 1).contiguous()
    return codes.clamp(0, 15).to(torch.int32).flatten(1), scale_middle


def pack_linears(
    model: nn.Module, quantization: str | None, group_size: int = INT4_GROUP_SIZE
) -> None:
    """Pack every linear layer of a model on CPU, one after the other, dropping the plain weights.

    quantization: None, "int8" or "int4" (the head, and layers that int4 does not fit, in int8).
    Raises ConfigError where the quantization is not available, ModelLoadError for a layer that it
    does not fit. A model elsewhere than on CPU stays as it is.
    """
    for name, module in model.named_modules():
        if isinstance(module, Linear) and module.weight is not None and not module.keeps_plain:
            kept = None if module.keeps_precision else quantization
            how = _Packing(name, kept, group_size, most_bits=isinstance(module, LMHead))
            kernel = how.kernel(module.weight, module.bias)
            if kernel is not None:
                module.use_kernel(kernel)
        elif isinstance(module, Experts):
            module.pack(_Packing(name, quantization, group_size).kernel)


@dataclass(frozen=True)
class _Packing:
    """How one layer is packed. name: for what is said of it. most_bits: int4 leaves it at 8."""

    name: str
    quantization: str | None
    group_size: int
    most_bits: bool = False

    def kernel(self, weight: Tensor, bias: Tensor | None) -> LinearKernel | None:
        """None: the plain weight is as good."""
        weight, quantization = weight.detach(), self.quantization
        if quantization is None:
            return _unquantized_kernel(weight, bias)
        if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
            raise ConfigError(
                f"quantization {quantization} needs --device cpu and --dtype bfloat16, not "
                f"{weight.device.type} and {str(weight.dtype).removeprefix('torch.')}"
            )
        wants_int4 = quantization == "int4" and not self.most_bits
        if wants_int4 and Int4Linear.fits(weight, self.group_size):
            return Int4Linear(weight, bias, self.group_size)
        if not Int8Linear.fits(weight):
            raise ModelLoadError(
                f"{self.name} has {weight.shape[1]} inputs; {quantization} needs a multiple of 16. "
                "Leave out --quantization for this model"
            )
        return Int8Linear(weight, bias)


def _unquantized_kernel(weight: Tensor, bias: Tensor | None) -> LinearKernel | None:
    if weight.device.type != "cpu":
        return None
    if weight.dtype == torch.float32:
        if NativeLinear.fits(weight):
            return NativeLinear(weight, bias)
        if torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
            return MklLinear(weight, bias)
    if weight.dtype == torch.bfloat16:
        if not torch.cpu._is_avx512_bf16_supported() and NativeLinear.fits(weight):
            return NativeLinear(weight, bias)
        if torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return OneDnnLinear(weight, bias)
    return None
