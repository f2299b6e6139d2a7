"""From the tensors of a checkpoint to linear layers that multiply with them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specengine.core.errors import ModelLoadError
from specengine.core.parallel import Cut, communicator
from specengine.core.registry import QUANTIZATIONS, load_place
from specengine.kernels.linear.linear_format import LinearFormat
from specengine.kernels.linear.quantised import Fp8Input
from specengine.layers.experts import Experts
from specengine.layers.linear import GatedKernel, IncomingWeight, Linear, LMHead
from specengine.layers.quantization.experts import close_experts, fill_experts
from specengine.layers.quantization.method import LayerTensors, Quantization
from specengine.layers.quantization.parts import (
    Part,
    dense,
    format_of,
    join_parts,
    own_part,
    read_part,
)

logger = logging.getLogger(__name__)


def make_quantization(fields: dict[str, Any]) -> Quantization:
    """The method that `quantization_config` names. Raises ModelLoadError."""
    name = fields.get("quant_method")
    if name not in QUANTIZATIONS:
        raise ModelLoadError(
            f"weights quantised by {name or 'a method unnamed'} are not supported; known: "
            f"{', '.join(QUANTIZATIONS)}. Take one of those, or the unquantised model"
        )
    made: Quantization = load_place(QUANTIZATIONS[name]).from_fields(fields)
    return made


class QuantisedLinear:
    """A linear layer's kernel: one product, or several of one input whose outputs lie side by
    side, where their weights could not be joined."""

    def __init__(self, parts: Sequence[Part], bias: Tensor | None) -> None:
        self.parts = list(parts)
        # Found here and not in a forward: Dynamo warns of the cached look-up, where it traces one.
        self.formats = [format_of(part) for part in self.parts]
        sizes = [part.shape[0] for part in self.parts]
        self.biases = [None] * len(sizes) if bias is None else list(torch.split(bias, sizes))

    def __call__(self, x: Tensor) -> Tensor:
        each = zip(self.formats, self.parts, self.biases, strict=True)
        outputs = [_multiply(x, form, part, bias) for form, part, bias in each]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def parts_of(self, x: Tensor) -> Tensor | None:
        """[T, in] -> float32 [P, T, out], whose sum is the product; None: there are no parts."""
        if self._single is None or self.biases[0] is not None:
            return None
        return self._single.parts(x, self.parts[0])

    @property
    def gated(self) -> GatedKernel | None:
        """The same with the gated activation behind it, of a single product whose format has such
        a kernel."""
        run = None if self._single is None else self._single.gated
        if run is None:
            return None
        first = self.parts[0]
        return lambda x, activation: run(x, first, activation, self.biases[0])

    @property
    def takes(self) -> Fp8Input | None:
        """The form that a single product rounds its rows to."""
        return None if self._single is None else self._single.input(self.parts[0])

    @property
    def waits(self) -> bool:
        """As layers.linear.Linear has it: of a single product."""
        return self._single is not None and self._single.waits(self.parts[0])

    @property
    def completes_input(self) -> bool:
        """As layers.linear.Linear has it: of a single product."""
        return self._single is not None and self._single.completes_input

    @property
    def _single(self) -> LinearFormat | None:
        """The format of a single product; None where there are several."""
        return self.formats[0] if len(self.formats) == 1 else None

    @property
    def num_bytes(self) -> int:
        """Bytes that a product reads."""
        return sum(_bytes(part) for part in self.parts)

    @property
    def num_elements(self) -> int:
        return sum(part.shape[0] * part.shape[1] for part in self.parts)


def open_linears(model: nn.Module) -> None:
    """Let each linear layer whose weight was deferred collect what the checkpoint has for it."""
    for module in model.modules():
        if isinstance(module, Linear) and module.weight is not None and module.weight.is_meta:
            # Ranks keep files mapped until a layer is cut: a card need not hold the whole model.
            place = module.device if communicator().size == 1 else torch.device("cpu")
            module.incoming = [IncomingWeight(place) for _ in module.part_sizes]
        elif isinstance(module, Experts):
            module.open()


def close_linears(model: nn.Module, method: Quantization, dtype: torch.dtype) -> None:
    """Make of what was collected the weights: dequantised ones of `dtype` where `wants_dense`, else
    what the products of kernels/linear and kernels/experts read. Raises ModelLoadError, naming a
    tensor that is missing, unexpected or of the wrong type or shape."""
    packed: list[bool] = []
    for module in model.modules():
        if isinstance(module, Linear) and module.incoming is not None:
            parts = _read_parts(module, method, dtype)
            module.incoming = None
            is_dense = module.keeps_plain or wants_dense(module.device)
            if is_dense or all(isinstance(one, Tensor) for one in parts):
                plain = torch.cat([dense(one).to(dtype) for one in parts])
                module.weight = nn.Parameter(plain, requires_grad=False)
            else:
                kernel = QuantisedLinear(parts, module.bias)
                module.use_kernel(kernel, kernel.takes)
        elif isinstance(module, Experts) and module.incoming is not None:
            is_dense = wants_dense(module.device)
            packed.append(close_experts(module, method, dtype, is_dense) or is_dense)
    if not all(packed):
        logger.warning(
            "experts of %d of %d layers become dense: some are in floating point, or the blocks of "
            "one product differ, which no product of all experts multiplies",
            packed.count(False),
            len(packed),
        )


def wants_dense(device: torch.device) -> bool:
    """A CPU has no kernels that multiply with what checkpoints hold: dense weights are faster."""
    return device.type == "cpu"


def fill_linears(
    model: nn.Module, method: Quantization, seed: int, left_out: Collection[str] = ()
) -> None:
    """Random tensors of the method in place of a checkpoint's; heads stay in floating point, and so
    do layers whose paths are in left_out."""
    for path, module in model.named_modules():
        if isinstance(module, Experts) and module.incoming is not None:
            fill_experts(path, module, method, seed)
        if isinstance(module, Linear) and module.incoming is not None:
            generator = torch.Generator(module.device).manual_seed(seed)
            seed += 1
            for part, rows in zip(module.incoming, module.whole_sizes, strict=True):
                part.name = type(module).__name__
                shape = rows, module.whole_inputs
                if _keeps_precision(module) or path in left_out:
                    part.tensors = {"weight": _normal(*shape, generator)}
                else:
                    part.tensors = method.random(*shape, generator)


def _normal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    made = torch.empty(rows, columns, device=generator.device)
    return made.normal_(0.0, 0.02, generator=generator)


def _read_parts(module: Linear, method: Quantization, dtype: torch.dtype) -> list[Part]:
    """One a part, or one of all, where they can be joined."""
    assert module.incoming is not None
    keeps = _keeps_precision(module)
    parts: list[Part] = []
    incoming, sizes = module.incoming, module.whole_sizes
    cuts: list[list[Cut | None]] = [
        [None] if cut is None else [*cut.ranges] for cut in module.cuts("weight")
    ]
    if module.merged is not None:
        cuts = [_behind_each_other(cuts, sizes)]
        incoming, sizes, module.merged = [module.merged], [sum(sizes)], None
    for part, rows, own in zip(incoming, sizes, cuts, strict=True):
        layer = LayerTensors.of(part, rows, module.whole_inputs, module.device)
        part.tensors.clear()  # what is read is not kept twice
        whole = read_part(layer, method, dtype, keeps)
        found = format_of(whole)
        if found.multiply is None:
            raise layer.refused(
                f"is quantised in {found.title}, of which experts alone are multiplied"
            )
        parts += [own_part(whole, cut, layer.name) for cut in own]
    joined = join_parts(parts)
    return parts if joined is None else [joined]


def _behind_each_other(
    cuts: Sequence[Sequence[Cut | None]], sizes: Sequence[int]
) -> list[Cut | None]:
    """Cuts of a tensor in which those of the sizes lie one below the other; [None] is all of
    it."""
    if all(cut is None for each in cuts for cut in each):
        return [None]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [
        Cut(0, start + cut.start, start + cut.stop, sum(sizes))
        for start, each in zip(starts, cuts, strict=True)
        for cut in each
        if cut is not None
    ]


def _keeps_precision(module: Linear) -> bool:
    """Whether a layer in floating point stays so, whatever quantises the others: heads, routers."""
    return isinstance(module, LMHead) or module.keeps_precision or module.keeps_plain


def _multiply(x: Tensor, form: LinearFormat, part: Part, bias: Tensor | None) -> Tensor:
    assert form.multiply is not None  # _read_parts refuses such a weight
    return form.multiply(x, part, bias)


def _bytes(part: Part) -> int:
    return part.numel() * part.element_size() if isinstance(part, Tensor) else part.num_bytes
