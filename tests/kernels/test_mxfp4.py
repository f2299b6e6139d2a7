"""MXFP4 against its definition, and against transformers."""

from __future__ import annotations

import pytest
import torch

from specengine.core.errors import ModelLoadError
from specengine.kernels.linear.mxfp4 import dequantise, quantise
from specengine.layers.quantization.linears import make_quantization
from tests.layers.test_quantization import layer_of

# e2m1: sign, two bits of exponent of bias 1, one of mantissa.
VALUES = [
    (-1) ** (code >> 3)
    * ((code & 1) / 2 if code & 6 == 0 else (1 + (code & 1) / 2) * 2 ** ((code >> 1 & 3) - 1))
    for code in range(16)
]


def test_each_code_and_scale_is_what_the_specification_says() -> None:
    codes = torch.arange(32) % 16
    blocks = (codes[0::2] | codes[1::2] << 4).to(torch.uint8).expand(3, 1, 16)
    scales = torch.tensor([[127], [120], [130]], dtype=torch.uint8)
    made = dequantise(blocks, scales)
    expected = torch.tensor([[v * 2.0**e for v in VALUES + VALUES] for e in (0, -7, 3)])
    assert torch.equal(made, expected)


def test_what_was_quantised_comes_back() -> None:
    torch.manual_seed(0)
    scales = torch.randint(100, 140, (5, 4), dtype=torch.uint8)
    blocks = torch.randint(0, 256, (5, 4, 16), dtype=torch.uint8)
    blocks[:, :, 0] = 0x70 | (blocks[:, :, 0] & 15)  # a 6 in each block settles its scale
    weight = dequantise(blocks, scales)
    found, found_scales = quantise(weight)
    assert torch.equal(found_scales, scales)
    assert torch.equal(dequantise(found, found_scales), weight)


def test_the_nearest_value_is_taken_and_ties_go_to_even() -> None:
    given = [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.3, -2.6, 0.74, 7.9]
    expected = [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -0.5, -3.0, 0.5, 6.0]
    made = dequantise(*quantise(torch.tensor(given + [0.0] * 20)))
    assert made.tolist() == expected + [0.0] * 20
    assert not dequantise(*quantise(torch.zeros(2, 32))).any()


def test_transformers_reads_the_same() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(1)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8)
    scales = torch.randint(118, 130, (2, 6, 3), dtype=torch.uint8)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(dequantise(blocks, scales), theirs.transpose(1, 2))


def test_a_quantised_linear_layer_is_refused() -> None:
    layer = layer_of({"weight_blocks": torch.zeros(4, 1, 16)}, 4, 32)
    with pytest.raises(ModelLoadError, match=r"weight_blocks.; of MXFP4 experts alone are read"):
        make_quantization({"quant_method": "mxfp4"}).read(layer)
