"""Experts of a layer as specengine and libraries multiply with them: random weights in a format,
how each arranges them, and what each runs from the chosen experts on (library_experts.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.kernels.experts import Shape
from benchmarks.kernels.library_modules import (
    sglang_fused_moe,
    sglang_rounded,
    vllm_fused_moe,
    vllm_moe_ops,
    vllm_triton_kernels,
)
from benchmarks.kernels.library_products import (
    UINT4_BIAS_8,
    gptq_words,
    marlin_scales,
    sglang_ops,
    vllm_ops,
)
from specengine.core.registry import EXPERT_FORMATS, load_place
from specengine.kernels.experts.experts import experts
from specengine.kernels.experts.packed import PackedExperts, PackedExpertWeights
from specengine.kernels.experts.types import Chosen, ExpertWeights
from specengine.kernels.linear.mxfp4 import Mxfp4Weight, dequantise
from specengine.kernels.linear.quantised import FP8, Fp8Input, Fp8Weight, IntWeight

OURS = "specengine"
BLOCK, GROUP, MX = 128, 128, 32
FP4_E2M1 = 2 | 1 << 8 | 1 << 16 | 1 << 49  # vLLM's number: exponent, mantissa, signed, finite


@dataclass(frozen=True)
class Stack:
    """Weights [E, N, K]. codes: bfloat16; e4m3, with scale float32 [E, N / 128, K / 128]; codes + 8
    of 4 bits, uint8, with scale bfloat16 [E, N, K / 128]; or e2m1, uint8 [E, N, K / 2], of two the
    first in the low bits, with scale uint8 [E, N, K / 32], exponents + 127."""

    codes: Tensor
    scale: Tensor | None = None
    bias: Tensor | None = None  # bfloat16 [E, N]

    def dense(self, expert: int) -> Tensor:
        """float64 [N, K]."""
        codes = self.codes[expert]
        if self.scale is None:
            return codes.double()
        scale = self.scale[expert]
        if codes.dtype == FP8:
            blocks = scale.double().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            return codes.double() * blocks
        if scale.dtype == torch.uint8:
            return dequantise(codes.view(*scale.shape, MX // 2), scale, torch.float64)
        return (codes.double() - 8) * scale.double().repeat_interleave(GROUP, 1)


@dataclass(frozen=True)
class Drawn:
    """Random weights of a layer."""

    shape: Shape
    gate_up: Stack  # [E, 2 I, H], gate rows before up rows
    down: Stack  # [E, H, I]

    @property
    def rounds(self) -> Fp8Input | None:
        """How inputs of both products are rounded."""
        return Fp8Input(group=BLOCK) if self.down.codes.dtype == FP8 else None


@dataclass(frozen=True)
class Arranged:
    """What a library multiplies with: of gate_up and down the weights, scales and biases, and what
    else it is given."""

    weights: tuple[Any, Any]
    scales: tuple[Any, Any] = (None, None)
    biases: tuple[Any, Any] = (None, None)
    rooms: tuple[Any, ...] = ()


def _same(chosen: Chosen, _: int) -> Any:
    return chosen


@dataclass(frozen=True)
class Form:
    """make: what is multiplied with. run: (rows [T, H], what was chosen, that) -> [T, H], or
    float32 parts of its sum [P, T, H]. routed: (chosen, number of experts) -> what the library's
    routing gives. is_triton: its kernels can be compiled before, on all cores."""

    make: Callable[[Drawn], Any]
    run: Callable[[Tensor, Any, Any], Tensor]
    routed: Callable[[Chosen, int], Any] = _same
    is_triton: bool = False


def draw(shape: Shape, form: str, device: str = "cuda") -> Drawn:
    sizes = (2 * shape.inner, shape.hidden), (shape.hidden, shape.inner)
    stacks = (DRAWS[form](shape.count, *size, device) for size in sizes)
    if shape.has_bias:
        biases = (0.1 * torch.randn(shape.count, n, device=device).bfloat16() for n, _ in sizes)
        stacks = (replace(one, bias=bias) for one, bias in zip(stacks, biases, strict=True))
    return Drawn(shape, *stacks)


def _uneven(*size: int, device: str) -> Tensor:
    return 0.5 + torch.rand(*size, device=device)


def whole(count: int, rows: int, columns: int, device: str) -> Stack:
    made = torch.empty(count, rows, columns, dtype=torch.bfloat16, device=device)
    return Stack(made.normal_(0.0, columns**-0.5))


def fp8(count: int, rows: int, columns: int, device: str) -> Stack:
    codes = torch.empty(count, rows, columns, dtype=FP8, device=device)
    for one in codes:
        one.copy_(32 * torch.randn(rows, columns, device=device))
    size = count, rows // BLOCK, columns // BLOCK
    return Stack(codes, _uneven(*size, device=device) * columns**-0.5 / 32)


def int4(count: int, rows: int, columns: int, device: str) -> Stack:
    codes = torch.randint(0, 16, (count, rows, columns), dtype=torch.uint8, device=device)
    scale = _uneven(count, rows, columns // GROUP, device=device) * columns**-0.5 / 4.6
    return Stack(codes, scale.bfloat16())


def mxfp4(count: int, rows: int, columns: int, device: str) -> Stack:
    codes = torch.randint(0, 256, (count, rows, columns // 2), dtype=torch.uint8, device=device)
    usual = 127 - round(torch.tensor(float(columns)).log2().item() / 2 + 1.5)
    size = count, rows, columns // MX
    scale = torch.randint(usual - 2, usual + 2, size, dtype=torch.uint8, device=device)
    return Stack(codes, scale)


DRAWS = {"bf16": whole, "fp8": fp8, "int4": int4, "mxfp4": mxfp4}


# Ours.


def for_us(drawn: Drawn) -> ExpertWeights | PackedExpertWeights:
    first, second, how = drawn.gate_up, drawn.down, drawn.shape.activation
    biases = first.bias, second.bias
    if second.scale is None:
        return ExpertWeights(first.codes, second.codes, *biases, how)
    return PackedExpertWeights(packed(first), packed(second), *biases, how)


def packed(stack: Stack) -> PackedExperts:
    each = list(_one_by_one(stack))
    place = {Fp8Weight: "fp8", IntWeight: "int", Mxfp4Weight: "mxfp4"}[type(each[0])]
    made = PackedExperts.of(load_place(EXPERT_FORMATS[place]), len(each), iter(each))
    assert made is not None
    return made


def _one_by_one(stack: Stack) -> Iterator[Any]:
    assert stack.scale is not None
    for codes, scale in zip(stack.codes, stack.scale, strict=True):
        if codes.dtype == FP8:
            yield Fp8Weight(codes, scale, BLOCK, BLOCK, Fp8Input(group=BLOCK))
        elif scale.dtype == torch.uint8:
            yield Mxfp4Weight.of(codes.view(*scale.shape, MX // 2), scale)
        else:
            yield IntWeight.pack(codes, scale, None, 4)


# Triton kernels of vLLM and SGLang, which read weights as they are drawn.


def as_drawn(drawn: Drawn) -> Arranged:
    first, second = drawn.gate_up, drawn.down
    return Arranged((first.codes, second.codes), (first.scale, second.scale))


def vllm_triton(x: Tensor, chosen: Chosen, given: Arranged) -> Tensor:
    out: Tensor = vllm_fused_moe().fused_experts_impl(
        *(x, *given.weights, chosen.weights_TK, chosen.ids_TK), **_fp8_options(given)
    )
    return out


def sglang_triton(x: Tensor, chosen: Chosen, given: Arranged) -> Tensor:
    out: Tensor = sglang_fused_moe().fused_experts_impl(
        *(x, *given.weights, chosen.weights_TK, chosen.ids_TK),
        **_fp8_options(given),
        filter_expert=False,
    )
    return out


def _fp8_options(given: Arranged) -> dict[str, Any]:
    first, second = given.scales
    if first is None:
        return {}
    block = {"use_fp8_w8a8": True, "block_shape": [BLOCK, BLOCK]}
    return block | {"w1_scale": first, "w2_scale": second}


# CUTLASS in sglang-kernel.


@dataclass(frozen=True)
class Grouped:
    """What CUTLASS is told of the groups of a product, and writes about them. strides: int64 [E]
    of inputs and outputs; sizes: int32 [E, 3]."""

    strides: tuple[Tensor, Tensor]
    sizes: Tensor


def for_cutlass(drawn: Drawn) -> Arranged:
    both, count = (drawn.gate_up, drawn.down), drawn.shape.count
    device = drawn.down.codes.device
    groups = []
    for stack in both:
        _, outs, columns = stack.codes.shape
        strides = (torch.full((count,), n, device=device) for n in (columns, outs))
        sizes = torch.empty(count, 3, dtype=torch.int32, device=device)
        groups.append(Grouped((next(strides), next(strides)), sizes))
    pointers = torch.empty(5, count, dtype=torch.int64, device=device)
    layouts = torch.empty(2, count, 5, dtype=torch.int32, device=device)
    starts = torch.empty(count + 1, dtype=torch.int32, device=device)
    room = torch.empty(1 << 26, dtype=torch.uint8, device=device)
    weights, scales = (
        tuple(one.transpose(1, 2) for one in pair)
        for pair in ([s.codes for s in both], [s.scale for s in both if s.scale is not None])
    )
    return Arranged(
        (weights[0], weights[1]),
        (scales[0], scales[1]),
        rooms=(*groups, pointers, layouts, starts, room),
    )


def sglang_cutlass(x: Tensor, chosen: Chosen, given: Arranged, by_expert: bool = False) -> Tensor:
    """As cutlass_fused_experts_fp8 of SGLang. by_expert: its kernels for each size of expert."""
    ops, (rows, hidden), count = sglang_ops(), x.shape, chosen.ids_TK.shape[1]
    first, second, pointers, layouts, starts, room = given.rooms
    inner, slots = given.weights[1].shape[1], rows * count
    there, back = torch.empty(2, slots, dtype=torch.int32, device=x.device)
    ops.prepare_moe_input(
        *(chosen.ids_TK, starts, None, first.sizes, second.sizes, there, back),
        *(len(starts) - 1, inner, hidden),
    )

    def multiply(x: Tensor, scale: Tensor, place: int) -> Tensor:
        group, weight = (first, second)[place], given.weights[place]
        of_inputs, of_outs = group.strides
        out = torch.empty(slots, weight.shape[2], dtype=torch.bfloat16, device=x.device)
        both = (x, weight, scale, given.scales[place], of_inputs, of_inputs, of_outs)
        if by_expert:
            ops.es_fp8_blockwise_scaled_grouped_mm(out, *both, group.sizes, starts[:-1], room)
        else:
            ops.fp8_blockwise_scaled_grouped_mm(
                *(out, *pointers, *both, *layouts, group.sizes, starts[:-1], room)
            )
        return out

    codes, scale = sglang_rounded(x)
    moved = codes.new_empty(slots, hidden), scale.new_empty(slots, scale.shape[1])
    for source, target in zip((codes, scale), moved, strict=True):
        ops.shuffle_rows(source, there, target)
    sums = multiply(*moved, 0)
    activated = x.new_empty(slots, inner)
    ops.silu_and_mul(activated, sums)
    sums = multiply(*sglang_rounded(activated), 1)
    out = torch.empty_like(x)
    ops.apply_shuffle_mul_sum(sums, out, back, chosen.weights_TK.to(x.dtype))
    return out


def sglang_by_expert(x: Tensor, chosen: Chosen, given: Arranged) -> Tensor:
    return sglang_cutlass(x, chosen, given, by_expert=True)


# Marlin of vLLM.


def for_marlin(drawn: Drawn) -> Arranged:
    both = drawn.gate_up, drawn.down
    weights = tuple(_repacked(codes_of(one)) for one in both)
    scales = tuple(torch.stack([marlin_scales(s) for s in one.scale]) for one in both)  # type: ignore[union-attr]
    return Arranged((weights[0], weights[1]), (scales[0], scales[1]), rooms=(_locks(weights[0]),))


def for_marlin_mxfp4(drawn: Drawn) -> Arranged:
    """Of sizes that Marlin's tiles divide: the hidden size a multiple of 256, the inner one of 128,
    as vLLM pads them; rows of gate and up take turns."""
    wide = -drawn.shape.hidden % 256, -drawn.shape.inner % 128
    stacks = [padded(one, *wide, one is drawn.down) for one in (drawn.gate_up, drawn.down)]
    stacks[0] = interleaved(stacks[0])
    weights = [_repacked(codes_of(one)) for one in stacks]
    scales = [torch.stack([mx_scales(s) for s in one.scale]) for one in stacks]  # type: ignore[union-attr]
    biases = [None if one.bias is None else turned_bias(one.bias) for one in stacks]
    return Arranged(
        (weights[0], weights[1]),
        (scales[0], scales[1]),
        (biases[0], biases[1]),
        rooms=(_locks(weights[0]),),
    )


def _locks(like: Tensor) -> Tensor:
    count = torch.cuda.get_device_properties(like.device).multi_processor_count
    return torch.zeros(4 * count, dtype=torch.int32, device=like.device)


def codes_of(stack: Stack) -> Tensor:
    """uint8 [E, N, K], a code each."""
    assert stack.scale is not None
    if stack.scale.dtype != torch.uint8:
        return stack.codes
    return torch.stack([stack.codes & 15, stack.codes >> 4], -1).flatten(2)


def _repacked(codes: Tensor) -> Tensor:
    order = torch.empty(0, dtype=torch.int32, device=codes.device)
    repack, (_, outs, columns) = vllm_ops().gptq_marlin_repack, codes.shape
    return torch.stack([repack(gptq_words(one), order, columns, outs, 4, False) for one in codes])


def padded(stack: Stack, hidden: int, inner: int, is_down: bool) -> Stack:
    """With so many more hidden and inner features, whose weights are 0."""
    assert stack.scale is not None
    more, columns = (hidden, inner) if is_down else (inner, hidden)
    parts = 1 if is_down else 2  # gate and up are padded each

    def grown(tensor: Tensor, width: int, fill: int) -> Tensor:
        count, rows = tensor.shape[:2]
        split = tensor.reshape(count, parts, rows // parts, -1)
        made = F.pad(split, (0, width, 0, more), value=fill)
        return made.reshape(count, parts * made.shape[2], *([-1] if tensor.dim() == 3 else []))

    bias = None if stack.bias is None else grown(stack.bias, 0, 0)
    return Stack(grown(stack.codes, columns // 2, 0), grown(stack.scale, columns // MX, 127), bias)


def interleaved(stack: Stack) -> Stack:
    """Rows of gate and up take turns."""

    def turns(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        halves = tensor.view(len(tensor), 2, -1, *tensor.shape[2:])
        return halves.transpose(1, 2).flatten(1, 2).contiguous()

    return Stack(turns(stack.codes), turns(stack.scale), turns(stack.bias))  # type: ignore[arg-type]


def mx_scales(scale: Tensor) -> Tensor:
    """uint8 [N, K / 32] -> e8m0 [K / 32, N]: marlin_scales, of four neighbours the middle two in
    each other's place."""
    turned = marlin_scales(scale)
    fours = turned.view(-1, 4)[:, [0, 2, 1, 3]]
    return fours.reshape(turned.shape).contiguous().view(torch.float8_e8m0fnu)


def turned_bias(bias: Tensor) -> Tensor:
    """[E, N], each 32 outputs as Marlin's threads have them."""
    order = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    return bias.reshape(-1, 32)[:, order].reshape(bias.shape).contiguous()


def marlin(x: Tensor, chosen: Chosen, given: Arranged) -> Tensor:
    return _marlin(x, chosen, given, UINT4_BIAS_8, vllm_ops().silu_and_mul)


def marlin_mxfp4(x: Tensor, chosen: Chosen, given: Arranged) -> Tensor:
    hidden, wide = x.shape[1], given.scales[1].shape[2]
    x = F.pad(x, (0, wide - hidden))
    out = _marlin(x, chosen, given, FP4_E2M1, vllm_ops().swigluoai_and_mul)
    return out[:, :hidden]


def _marlin(
    x: Tensor, chosen: Chosen, given: Arranged, kind: int, activate: Callable[..., None]
) -> Tensor:
    """As fused_marlin_moe of vLLM. kind: its number of the codes' type."""
    ops, (rows, hidden), count = vllm_moe_ops(), x.shape, chosen.ids_TK.shape[1]
    num_experts, inner = len(given.weights[0]), given.weights[1].shape[1] * 16
    mean = rows * count / num_experts
    tile = next((size for size in (8, 16, 32, 48, 64) if mean / size < 0.9), 64)
    align = vllm_fused_moe().moe_align_block_size
    order = align(chosen.ids_TK, tile, num_experts, None, ignore_invalid_experts=True)

    def multiply(x: Tensor, place: int, outs: int, count: int) -> Tensor:
        out = x.new_empty(rows * chosen.ids_TK.shape[1], outs)
        made: Tensor = ops.moe_wna16_marlin_gemm(
            *(x, out, given.weights[place], given.biases[place], given.scales[place]),
            *(None, None, None, None, None, given.rooms[0], *order, chosen.weights_TK),
            *(tile, count, place == 1, kind, len(x), outs, x.shape[1]),
            *(True, False, True, False, -1, -1, -1),
        )
        return made

    sums = multiply(x, 0, 2 * inner, count)
    activated = x.new_empty(rows * count, inner)
    activate(activated, sums)
    parts = multiply(activated, 1, hidden, 1)
    out = torch.empty_like(x)
    ops.moe_sum(parts.view(rows, count, hidden), out)
    return out


# triton_kernels in vLLM.


def for_triton_kernels(drawn: Drawn) -> Arranged:
    """As vLLM arranges GPT-OSS on Hopper."""
    kernels = vllm_triton_kernels()
    layout, tensor, ogs = kernels.layout, kernels.tensor, kernels.matmul_ogs
    value, value_options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    scales, scale_options = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=8)
    weights, precisions, biases = list[Any](), list[Any](), list[Any]()
    for stack in (interleaved(drawn.gate_up), drawn.down):
        assert stack.scale is not None
        codes, scale = (one.transpose(-2, -1) for one in (stack.codes, stack.scale))
        wrapped = tensor.wrap_torch_tensor(codes, dtype=tensor.FP4)
        weights.append(tensor.convert_layout(wrapped, value, **value_options))
        scale = tensor.convert_layout(tensor.wrap_torch_tensor(scale), scales, **scale_options)
        flex = ogs.FlexCtx(rhs_data=kernels.numerics.InFlexData())
        precisions.append(ogs.PrecisionConfig(weight_scale=scale, flex_ctx=flex))
        biases.append(None if stack.bias is None else stack.bias.float())
    both = (weights[0], weights[1]), (precisions[0], precisions[1]), (biases[0], biases[1])
    how = drawn.shape.activation
    return Arranged(*both, rooms=(how.alpha, how.limit))


@dataclass(frozen=True)
class BitChosen:
    """Which experts a row chooses as triton_kernels' routing gives them. bits: uint32 [T, E / 32],
    rows of a column side by side."""

    ids_TK: Tensor  # int16
    weights_TK: Tensor  # bfloat16
    bits: Tensor
    num_experts: int


def as_bits(chosen: Chosen, num_experts: int) -> BitChosen:
    rows, words = len(chosen.ids_TK), -(-num_experts // 32)
    hits = torch.zeros(rows, words * 32, dtype=torch.int64, device=chosen.ids_TK.device)
    hits.scatter_(1, chosen.ids_TK.long(), 1)
    values = (hits.view(rows, words, 32) << torch.arange(32, device=hits.device)).sum(2)
    values = torch.where(values >= 1 << 31, values - (1 << 32), values)
    room = values.new_zeros(words, -(-rows // 32) * 32, dtype=torch.int32)
    room[:, :rows] = values.T.int()
    bits = room.view(torch.uint32).T[:rows]
    return BitChosen(chosen.ids_TK.short(), chosen.weights_TK.bfloat16(), bits, num_experts)


def triton_kernels(x: Tensor, chosen: BitChosen, given: Arranged) -> Tensor:
    """Sorting takes a kernel that sets sums to 0, which vLLM's routing does beside its own."""
    kernels, (rows, hidden) = vllm_triton_kernels(), x.shape
    ogs, count = kernels.matmul_ogs, chosen.ids_TK.shape[1]
    words = chosen.bits.shape[1]
    bits = kernels.tensor.Bitmatrix(
        chosen.bits, shape=[rows, words * 32], shape_max=[rows, None], scratchpad=None
    )
    routing, gather, scatter = kernels.routing.routing_from_bitmatrix(
        bits, chosen.weights_TK, chosen.ids_TK, chosen.num_experts, count
    )
    spec = ogs.FnSpecs("swiglu", kernels.swiglu.swiglu_fn, ("alpha", "limit"))
    activated = x.new_empty(1, rows * count, given.weights[0].shape[-1] // 2)
    ogs.matmul_ogs(
        *(x, given.weights[0], given.biases[0], routing),
        gather_indx=gather,
        precision_config=given.scales[0],
        fused_activation=ogs.FusedActivation(spec, given.rooms, 2),
        y=activated,
    )
    out = x.new_empty(1, rows, hidden)
    ogs.matmul_ogs(
        *(activated[0], given.weights[1], given.biases[1], routing),
        scatter_indx=scatter,
        precision_config=given.scales[1],
        gammas=routing.gate_scal,
        y=out,
    )
    return out[0]


# FlashInfer.


def for_flashinfer(drawn: Drawn) -> Arranged:
    """Rows of up stand before those of gate."""
    gate_up = drawn.gate_up

    def swapped(tensor: Tensor) -> Tensor:
        return torch.cat(tensor.chunk(2, 1)[::-1], 1)

    scales = None if gate_up.scale is None else swapped(gate_up.scale)
    return Arranged((swapped(gate_up.codes), drawn.down.codes), (scales, drawn.down.scale))


def flashinfer(x: Tensor, chosen: Chosen, given: Arranged) -> Tensor:
    multiply = import_module("flashinfer.fused_moe").cutlass_fused_moe
    tuning = import_module("flashinfer.autotuner").autotune
    has_scales, out = given.scales[0] is not None, torch.empty_like(x)
    with tuning(not torch.cuda.is_current_stream_capturing()):
        multiply(
            *(x, chosen.ids_TK, chosen.weights_TK, *given.weights, x.dtype),
            [*given.scales] if has_scales else [],
            output=out,
            use_deepseek_fp8_block_scale=has_scales,
        )
    return out


# PyTorch.


def grouped(x: Tensor, chosen: Chosen, given: Arranged) -> Tensor:
    """Rows are sorted and moved by PyTorch's own kernels."""
    first, second = given.weights
    ids, order = chosen.ids_TK.flatten().sort(stable=True)
    numbers = torch.arange(len(first), dtype=ids.dtype, device=ids.device)
    stops = torch.searchsorted(ids, numbers, right=True, out_int32=True)
    rows = order // chosen.ids_TK.shape[1]
    gate, up = F.grouped_mm(x[rows], first.transpose(1, 2), offs=stops).chunk(2, 1)
    sums = F.grouped_mm(F.silu(gate) * up, second.transpose(1, 2), offs=stops)
    weighed = sums.float() * chosen.weights_TK.flatten()[order, None]
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    return out.index_add_(0, rows, weighed).to(x.dtype)


US = Form(for_us, experts, is_triton=True)
_VLLM = Form(as_drawn, vllm_triton, is_triton=True)
_SGLANG = Form(as_drawn, sglang_triton, is_triton=True)
_FLASHINFER = Form(for_flashinfer, flashinfer)
# By format and name. The last ones are those that may leave the card unusable for others.
FORMS: dict[str, dict[str, Form]] = {
    "bf16": {
        OURS: US,
        "vllm triton": _VLLM,
        "sglang triton": _SGLANG,
        "grouped_mm": Form(as_drawn, grouped),
        "flashinfer": _FLASHINFER,
    },
    "fp8": {
        OURS: US,
        "vllm triton": _VLLM,
        "sglang triton": _SGLANG,
        "sglang cutlass": Form(for_cutlass, sglang_cutlass),
        "sglang by expert": Form(for_cutlass, sglang_by_expert),
        "flashinfer": _FLASHINFER,
    },
    "int4": {OURS: US, "marlin": Form(for_marlin, marlin)},
    "mxfp4": {
        OURS: US,
        "triton_kernels": Form(for_triton_kernels, triton_kernels, as_bits, is_triton=True),
        "marlin": Form(for_marlin_mxfp4, marlin_mxfp4),
    },
}
