"""Drafts that may say a part of the vocabulary: by a token map, or as models that are padded
otherwise have fewer tokens or more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specengine import LLM, SamplingParams, SpecConfig
from specengine.cli.main import main
from specengine.core.errors import ConfigError
from specengine.draft.token_map import read_token_map, write_token_map
from tests.draft import eagle_checkpoints as checkpoints
from tests.support.families import save_small_model

PROMPTS = [[5, 9, 4, 77, 31, 8], [100, 7, 7, 7], [319, 12, 200, 318]]
IDS = torch.arange(3, 320, 3)


@pytest.fixture(scope="module")
def target(small_models: dict[str, Path]) -> Path:
    return small_models["llama"]


def texts(target: Path, spec: SpecConfig | None, temperature: float = 0.0) -> list[list[int]]:
    llm = LLM(str(target), spec, dtype="float32", max_total_tokens=1024)
    params = SamplingParams(max_tokens=12, temperature=temperature, seed=3, ignore_eos=True)
    return [one.token_ids for one in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("end", ["json", "safetensors", "pt"])
def test_map_is_read_as_it_was_written_in_each_form(end: str, tmp_path: Path) -> None:
    path = tmp_path / f"map.{end}"
    write_token_map(IDS[torch.randperm(len(IDS))], path)
    assert torch.equal(read_token_map(path, 320), IDS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "no list"),
        ([1, 1], "1 different"),
        ([320], "vocabulary of 320"),
        ([-1], "-1"),
        ("x", ""),
    ],
)
def test_map_that_does_not_fit_is_refused(content: object, message: str, tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"--speculative-token-map .*{message}"):
        read_token_map(path, 320)


def with_own_head(draft: Path, target: Path) -> Path:
    """A head that differs from the target's in every row."""
    tensors = load_file(draft / "model.safetensors")
    tensors["lm_head.weight"] = load_file(target / "model.safetensors")["lm_head.weight"] * 2
    save_file(tensors, draft / "model.safetensors")
    return draft


@pytest.mark.parametrize("has_head", [False, True])
@pytest.mark.parametrize("topk", [1, 2])
def test_mapped_draft_says_its_best_token_of_the_map_and_text_stays(
    has_head: bool, topk: int, target: Path, tmp_path: Path
) -> None:
    draft = checkpoints.oracle_eagle(tmp_path / "draft", target)
    if has_head:
        with_own_head(draft, target)
    path = tmp_path / "map.pt"
    write_token_map(IDS, path)
    spec = SpecConfig(
        algorithm="EAGLE",
        draft_model_path=str(draft),
        token_map=str(path),
        num_steps=2,
        eagle_topk=topk,
        adaptive=False,
    )
    llm = LLM(str(target), spec, dtype="float32", max_total_tokens=1024)
    model = llm.engine.parts.drafter.runner.model
    states, device = torch.randn(9, 64), llm.engine.parts.worker.runner.device
    whole = load_file(target / "model.safetensors")["lm_head.weight"] * (2 if has_head else 1)
    expected = (states @ whole.T)[:, IDS]
    assert torch.allclose(model.head.logits(states.to(device)).cpu(), expected, atol=1e-4)
    assert torch.equal(model.head.best(states.to(device)).cpu(), IDS[expected.argmax(-1)])
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    found = [one.token_ids for one in llm.generate(PROMPTS, params)]
    assert found == texts(target, None)
    assert llm.engine.scheduler.spec_totals.num_draft_tokens > 0


def test_map_lies_where_the_parameters_of_the_draft_lie(target: Path, tmp_path: Path) -> None:
    """Kernels of a GPU read it."""
    draft = checkpoints.oracle_eagle(tmp_path / "draft", target)
    write_token_map(IDS, tmp_path / "map.json")
    spec = SpecConfig(
        algorithm="EAGLE", draft_model_path=str(draft), token_map=str(tmp_path / "map.json")
    )
    llm = LLM(str(target), spec, dtype="float32", max_total_tokens=64, device="cpu")
    model = llm.engine.parts.drafter.runner.model
    assert torch.equal(model.target_ids, IDS)
    with torch.device("meta"):
        made = type(model)(model.form)
    tensors = {**dict(made.named_parameters()), **dict(made.named_buffers())}
    assert "target_ids" in tensors
    assert {one.device.type for one in tensors.values()} == {"meta"}


def test_map_beside_a_vocabulary_of_the_drafts_own_is_refused(target: Path, tmp_path: Path) -> None:
    write_token_map(IDS, tmp_path / "map.json")
    draft = checkpoints.eagle3(tmp_path / "draft", target)
    spec = SpecConfig(
        algorithm="EAGLE3", draft_model_path=str(draft), token_map=str(tmp_path / "map.json")
    )
    with pytest.raises(ConfigError, match="a vocabulary of 100 tokens of its own"):
        texts(target, spec)


def test_map_is_refused_of_drafters_that_take_none(target: Path) -> None:
    spec = SpecConfig(algorithm="STANDALONE", draft_model_path=str(target), token_map="x.json")
    with pytest.raises(ConfigError, match="--speculative-token-map is for EAGLE, EAGLE3"):
        texts(target, spec)


def test_command_makes_a_map_of_the_tokens_that_a_text_has_most(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("aaaa bbb\naaab\n")
    out = tmp_path / "map.json"
    args = ["data", "token-map", str(tmp_path / "text.txt"), str(out), "--size", "3"]
    assert main(args) == 2
    assert main([*args, "--model", str(target)]) == 0
    assert "3 of 320 tokens" in capsys.readouterr().out
    llm = LLM(str(target), dtype="float32", max_total_tokens=64)
    ids = json.loads(out.read_text())
    assert len(ids) == 3
    assert 0 in ids, "the end of text"
    assert llm.tokenizer("a").input_ids[-1] in ids


@pytest.mark.parametrize("vocab_size", [256, 384])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_standalone_of_another_padding_drafts_common_tokens_and_text_stays(
    vocab_size: int, temperature: float, target: Path, tmp_path: Path
) -> None:
    draft = save_small_model("llama", tmp_path / "draft", seed=7, vocab_size=vocab_size)
    for path in target.glob("tokenizer*"):
        (draft / path.name).write_bytes(path.read_bytes())
    shape = {"num_steps": 3, "adaptive": False, "draft_sampling": temperature > 0}
    spec = SpecConfig(algorithm="STANDALONE", draft_model_path=str(draft), verify="auto", **shape)
    llm = LLM(str(target), spec, dtype="float32", max_total_tokens=1024)
    model = llm.engine.parts.drafter.runner.model
    states = torch.randn(2, 64, device=model.lm_head.device)
    assert model.vocab_size == model.head.logits(states).shape[1] <= min(320, vocab_size)
    params = SamplingParams(max_tokens=12, temperature=temperature, seed=3, ignore_eos=True)
    found = [one.token_ids for one in llm.generate(PROMPTS, params)]
    if temperature == 0.0:
        assert found == texts(target, None)
    assert all(len(one) == 12 for one in found)
    assert llm.engine.scheduler.spec_totals.num_draft_tokens > 0
