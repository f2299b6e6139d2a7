"""Each family quantised while it is loaded says what its rounded weights say."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specengine.core.batch import ForwardMode
from specengine.layers.experts import Experts
from specengine.layers.linear import Linear, LMHead
from tests.halves import slow_but
from tests.support.families import FAMILIES, save_small_model
from tests.support.quantised import fp8
from tests.support.quantised_models import PROMPT, load
from tests.target.test_quantised_families import sizes_of_four_bits


def eight_bits(weight: Tensor) -> Tensor:
    """A scale a row."""
    scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16().float().clamp_min(1e-12)
    return (weight / scale).round().clamp(-127, 127) * scale


def four_bits(weight: Tensor) -> Tensor:
    """A scale and a middle for 32 of a row; rows that do not fit have 8 bits."""
    if len(weight) % 16 or weight.shape[1] % 32:
        return eight_bits(weight)
    groups = weight.view(len(weight), -1, 32)
    low, high = groups.aminmax(dim=-1, keepdim=True)
    scale = ((high - low) / 15).bfloat16().float()
    middle = (low + 8 * scale).bfloat16().float()
    return (((groups - middle) / scale).round().clamp(-8, 7) * scale + middle).view(weight.shape)


# --quantization -> what becomes of a product of a layer, and of the head.
Rounding = Callable[[Tensor], Tensor]
ROUNDED: dict[str, tuple[Rounding, Rounding | None]] = {
    "fp8": (lambda weight: fp8(weight, (1, 0), "weight_scale", None).dense, None),
    "int8": (eight_bits, eight_bits),
    "int4": (four_bits, eight_bits),
}
# What is left of the error of rounding: bfloat16's.
OF_ROUNDING = {"fp8": 1e-4, "int8": 0.8, "int4": 0.25}


def rounded(model: Any, quantization: str) -> Any:
    """Products of layers and experts, but for routers and what is kept whole."""
    of_layers, of_head = ROUNDED[quantization]
    for module in model.modules():
        if isinstance(module, Experts):
            for weight in (module.gate_up, module.down):
                assert weight is not None
                weight.data = torch.stack([of_layers(one) for one in weight])
        elif isinstance(module, Linear) and not (module.keeps_precision or module.keeps_plain):
            rounding = of_head if isinstance(module, LMHead) else of_layers
            if rounding is not None:  # an embedding of the same weights stays whole
                module.weight = torch.nn.Parameter(rounding(module.weight), requires_grad=False)
    return model


@pytest.mark.parametrize(
    ("family", "quantization"),
    slow_but([("deepseekv3", "fp8"), ("gptoss", "int4")], product(FAMILIES, ROUNDED)),
)
def test_family_says_what_its_rounded_weights_say(
    family: str, quantization: str, tmp_path: Path, mini_runner: Any
) -> None:
    folder = save_small_model(family, tmp_path / "small", 5, **sizes_of_four_bits(family))
    in_float = quantization == "fp8"  # dense on a CPU; int8 and int4 multiply in bfloat16
    dtype = torch.float32 if in_float else torch.bfloat16

    def logits(model: Any) -> Tensor:
        return mini_runner(model).logits(ForwardMode.EXTEND, [PROMPT]).float()

    def dense() -> Any:
        """In float32, of weights in dtype."""
        return load(folder, packs=False).to(dtype).float()

    with torch.no_grad():
        found = logits(load(folder, quantization, dtype, packs=not in_float))
        plain, expected = logits(dense()), logits(rounded(dense(), quantization))
    near, far = median_error(found, expected), median_error(found, plain)
    assert near < OF_ROUNDING[quantization] * far


def median_error(found: Tensor, expected: Tensor) -> float:
    """Of rows, which other experts than expected make some of; padding has no logits."""
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).nanmedian())
