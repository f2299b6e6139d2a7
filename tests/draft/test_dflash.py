"""DFlash drafts inside the engine, against a plain reading of their equations; and drafts that do
not fit, refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.batch import ScheduleBatch
from specengine.core.errors import ConfigError, ModelLoadError
from specengine.draft.dflash.worker import DFlashWorker
from specengine.engine.proof.tiny_model import TinyModels, save_tiny_models
from tests.draft.dflash_reading import DFlashReading
from tests.draft.eagle_checkpoints import dflash

PROMPTS = ["abcabcabcabcabc", "The quick brown fox", "x"]


@dataclass
class Round:
    texts: list[list[int]]
    depths: list[int]
    logits_BDV: Tensor


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return save_tiny_models(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[Round]:
    seen: list[Round] = []
    block_logits = DFlashWorker._block_logits

    def watched(self: DFlashWorker, batch: ScheduleBatch, depths: list[int]) -> Tensor:
        found = block_logits(self, batch, depths)
        seen.append(Round([list(req.token_ids) for req in batch.reqs], depths, found.clone()))
        return found

    monkeypatch.setattr(DFlashWorker, "_block_logits", watched)
    return seen


def make(target: Path, draft: Path, **flags: Any) -> LLM:
    spec = {"num_steps": 3, "adaptive": False} | flags.pop("spec", {})
    config = SpecConfig(algorithm="DFLASH", draft_model_path=str(draft), **spec)
    return LLM(str(target), config, dtype="float32", max_total_tokens=1024, **flags)


def texts(llm: LLM, new_tokens: int = 12) -> list[list[int]]:
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    return [one.token_ids for one in llm.generate(PROMPTS, params)]


def as_speculators(folder: Path, to: Path) -> Path:
    """Nested, layers counted by what they read, with a vocabulary and a head of its own."""
    raw = json.loads((folder / "config.json").read_text())
    own, tensors = raw.pop("dflash_config"), load_file(folder / "model.safetensors")
    ids = torch.arange(1, raw["vocab_size"], 2)
    tensors["lm_head.weight"] = torch.randn(len(ids), raw["hidden_size"])
    tensors["d2t"] = ids - torch.arange(len(ids))
    nested = {
        "speculators_model_type": "dflash",
        "draft_vocab_size": len(ids),
        "block_size": raw.pop("block_size"),
        "aux_hidden_state_layer_ids": [layer + 1 for layer in own["target_layer_ids"]],
        "mask_token_id": own["mask_token_id"],
        "transformer_layer_config": raw,
    }
    to.mkdir()
    save_file(tensors, to / "model.safetensors")
    (to / "config.json").write_text(json.dumps(nested))
    return to


# A Llama; a mixture of experts; recurrent layers; latent attention.
@pytest.mark.parametrize(
    ("layout", "family"),
    [
        ("z-lab", None),
        ("speculators", None),
        ("z-lab", "qwen3moe"),
        ("z-lab", "qwen3next"),
        ("z-lab", "deepseekv3"),
    ],
)
def test_blocks_follow_the_equations_in_batches_and_over_rounds(
    layout: str,
    family: str | None,
    tiny: TinyModels,
    small_models: dict[str, Path],
    tmp_path: Path,
    rounds: list[Round],
) -> None:
    """Prompts come in whole and in chunks, one beside rounds of others. On the CPU, where rounds
    are the host's, also beside a GPU."""
    torch.manual_seed(4)
    target, draft = tiny.target, tiny.dflash
    if layout == "speculators":
        draft = as_speculators(draft, tmp_path / "draft")
    if family is not None:
        target, draft = small_models[family], dflash(tmp_path / "draft", small_models[family])
    flags = {"chunked_prefill_size": 16, "enable_mixed_chunk": True}
    llm = make(target, draft, device="cpu", **flags)
    plain = LLM(str(target), device="cpu", dtype="float32", max_total_tokens=1024)
    assert texts(llm) == texts(plain)
    reading, compared = DFlashReading(draft, target), 0
    for one in rounds:
        for text, depth, found_DV in zip(one.texts, one.depths, one.logits_BDV, strict=True):
            if depth:
                expected = reading.logits(text, depth)
                largest = max(1.0, float(expected.abs().max()))
                assert float((found_DV[:depth] - expected).abs().max()) < 1e-4 * largest
                compared += depth
    assert compared > 60
    assert 3 in {depth for one in rounds for depth in one.depths}


Edit = Callable[[dict[str, Any], dict[str, Tensor]], object]
REFUSED: dict[str, tuple[Edit, str]] = {
    "no layers": (lambda c, t: c["dflash_config"].pop("target_layer_ids"), "target_layer_ids"),
    "layers past the last": (
        lambda c, t: c["dflash_config"].update(target_layer_ids=[0, 1, 3]),
        r"\[0, 1, 3\].* has 3",
    ),
    "fewer layers": (
        lambda c, t: c["dflash_config"].update(target_layer_ids=[0, 2]),
        r"fc\.weight .*\[64, 192\] and must be \[64, 128\]",
    ),
    "no mask": (lambda c, t: c["dflash_config"].pop("mask_token_id"), "lacks mask_token_id"),
    "a mask of another target": (
        lambda c, t: c["dflash_config"].update(mask_token_id=300),
        "mask_token_id 300 .* vocabulary of 300",
    ),
    "no block": (lambda c, t: c.pop("block_size"), "lacks block_size"),
    "another vocabulary": (lambda c, t: c.update(vocab_size=400), "vocab_size 400"),
    "windows": (
        lambda c, t: c.update(layer_types=["sliding_attention"] * 2, sliding_window=8),
        "within a window",
    ),
    "rows that say the next token": (
        lambda c, t: c.update(sample_from_anchor=True),
        "sample_from_anchor",
    ),
    "a layer too few": (lambda c, t: c.update(num_hidden_layers=3), r"missing tensor layers\.2"),
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_rounds_in_graphs_on_a_gpu_change_nothing(tiny: TinyModels) -> None:
    plain = LLM(str(tiny.target), dtype="float32", max_total_tokens=1024, disable_cuda_graph=True)
    expected = texts(plain)
    llm = make(tiny.target, tiny.dflash, cuda_graph_bs=(1, 2, 4))
    assert [texts(llm), texts(llm)] == [expected, expected]
    rounds = llm.engine.stats().graphs["round"]
    assert rounds.replays > 0
    assert rounds.fallbacks == {}


@pytest.mark.parametrize("name", REFUSED)
def test_drafts_that_do_not_fit_are_refused(name: str, tiny: TinyModels, tmp_path: Path) -> None:
    edit, message = REFUSED[name]
    raw = json.loads((tiny.dflash / "config.json").read_text())
    tensors = load_file(tiny.dflash / "model.safetensors")
    edit(raw, tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelLoadError, match=message):
        make(tiny.target, tmp_path)


def test_trees_and_longer_blocks_are_refused(tiny: TinyModels) -> None:
    with pytest.raises(ConfigError, match="DFLASH drafts chains"):
        make(tiny.target, tiny.dflash, spec={"eagle_topk": 2})
    with pytest.raises(ConfigError, match=r"num-steps 4.*blocks of 4 .* 3 at most"):
        make(tiny.target, tiny.dflash, spec={"num_steps": 4})
