"""What libraries write, and what they make of what this suite's packers write."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.layers.test_quantization import read, weight_of
from tests.support.quantised import FORMATS

if find_spec("compressed_tensors") is None:  # to import it takes each process of a run a second
    pytest.skip("needs compressed-tensors", allow_module_level=True)

LAYER = "model.layers.0.self_attn.q_proj"
PACKED = [name for name in FORMATS if name.startswith("compressed w") and "act" not in name]
FLOATS = [name for name in FORMATS if name.startswith("compressed fp8")]


def _scheme(name: str) -> Any:
    from compressed_tensors.quantization import QuantizationScheme

    return QuantizationScheme(**FORMATS[name].config["config_groups"]["group_0"])


def _compressor(name: str) -> Any:
    from compressed_tensors.compressors import BaseCompressor

    return BaseCompressor.get_value_from_registry(FORMATS[name].config["format"])


@pytest.mark.parametrize("name", PACKED + FLOATS)
def test_compressed_tensors_reads_our_packers_alike(name: str) -> None:
    packed = FORMATS[name].pack(weight_of(64, 64))
    given = {leaf: tensor.clone() for leaf, tensor in packed.tensors.items()}
    made = _compressor(name).decompress(given, _scheme(name))["weight"]
    # Theirs is in the scale's type.
    torch.testing.assert_close(made.float(), packed.dense, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", PACKED)
def test_what_compressed_tensors_writes_is_read_as_it_reads_it(name: str) -> None:
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme, weight = _scheme(name), weight_of(64, 64, 3)
    groups = weight.view(64, -1, scheme.weights.group_size or 64)
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
    state: dict[str, Tensor] = {"weight": weight, "weight_scale": scale}
    if not scheme.weights.symmetric:
        state["weight_zero_point"] = zero
    written = _compressor(name).compress(state, scheme)
    expected = _compressor(name).decompress(dict(written), scheme)["weight"]
    found = read(FORMATS[name], written, 64, 64).dequantised()
    torch.testing.assert_close(found, expected.float())
    assert float((found - weight).abs().max()) < 0.6  # half a step of some 16


def test_transformers_dequantises_blocks_alike() -> None:
    finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
    if not hasattr(finegrained, "_dequantize_fp8_weight"):
        pytest.skip("this version of transformers has no such function")
    packed = FORMATS["fp8 blocks"].pack(weight_of(64, 96))
    weight, scale = packed.tensors["weight"], packed.tensors["weight_scale_inv"]
    made = finegrained._dequantize_fp8_weight(weight, scale, (32, 32), torch.float32)
    torch.testing.assert_close(made, packed.dense)
