"""The two forms of latent attention give the same, and which one a forward takes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specengine.core.batch import ForwardBatch, ForwardMode
from specengine.core.config import ModelConfig
from specengine.core.errors import ConfigError, ModelLoadError
from specengine.core.parallel import split_over
from specengine.kernels.attention.types import ExpandedHeads, KeySpan
from specengine.layers.attention import Attention, attention_layers
from specengine.layers.latent_attention import LatentAttention
from specengine.layers.layer_spec import LatentSpec, LayerSpec
from specengine.layers.rotary import RotaryEmbedding
from specengine.runner.attention import expansion
from specengine.runner.attention.expansion import plan_expansion
from specengine.runner.attention.limits import check_layers
from specengine.runner.attention.torch_backend import TorchAttentionBackend
from specengine.runner.attention.triton_backend import TritonAttentionBackend
from specengine.runner.loader.load import load_model
from specengine.runner.loader.source import resolve_model
from specengine.runner.memory.kv_shape import kv_shape_of
from specengine.target.registry import find_model_class
from tests.runner.attention_cases import Case, Layer
from tests.support.families import save_small_model
from tests.support.pretended_ranks import PretendedRanks
from tests.target.conftest import MiniRunner

FIRST, SECOND = [(7 * i * i) % 300 for i in range(30)], [(5 * i + 11) % 300 for i in range(9)]
FAMILIES = ("deepseekv2", "deepseekv3")
LATENT = LatentSpec(kv_rank=24, nope_dim=8, rope_dim=8, value_dim=12)
SPEC = LayerSpec(64, 96, 4, 4, 16, 1e-6, latent=LATENT)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    source = resolve_model(ModelConfig(model=str(folder)))
    return load_model(source, find_model_class, dtype, torch.device("cpu"))


def logits(model: Any, expands: bool, monkeypatch: pytest.MonkeyPatch, backend: Any) -> Tensor:
    """Logits of prompts whose first part was there before."""
    monkeypatch.setattr(expansion, "_pays", lambda *_: expands)
    runner = MiniRunner(model)
    runner.backend = backend
    runner.logits(ForwardMode.EXTEND, [FIRST[:12], []])
    batch = runner.batch(ForwardMode.EXTEND, [FIRST[12:], SECOND])
    assert (batch.attn_plan.expansion is not None) == expands
    with torch.no_grad():
        found: Tensor = model.head.logits(model(batch.input_ids, batch.positions, batch))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_expanded_form_equals_the_absorbed_one(
    family: str, small_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(small_models[family])
    backend = TorchAttentionBackend()
    expanded = logits(model, True, monkeypatch, backend)
    absorbed = logits(model, False, monkeypatch, backend)
    torch.testing.assert_close(expanded, absorbed, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")
def test_triton_backend_equals_pytorch(
    small_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(small_models["deepseekv3"])
    expected = logits(model, False, monkeypatch, TorchAttentionBackend())
    backend = TritonAttentionBackend(torch.device("cpu"))
    for expands in (True, False):
        found = logits(model, expands, monkeypatch, backend)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_bfloat16_is_near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without experts, of which rounded rows choose others."""
    folder = save_small_model("deepseekv3", tmp_path, 5, first_k_dense_replace=3)
    backend = TorchAttentionBackend()
    expected = logits(load(folder), False, monkeypatch, backend)
    for expands in (True, False):
        model = load(folder, torch.bfloat16)
        found = logits(model, expands, monkeypatch, backend)
        assert 0 < float((found - expected).norm() / expected.norm()) < 0.04


def test_a_token_leaves_one_latent(small_models: dict[str, Path]) -> None:
    """In each of 3 layers: 32 numbers for all heads together, and 8 that are rotated."""
    shape = kv_shape_of([load(small_models["deepseekv3"])], torch.bfloat16)
    assert (shape.num_kv_heads, shape.head_dim, shape.value_dim) == (1, 40, 32)
    assert shape.bytes_per_token == 3 * 40 * 2


# Sizes of DeepSeek-V3.
V3 = Layer(128, 1, 576, value_dim=512, expanded=ExpandedHeads(192, 128))


def batch_of(lens: list[tuple[int, int]], mode: ForwardMode = ForwardMode.EXTEND) -> ForwardBatch:
    """Its layer's latents are never read."""
    case = Case([(0, 1)] * len(lens), mode, layer=Layer(1, 1, 8))
    batch = case.batch(TorchAttentionBackend())
    batch.attn_layers = (V3,)
    batch.prefix_lens_cpu, batch.extend_lens_cpu = map(list, zip(*lens, strict=True))
    batch.seq_lens = torch.tensor([p + e for p, e in lens])
    batch.req_to_token_pool.req_to_token = torch.arange(3 * 4096).view(3, 4096).int()
    return batch


@pytest.mark.parametrize(
    ("lens", "expands"),
    [
        ([(0, 1000)], True),
        ([(0, 300)], False),  # each key is read by 150 queries, on the average
        ([(1000, 600)], True),
        ([(3000, 100)], False),
        ([(0, 1000), (4000, 1)], False),  # a request that decodes beside
        ([(2000, 1000)], True),
        ([(4000, 4000)], False),  # too much memory
    ],
)
def test_long_prompts_are_expanded(lens: list[tuple[int, int]], expands: bool) -> None:
    assert (plan_expansion(batch_of(lens)) is not None) == expands


def test_rounds_are_never_expanded() -> None:
    for mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND):
        assert plan_expansion(batch_of([(0, 1000)], mode)) is None


def test_expansion_lists_the_slots_of_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expansion, "_pays", lambda *_: True)
    found = plan_expansion(batch_of([(2, 3), (0, 2)]))
    assert found is not None
    assert found.slots.tolist() == [4096, 4097, 4098, 4099, 4100, 8192, 8193]
    assert found.spans == (KeySpan(0, 3, 0, 5), KeySpan(3, 2, 5, 2))


def test_backend_without_latents_is_refused_by_name() -> None:
    backend: Any = TorchAttentionBackend()
    latents = [V3]
    check_layers(backend, latents, torch.float32)
    backend.limits = SimpleNamespace(**{**vars(backend.limits), "shared_kv": False})
    with pytest.raises(ConfigError, match="backend torch does not read latent attention"):
        check_layers(backend, latents, torch.float32)


def rotary() -> RotaryEmbedding:
    return RotaryEmbedding(8, 64, {"rope_type": "default", "rope_theta": 1e4})


def test_fewer_heads_than_ranks_are_refused() -> None:
    ranked = LayerSpec(**{**vars(SPEC), "tp_size": 64})
    with (
        split_over(PretendedRanks(64)),
        pytest.raises(ConfigError, match=r"--tp-size 64: .* heads are fewer than ranks"),
    ):
        LatentAttention(ranked, LATENT, 0, rotary())


def test_rank_has_some_heads_and_all_of_what_is_kept() -> None:
    ranked = LayerSpec(**{**vars(SPEC), "tp_size": 2})
    whole = LatentAttention(SPEC, LATENT, 0, rotary())
    with split_over(PretendedRanks(2)):
        part = LatentAttention(ranked, LATENT, 0, rotary())
    assert part.up.shape == (whole.num_heads // 2, *whole.up.shape[1:])
    assert part.sizes[1] == whole.sizes[1] == LATENT.kept_dim
    assert part.attn.num_kv_heads == whole.attn.num_kv_heads == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [("sliding_window", 4), ("attention_softcap", 20.0), ("attention_sinks", True)],
)
def test_what_other_attention_has_is_refused(field: str, value: Any) -> None:
    spec = LayerSpec(**{**vars(SPEC), field: value})
    with pytest.raises(ModelLoadError, match=f"{field} .* is not supported by latent attention"):
        LatentAttention(spec, LATENT, 0, rotary())


def test_scales_of_latents_in_fp8_are_refused() -> None:
    layer = LatentAttention(SPEC, LATENT, 0, rotary())
    [attention] = attention_layers(layer)
    assert isinstance(attention, Attention)
    attention.use_kv_scales(1.0, 1.0)
    with pytest.raises(ModelLoadError, match="scales of latents in FP8"):
        attention.use_kv_scales(0.5, 1.0)
