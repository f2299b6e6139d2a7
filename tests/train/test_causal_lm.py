"""Whole models: what is trained is what the engine serves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from specengine import LLM, SamplingParams
from specengine.core.errors import ConfigError, ModelLoadError
from specengine.draft.train.causal_lm import CausalLmTask, learns_all, learns_answers
from specengine.draft.train.data.packing import PackedBatch
from specengine.draft.train.model_directory import make_llama
from specengine.draft.train.padded import PaddedDocuments
from specengine.draft.train.standalone import StandaloneConfig, make_standalone_task
from specengine.draft.train.target import TargetConfig
from specengine.draft.train.teacher import Teacher
from specengine.draft.train.tokenizer import train_tokenizer
from specengine.engine.chat_template import render_chat
from specengine.lab.probe import EngineProbe, ProbePrompt
from tests.train.draft_training import load_target, packed, random_documents

VOCAB = 320
SHAPE = TargetConfig(
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    max_positions=128,
    dtype="float32",
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    texts = ["The cat sat on the mat, and the cat ate.", "Ein Käse — 食べる!"] * 3
    return train_tokenizer(texts, VOCAB, SHAPE.max_positions)


def make_task(tokenizer: Any, **shape: Any) -> CausalLmTask:
    torch.manual_seed(0)
    llama = make_llama(replace(SHAPE, **shape), tokenizer, VOCAB)
    with torch.no_grad():  # sharper than at the start of a training
        for parameter in llama.parameters():
            parameter.mul_(4.0 if parameter.dim() == 2 else 1.0)
    return CausalLmTask("target", llama, tokenizer, torch.float32, learns_all)


def batch_of(lens: list[int]) -> PackedBatch:
    return packed(random_documents(lens, VOCAB))


def logits_of(task: CausalLmTask, batch: PackedBatch) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = task.module(batch.input_ids, batch.positions, batch.lens, F.linear)
    return logits


def test_attention_stays_within_documents() -> None:
    lens = [5, 1, 9, 8, 16, 3]
    q, k, v = (torch.randn(sum(lens), heads, 8) for heads in (4, 2, 2))
    found = PaddedDocuments.of(lens, torch.device("cpu")).attend(q, k, v)
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    parts = [x.split(lens) for x in (q, k, v)]  # type: ignore[no-untyped-call]
    for begin, one in zip([0, 5, 6, 15, 23, 39], zip(*parts, strict=True), strict=True):
        rows, keys, values = (x.transpose(0, 1) for x in one)
        scores = rows @ keys.transpose(1, 2) * 8**-0.5
        past = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
        wanted = scores.masked_fill(~past, float("-inf")).softmax(-1) @ values
        rows_found = found[begin : begin + wanted.shape[1]].transpose(0, 1)
        torch.testing.assert_close(rows_found, wanted)


@pytest.mark.parametrize("tied", [True, False])
def test_the_engine_serves_the_trained_logits(tmp_path: Path, tokenizer: Any, tied: bool) -> None:
    task = make_task(tokenizer, tie_embeddings=tied)
    task.export(tmp_path)
    batch = batch_of([7, 1, 30])
    teacher = Teacher(load_target(tmp_path))
    served = teacher.logits(teacher.forward(batch).hidden)
    torch.testing.assert_close(logits_of(task, batch), served, rtol=1e-4, atol=1e-4)


def test_generation_follows_the_trained_module(tmp_path: Path, tokenizer: Any) -> None:
    task = make_task(tokenizer)
    task.export(tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", device="cpu", max_total_tokens=128)
    prompt = render_chat(llm.tokenizer, [{"role": "user", "content": "The cat?"}])
    sampling = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    ids = prompt + llm.generate([prompt], sampling)[0].token_ids
    best = logits_of(task, packed([ids])).argmax(-1)
    assert best[len(prompt) - 1 : -1].tolist() == ids[len(prompt) :]
    eos = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert llm.engine.parts.eos_ids == frozenset([eos])


def test_losses_are_those_of_each_next_token(tokenizer: Any) -> None:
    task, batch = make_task(tokenizer), batch_of([6, 2, 9])
    task.learns = learns_answers
    log_probs = logits_of(task, batch).log_softmax(-1)
    batch.loss_mask[3] = False
    rows = [row for row in range(16) if row not in (2, 5, 7)]  # 2 precedes what is not learned
    wanted = [-float(log_probs[row, batch.input_ids[row + 1]]) for row in rows]
    out = task.loss(batch)
    assert float(out.count) == len(rows)
    assert float(out.loss.detach()) == pytest.approx(sum(wanted) / len(rows), rel=1e-5)
    summary = task.summary(task.evaluate(batch))
    assert summary["loss"] == pytest.approx(float(out.loss.detach()), rel=1e-6)


def test_logits_are_made_block_by_block(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    task, batch = make_task(tokenizer), batch_of([20, 14])
    whole = task.loss(batch).loss
    whole.backward()  # type: ignore[no-untyped-call]
    gradients = {name: one.grad for name, one in task.module.named_parameters()}
    task.module.zero_grad()
    monkeypatch.setattr("specengine.draft.train.causal_lm.MAX_ELEMENTS", 5 * VOCAB)
    parts = task.loss(batch).loss
    parts.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(parts, whole)
    for name, one in task.module.named_parameters():
        torch.testing.assert_close(one.grad, gradients[name])


def test_a_drafter_that_is_the_target_is_always_right(tmp_path: Path, tokenizer: Any) -> None:
    target, export = tmp_path / "target", tmp_path / "export"
    export.mkdir()
    target.mkdir()
    make_task(tokenizer).export(target)
    loaded = load_target(target)
    config = StandaloneConfig(init=str(target), dtype="float32")
    task = make_standalone_task(config, Teacher(loaded))
    batch = batch_of([25, 31])
    assert task.summary(task.evaluate(batch))["acceptance_0"] == 1.0
    out = task.loss(batch)
    out.loss.backward()  # type: ignore[no-untyped-call]
    norms = [float(one.grad.norm()) for one in task.module.parameters() if one.grad is not None]
    assert norms  # it has the teacher's distribution: nothing to learn
    assert max(norms) < 1e-5
    task.export(export)
    prompts = [ProbePrompt([5, 6, 7], 21), ProbePrompt([9, 8], 13)]
    probe = EngineProbe(loaded, "STANDALONE", prompts, num_steps=3)
    assert probe(export) == {"accepted_length": 4.0, "acceptance_0": 1.0}


def test_models_to_begin_with_must_fit(tmp_path: Path, tokenizer: Any) -> None:
    make_task(tokenizer).export(tmp_path)
    with pytest.raises(ConfigError, match="has 320 tokens, the vocabulary 999"):
        make_llama(replace(SHAPE, init=str(tmp_path)), tokenizer, 999)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "Qwen2ForCausalLM"))
    with pytest.raises(ModelLoadError, match="only LlamaForCausalLM without biases is trained"):
        make_llama(replace(SHAPE, init=str(tmp_path)), tokenizer, VOCAB)


def test_tokenizers_have_the_size_that_was_asked_for(tokenizer: Any) -> None:
    assert len(tokenizer) == VOCAB
    text = "The cat — 食べる\n\x00!"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(train_tokenizer(["a"], 300, 64)) == 300  # fewer merges than ids
