"""K and V in FP8: drafts change no token, and the scales of a checkpoint are used."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.errors import ConfigError, ModelLoadError
from specengine.core.forward_mode import ForwardMode
from specengine.core.interfaces import AttentionLimits
from specengine.kernels.attention import latent_store_ref, rope_ref
from specengine.kernels.native import ops
from specengine.layers.attention import attention_layers
from specengine.runner.attention.torch_backend import TorchAttentionBackend
from specengine.runner.model_runner import ModelRunner
from tests.halves import slow_but
from tests.support.drafting import DRAFTS, drafting
from tests.support.families import FAMILIES

PROMPTS = ["abcabcabcabcabc", "x", "0123456789" * 9]
NGRAM: dict[str, Any] = {"algorithm": "NGRAM", "adaptive": False, "ngram_min_match": 1}
SPECS = {
    "chain": SpecConfig(**NGRAM, num_draft_tokens=6),
    "tree": SpecConfig(**NGRAM, num_draft_tokens=10, ngram_branches=3),
}
REPEATED = {name: replace(one, ngram_shared_corpus=True) for name, one in SPECS.items()}
CHUNKS: dict[str, Any] = {"chunked_prefill_size": 16}
MIXED = CHUNKS | {"enable_mixed_chunk": True}
# Windows; windows and sinks; latent attention; recurrent layers between.
WAYS = ("gemma3", "gptoss", "deepseekv2", "qwen3next")


def make(folder: Path, **flags: Any) -> LLM:
    given = {"dtype": "float32", "max_total_tokens": 2048, "kv_cache_dtype": "fp8"}
    return LLM(str(folder), **given | flags)


def greedy(llm: LLM) -> list[list[int]]:
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    return [one.token_ids for one in llm.generate(PROMPTS, params)]


@pytest.fixture(scope="module")
def scaled(small_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with scales under each of their names."""
    folder = tmp_path_factory.mktemp("scaled")
    for path in small_models["llama"].iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    layer = "model.layers.{}.self_attn."
    tensors |= {
        layer.format(0) + "k_scale": torch.tensor(0.02),
        layer.format(0) + "attn.v_scale": torch.tensor([0.03]),
        layer.format(1) + "k_proj.k_scale": torch.tensor(0.04),
        layer.format(2) + "k_proj.output_scale": torch.tensor(0.05),
        layer.format(2) + "v_proj.output_scale": torch.tensor(-1.0),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("shape", list(SPECS))
def test_drafts_change_no_token(shape: str, family: str, small_models: dict[str, Path]) -> None:
    plain = greedy(make(small_models[family]))
    assert greedy(make(small_models[family], spec=SPECS[shape])) == plain
    assert greedy(make(small_models[family], spec=SPECS[shape], chunked_prefill_size=16)) == plain


@pytest.mark.parametrize("family", slow_but(WAYS, FAMILIES))
def test_drafts_of_what_was_said_change_no_token(
    family: str, small_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts whole, in chunks, and in chunks beside requests that decode. What was said before is
    drafted, and so accepted, the second time."""
    modes: set[ForwardMode] = set()
    run = ModelRunner.forward

    def forward(runner: ModelRunner, batch: Any, *given: Any, **named: Any) -> Any:
        modes.add(batch.forward_mode)
        return run(runner, batch, *given, **named)

    plain = make(small_models[family])
    expected = greedy(plain)
    pool = plain.engine.parts.worker.runner.pools.token_to_kv_pool
    kept = [pool.get_kv_buffer(layer) for layer in pool.shape.kept_layers]
    assert {one.dtype for pair in kept for one in pair} == {torch.float8_e4m3fn}
    monkeypatch.setattr(ModelRunner, "forward", forward)
    for shape, flags in [("chain", {}), ("chain", CHUNKS), ("chain", MIXED), ("tree", MIXED)]:
        llm = make(small_models[family], spec=REPEATED[shape], **flags)
        assert [greedy(llm), greedy(llm)] == [expected, expected]
        assert llm.engine.scheduler.spec_totals.num_accepted_tokens > 20
        assert (ForwardMode.MIXED in modes) is (flags is MIXED)


@pytest.mark.parametrize("drafts", slow_but(["EAGLE3"], DRAFTS))
def test_each_kind_of_drafts_changes_no_token(drafts: str, scaled: Path, tmp_path: Path) -> None:
    llm = make(scaled, spec=drafting(drafts, scaled, scaled, tmp_path))
    assert greedy(llm) == greedy(make(scaled))


def test_scales_of_a_checkpoint_are_used(scaled: Path, small_models: dict[str, Path]) -> None:
    llm = make(scaled)
    layers = attention_layers(llm.engine.parts.worker.runner.model)
    found = [(one.k_scale, one.v_scale) for one in layers]
    assert found == [pytest.approx(pair) for pair in [(0.02, 0.03), (0.04, 1.0), (0.05, 1.0)]]
    pool = llm.engine.parts.worker.runner.pools.token_to_kv_pool
    greedy(llm)
    k_cache, _ = pool.get_kv_buffer(0)
    assert k_cache.dtype == torch.float8_e4m3fn
    assert pool.shape.bytes_per_token == 2 * 3 * 2 * 16
    dense = make(scaled, kv_cache_dtype="auto")
    layer = attention_layers(dense.engine.parts.worker.runner.model)[0]
    assert layer.k_scale == 1.0
    assert greedy(dense) == greedy(make(small_models["llama"], kv_cache_dtype="auto"))


def test_fp8_differs_from_float_by_its_rounding_alone(scaled: Path) -> None:
    """The first token, whose prompt's KV is rounded: logits stay near those of float32."""
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0)
    found, expected = (
        make(scaled, kv_cache_dtype=kind).generate(PROMPTS, params) for kind in ("fp8", "auto")
    )
    for one, other in zip(found, expected, strict=True):
        ours, theirs = one.completions[0].logprobs[0], other.completions[0].logprobs[0]
        assert ours.logprob != theirs.logprob
        assert abs(ours.logprob - theirs.logprob) < 0.5


@pytest.mark.parametrize("family", WAYS)
def test_first_token_of_other_attention_differs_from_float_by_rounding_alone(
    family: str, small_models: dict[str, Path]
) -> None:
    assert 0 < distance_of_first_tokens(small_models[family]) < 0.2


def distance_of_first_tokens(folder: Path) -> float:
    """Of logprobs with and without FP8, the largest."""
    pairs = zip(*(logprobs_of_first_tokens(folder, kind) for kind in ("fp8", "auto")), strict=True)
    return max(abs(one - other) for one, other in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_first_tokens_are_those_of_k_and_v_rounded(
    family: str, small_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache in float32 that is given rounded rows gives the same logprobs."""

    def rounded(cache: Tensor, loc: Tensor, rows: Tensor) -> None:
        cache[loc] = rows.clamp(-448, 448).to(torch.float8_e4m3fn).float()

    def logprobs(kind: str) -> list[float]:
        return logprobs_of_first_tokens(small_models[family], kind, "cpu")

    found, plain = logprobs("fp8"), logprobs("auto")
    for module in (rope_ref, latent_store_ref):
        monkeypatch.setattr(module, "write_rows", rounded)
    monkeypatch.setattr(ops, "side_by_side", lambda *_: False)  # compiled C, which writes float32
    assert found == pytest.approx(logprobs("auto"), abs=1e-5)
    assert found != pytest.approx(plain, abs=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_scales_that_are_powers_of_two_change_no_logprob(
    family: str, small_models: dict[str, Path], tmp_path: Path
) -> None:
    """K and V divided by them are rounded as K and V are, but for numbers next to 0."""

    def logprobs(k_scale: float, v_scale: float) -> list[float]:
        folder = shutil.copytree(small_models[family], tmp_path / str(k_scale))
        tensors = load_file(folder / "model.safetensors")
        for layer in range(3):
            tensors[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor(k_scale)
            tensors[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor(v_scale)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return logprobs_of_first_tokens(folder, "fp8", "cpu")

    found, expected = logprobs(2.0**-3, 2.0**-5), logprobs(2.0**-6, 2.0**-4)
    assert found == pytest.approx(expected, abs=5e-4)
    assert logprobs(0.11, 0.11) != pytest.approx(expected, abs=5e-4), "scales are not applied"


def logprobs_of_first_tokens(folder: Path, kind: str, device: str = "auto") -> list[float]:
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0)
    outputs = make(folder, kv_cache_dtype=kind, device=device).generate(PROMPTS, params)
    return [one.completions[0].logprobs[0].logprob for one in outputs]


def test_more_than_one_scale_is_refused(scaled: Path, tmp_path: Path) -> None:
    for path in scaled.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.self_attn.v_scale"] = torch.ones(2)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"self_attn\.v_scale has shape \[2\]"):
        make(tmp_path)


def test_backends_that_cannot_read_it_are_refused(
    small_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchAttentionBackend, "limits", AttentionLimits())
    with pytest.raises(ConfigError, match="torch reads no KV in FP8; leave out --kv-cache-dtype"):
        make(small_models["llama"], attention_backend="torch")
