"""A decoder layer as torch.compile gets it is the layer."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from specengine.core.batch import ForwardBatch
from specengine.kernels.attention.head_norms import norm_heads
from specengine.kernels.attention.types import HeadNorms
from specengine.layers import compiled, decoder
from specengine.layers.attention import Attention
from specengine.layers.decoder import DecoderLayer
from specengine.layers.layer_spec import LayerSpec
from specengine.layers.rotary import RotaryEmbedding


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="aot_eager")


def without_others(
    self: Attention,
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: object,
    norms: HeadNorms | None,
) -> Tensor:
    if norms is not None:
        heads = (one.view(len(one), -1, self.head_dim) for one in (q, k))
        q, k = (one.flatten(1) for one in norm_heads(*heads, norms))
    return q + k.repeat(1, 2) * v.repeat(1, 2)


BIASES = {"qkv_bias": True, "o_bias": True, "qk_norm": True}
GEMMA = {"norm_places": "around", "norm_offset": 1.0, "activation": "gelu_tanh"}
STARCODER = {"norm": "layer_bias", "gated_mlp": False, "activation": "gelu", "mlp_bias": True}


@pytest.fixture
def layer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> DecoderLayer:
    """Attention of which only the projections and the norms of heads are left."""
    is_traced, features = request.param
    monkeypatch.setattr(decoder, "compiled", traced if is_traced else lambda function: function)
    spec = LayerSpec(*(32, 48, 4, 2, 8, 1e-5), **features)
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
    [
        ((True, {}), torch.float32),
        ((True, GEMMA), torch.float32),
        ((True, STARCODER), torch.float32),
        ((True, {"norm_places": "after", "residual_multiplier": 0.5}), torch.float32),
        ((False, BIASES), torch.float32),
        ((False, BIASES), torch.bfloat16),
        ((False, GEMMA), torch.bfloat16),
        ((False, STARCODER), torch.bfloat16),
    ],
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


def test_layers_alike_share_one_graph() -> None:
    """Weights are arguments: another layer of the same description is not compiled anew."""
    torch._dynamo.reset()  # type: ignore[no-untyped-call]  # other tests leave graphs of it
    graphs: list[object] = []

    def counts(graph: Any, inputs: object) -> Any:
        graphs.append(graph)
        return graph.forward

    function = torch.compile(compiled.after_attention, backend=counts, fullgraph=True)
    rotary = RotaryEmbedding(8, 64, {"rope_type": "default", "rope_theta": 1e4})
    spec = LayerSpec(*(32, 48, 4, 2, 8, 1e-5), **GEMMA)
    heads, stream = torch.randn(3, 32), torch.randn(3, 32)
    for layer_id in range(3):
        layer = DecoderLayer(spec, layer_id, rotary)
        with torch.inference_mode():
            function(heads, stream, layer._tensors())
    assert len(graphs) == 1
