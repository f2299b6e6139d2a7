"""A decoder layer as torch.compile gets it is the layer."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from specengine.core.batch import ForwardBatch
from specengine.layers import compiled, decoder
from specengine.layers.attention import Attention
from specengine.layers.decoder import DecoderLayer
from specengine.layers.layer_spec import LayerSpec
from specengine.layers.rotary import RotaryEmbedding


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="aot_eager")


def without_others(
    self: Attention, positions: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: object
) -> Tensor:
    return q + k.repeat(1, 2) * v.repeat(1, 2)


@pytest.fixture
def layer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> DecoderLayer:
    """Attention of which only the projections and the norms of heads are left."""
    wanted = traced if request.param == "traced" else lambda function: function
    monkeypatch.setattr(decoder, "compiled", wanted)
    has_biases = request.param == "plain"
    spec = LayerSpec(
        *(32, 48, 4, 2, 8, 1e-5), qkv_bias=has_biases, o_bias=has_biases, qk_norm=has_biases
    )
    torch.manual_seed(0)
    made = DecoderLayer(
        spec, 0, RotaryEmbedding(8, 64, {"rope_type": "default", "rope_theta": 1e4})
    )
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)

    monkeypatch.setattr(Attention, "forward", without_others)
    return made


@pytest.mark.parametrize(
    ("layer", "dtype"),
    [("traced", torch.float32), ("plain", torch.float32), ("plain", torch.bfloat16)],
    indirect=["layer"],
)
def test_the_layer(layer: DecoderLayer, dtype: torch.dtype) -> None:
    layer = layer.to(dtype)
    for rows in (1, 3, 5):
        for residual in (None, torch.randn(rows, 32, dtype=dtype)):
            hidden = torch.randn(rows, 32, dtype=dtype)
            sums = []
            for compiles in (False, True):
                batch = cast(ForwardBatch, SimpleNamespace(compiles=compiles))
                with torch.inference_mode():
                    out, stream = layer(torch.arange(rows), hidden, residual, batch)
                assert stream is not None
                sums.append((out + stream).float())
            tolerance = 1e-5 if dtype == torch.float32 else 0.06
            torch.testing.assert_close(sums[1], sums[0], rtol=tolerance, atol=tolerance)


def test_one_compiled_function_serves_all_layers() -> None:
    assert compiled.compiled(traced) is compiled.compiled(traced)
