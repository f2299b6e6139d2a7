"""EAGLE-3's training forward is the one that serving runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specengine.core.errors import ConfigError
from specengine.draft.train.attention import PaddedAttention
from specengine.draft.train.eagle3_task import (
    Eagle3Config,
    Eagle3Task,
    default_feature_layers,
    make_eagle3_task,
)
from tests.draft.eagle_reading import EagleReading
from tests.train.data_sets import random_dataset
from tests.train.draft_training import load_target, packed, random_documents, rows_of

VOCAB = 320


def make_task(target: Path, folder: Path, **options: Any) -> Eagle3Task:
    torch.manual_seed(3)
    dataset = random_dataset(folder / "data", [40] * 30)
    settings: dict[str, Any] = {"num_steps": 4, "draft_vocab_size": 100, "dtype": "float32"}
    settings |= options
    return make_eagle3_task(load_target(target), dataset, Eagle3Config(**settings))


def shake(task: Eagle3Task) -> None:
    """Away from the initial values, some of which are ones and zeros."""
    with torch.no_grad():
        for parameter in task.module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


def exported(task: Eagle3Task, folder: Path) -> Path:
    folder.mkdir()
    task.export(folder)
    return folder


@torch.no_grad()
def step_logits(task: Eagle3Task, documents: list[list[int]]) -> list[Tensor]:
    rows = rows_of(task.teacher, packed(documents))
    found: list[Tensor] = task.module(
        rows,
        PaddedAttention(rows),
        task.config.num_steps,
        lambda states, head: [state @ head.T for state in states],
    )
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"draft_vocab_size": None},
        {"own_head": False},
        {"own_head": False, "draft_vocab_size": None},
        {"num_heads": 8, "num_kv_heads": 1, "intermediate_size": 72, "feature_layers": (0, 2)},
    ],
    ids=str,
)
def test_every_step_is_what_drafting_says_that_deep(
    options: dict[str, Any], small_models: dict[str, Path], tmp_path: Path
) -> None:
    """Row i at step k: k tokens drafted past the root i + 1, those of the document."""
    target = small_models["llama"]
    task = make_task(target, tmp_path, **options)
    shake(task)
    reading = EagleReading(exported(task, tmp_path / "draft"), target)
    documents = random_documents([12, 9], VOCAB, seed=4)
    found = step_logits(task, documents)
    reading.read(documents)
    start = 0
    for document in documents:
        for row in range(len(document) - 1):
            drafted = document[row + 2 : row + 1 + len(found)]
            expected = reading.logits(document[: row + 2], drafted)
            for step, logits in enumerate(expected):
                largest = max(1.0, float(logits.abs().max()))
                assert float((found[step][start + row] - logits).abs().max()) < 2e-5 * largest
        start += len(document)


def test_loss_is_the_equations_row_by_row(small_models: dict[str, Path], tmp_path: Path) -> None:
    """Over answers alone, tokens outside the vocabulary left out, each step with its weight."""
    task = make_task(small_models["llama"], tmp_path, step_decay=0.5)
    shake(task)
    documents = random_documents([15, 2, 11], VOCAB, seed=5)
    answers = [[4, 5, 6, 7, 12, 13, 14], [1], [0, 1, 2]]
    batch = packed(documents, answers)
    out = task.loss(batch)
    drafts = step_logits(task, documents)
    teacher = task.teacher.logits(task.teacher.forward(batch).hidden)
    ids = task.vocabulary.target_ids
    losses: list[list[float]] = [[] for _ in drafts]
    matches, drafted, start = [0] * len(drafts), [0] * len(drafts), 0
    for document, wanted in zip(documents, answers, strict=True):
        for row in range(len(document)):
            for step, logits in enumerate(drafts):
                token = row + step + 2
                if token not in wanted or token >= len(document):
                    continue
                target = teacher[start + token - 1]
                drafted[step] += 1
                if int(target.argmax()) not in ids:
                    continue
                probs, log_draft = target[ids].softmax(-1), logits[start + row].log_softmax(-1)
                losses[step].append(-float((probs * log_draft).sum()))
                matches[step] += int(ids[log_draft.argmax()]) == int(target.argmax())
        start += len(document)
    weights = [1, 0.5, 0.25, 0.125]
    total = sum(weight * sum(found) for weight, found in zip(weights, losses, strict=True))
    assert 0 < len(losses[0]) < drafted[0]
    assert float(out.count) == len(losses[0])
    assert float(out.loss.detach()) == pytest.approx(
        total / (len(losses[0]) * sum(weights)), rel=1e-4
    )
    for step in range(4):
        assert float(out.metrics[f"match_{step}"]) == matches[step]
        assert float(out.counts[f"match_{step}"]) == drafted[step]
    sums = task.evaluate(batch)
    assert task.summary(sums)["loss"] == pytest.approx(float(out.loss.detach()), rel=1e-4)


@pytest.mark.parametrize("own_head", [True, False])
def test_gradient_is_that_of_the_loss(
    own_head: bool, small_models: dict[str, Path], tmp_path: Path
) -> None:
    """Taken block by block, against finite differences."""
    task = make_task(small_models["llama"], tmp_path, own_head=own_head, hard_cross_entropy=0.3)
    shake(task)
    batch = packed(random_documents([14, 9], VOCAB, seed=6))
    task.loss(batch).loss.backward()  # type: ignore[no-untyped-call]
    for name, parameter in task.module.named_parameters():
        assert parameter.grad is not None, name
        direction = torch.randn_like(parameter)
        expected = float((parameter.grad * direction).sum())
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(sign * 1e-3 * direction)
                values.append(float(task.loss(batch).loss))
                parameter.sub_(sign * 1e-3 * direction)
        assert (values[0] - values[1]) / 2e-3 == pytest.approx(expected, rel=0.05, abs=2e-3), name


def test_documents_do_not_see_each_other(small_models: dict[str, Path], tmp_path: Path) -> None:
    task = make_task(small_models["llama"], tmp_path)
    documents = random_documents([13, 8, 21], VOCAB, seed=7)
    together = step_logits(task, documents)
    alone = step_logits(task, documents[1:2])
    for step, logits in enumerate(alone):
        ends = len(logits) - 1 - step  # rows whose tokens are of the document
        assert torch.allclose(together[step][13 : 13 + ends], logits[:ends], atol=1e-5)


def test_blocks_do_not_change_the_loss(
    small_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = make_task(small_models["llama"], tmp_path)
    batch = packed(random_documents([30, 20], VOCAB, seed=8))
    whole = task.loss(batch)
    whole.loss.backward()  # type: ignore[no-untyped-call]
    gradient = task.module.fc.weight.grad
    task.module.zero_grad()
    monkeypatch.setattr("specengine.draft.train.head._MAX_ROWS", 7)
    monkeypatch.setattr(task, "compiles", True)  # blocks are padded; nothing is compiled now
    parts = task.loss(batch)
    parts.loss.backward()  # type: ignore[no-untyped-call]
    assert float(parts.loss.detach()) == pytest.approx(float(whole.loss.detach()), rel=1e-5)
    assert gradient is not None
    assert task.module.fc.weight.grad is not None
    assert torch.allclose(task.module.fc.weight.grad, gradient, atol=1e-6)


def test_a_batch_without_answers_teaches_nothing(
    small_models: dict[str, Path], tmp_path: Path
) -> None:
    task = make_task(small_models["llama"], tmp_path)
    out = task.loss(packed([[5, 6, 7, 8]], [[]]))
    out.loss.backward()  # type: ignore[no-untyped-call]
    assert float(out.loss.detach()) == float(out.count) == 0.0
    assert task.module.fc.weight.grad is not None
    assert float(task.module.fc.weight.grad.abs().max()) == 0.0


def test_export_has_the_names_that_servers_read(
    small_models: dict[str, Path], tmp_path: Path
) -> None:
    task = make_task(small_models["llama"], tmp_path, dtype="bfloat16", own_head=False)
    folder = exported(task, tmp_path / "draft")
    tensors = load_file(folder / "model.safetensors")
    layer = {
        "input_layernorm", "hidden_norm", "post_attention_layernorm", "self_attn.q_proj",
        "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
        "mlp.down_proj",
    }  # fmt: skip
    assert set(tensors) == {"d2t", "t2d", "fc.weight", "norm.weight"} | {
        f"midlayer.{name}.weight" for name in layer
    }
    assert tensors["fc.weight"].dtype == torch.bfloat16
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].nonzero()[:, 0].tolist() == (torch.arange(100) + tensors["d2t"]).tolist()
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == 100
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3], "vLLM counts what layers read"


def test_default_layers_ascend_in_shallow_targets_too() -> None:
    assert default_feature_layers(30) == (1, 14, 26)
    assert default_feature_layers(32) == (1, 15, 28)
    for count in range(3, 12):
        layers = default_feature_layers(count)
        assert len(set(layers)) == 3
        assert list(layers) == sorted(layers)
        assert layers[-1] < count


def test_a_vocabulary_larger_than_the_targets_is_refused(
    small_models: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="draft_vocab_size=400: the target has 320 tokens"):
        make_task(small_models["llama"], tmp_path, draft_vocab_size=400)
