"""Prompts whose last layer computes the rows that are read, and no more."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specengine.core.batch import ForwardBatch, ModelWorkerBatch
from specengine.core.config import ModelConfig
from specengine.core.forward_mode import ForwardMode
from specengine.core.last_rows import keep_last
from specengine.layers.attention import attention_layers
from specengine.runner.loader.load import load_model
from specengine.runner.loader.source import resolve_model
from specengine.runner.model_runner import ModelRunner
from specengine.target.registry import find_model_class
from tests.support.extends import close, extend
from tests.support.families import FAMILIES
from tests.support.last_rows import count_last
from tests.target.conftest import MiniRunner

PROMPTS = [[(7 * i * i + 3 * i) % 300 for i in range(40)], [5, 9, 301]]
MORE = [[4, 7], [8] * 30]  # behind these
LONG = [[(5 * i * i + i) % 300 for i in range(60)], [3, 1, 4, 1, 5, 9] * 2]


def last_rows(prompts: list[list[int]], **fields: Any) -> ModelWorkerBatch:
    """With logits of the last row of each."""
    batch = extend(prompts)
    ends = [sum(batch.extend_lens[: i + 1]) - 1 for i in range(batch.batch_size)]
    return replace(batch, **{"logits_rows": ends, **fields})


def kv_of(mini: MiniRunner) -> list[Tensor]:
    """What slots of requests hold: slot 0 is of padding."""
    layers = [one.layer_id for one in attention_layers(mini.model)]
    return [one[1:] for layer in layers for one in mini.pool.get_kv_buffer(layer)]


@pytest.mark.parametrize(
    ("family", "is_packed"),
    [*((family, True) for family in FAMILIES), ("llama", False), ("seedoss", False)],
)
def test_last_rows_alone_equal_those_of_all(
    family: str, is_packed: bool, small_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two prompts, and more of each behind them, which read the KV of the first. Weights that are
    not packed, as on a GPU, with and without biases."""
    if not is_packed:
        monkeypatch.setattr("specengine.runner.loader.load.pack_linears", lambda *_: None)
    source = resolve_model(ModelConfig(model=str(small_models[family])))
    family_model: Any = load_model(source, find_model_class, torch.float32, torch.device("cpu"))
    whole, narrow = MiniRunner(family_model), MiniRunner(family_model)
    layers = family_model.model.layers

    def run(mini: MiniRunner, tokens: list[list[int]], keeps: bool) -> tuple[Tensor, ForwardBatch]:
        batch = mini.batch(ForwardMode.EXTEND, tokens)
        batch.feature_layers = (0,)
        if keeps:
            keep_last(batch)
        return family_model(batch.input_ids, batch.positions, batch), batch

    for tokens in (PROMPTS, MORE):
        with torch.inference_mode():
            expected, batch = run(whole, tokens, keeps=False)
            given, other = run(narrow, tokens, keeps=True)
        leaves_out = layers[-1].leaves_rows_out
        assert len(given) == (2 if leaves_out else len(expected))
        last = batch.qo_indptr[1:] - 1
        close(given if leaves_out else given[last], expected[last])
        close(other.layer_features[0], batch.layer_features[0])
    for one, same in zip(kv_of(narrow), kv_of(whole), strict=True):
        close(one, same)


def test_a_batch_that_keeps_its_last_rows_goes_with_its_last_reference(
    runner: ModelRunner,
) -> None:
    """A cycle would hold features of whole prompts on the device until garbage is collected."""
    batch = runner.new_forward_batch(last_rows(LONG))
    runner.attn_backend.init_forward_metadata(batch)
    keep_last(batch)
    assert batch.last is not None
    last = batch.last(batch)
    assert last.kept_rows is last.last is None
    seen = weakref.ref(batch)
    gc.disable()
    try:
        del batch, last
        assert seen() is None
    finally:
        gc.enable()


def test_head_reads_the_requests_that_sample(
    runner: ModelRunner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of three requests the second has more of its prompt to come."""
    prompts = [*LONG, [9, 8, 7]]
    rows = last_rows(prompts).logits_rows
    assert rows is not None
    batch = last_rows(prompts, logits_rows=[rows[0], rows[2]])
    whole = runner.forward(batch).logits
    counted, runner.reads_hidden = count_last(monkeypatch), False
    output = runner.forward(batch)
    assert counted == [3]
    close(output.logits, whole)
    assert output.hidden is not None
    assert len(output.hidden) == 3


def test_a_chunk_that_nothing_samples_of_leaves_its_keys(
    runner: ModelRunner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt = LONG[0]
    whole = runner.forward(last_rows([prompt])).logits
    counted, runner.reads_hidden = count_last(monkeypatch), False
    monkeypatch.setattr("specengine.runner.model_runner.MANY_ROWS", 8)
    empty = runner.forward(last_rows([prompt[:40]], logits_rows=[]))
    assert len(empty.logits) == 0
    last = replace(last_rows([prompt[40:]]), prefix_lens=[40])
    close(runner.forward(last).logits, whole)
    assert counted == [1, 1]


@pytest.mark.parametrize(
    "fields",
    [
        {"logits_rows": None},
        {"logits_rows": [3, 59, 71]},  # log-probabilities of a prompt
        {"forward_mode": ForwardMode.DRAFT_EXTEND},
    ],
    ids=["all", "within", "drafter"],
)
def test_rows_that_are_read_are_computed(
    fields: dict[str, Any],
    runner: ModelRunner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = last_rows(LONG, **fields)
    expected = runner.forward(batch)
    counted, runner.reads_hidden = count_last(monkeypatch), False
    output = runner.forward(batch)
    assert not counted
    assert torch.equal(output.logits, expected.logits)
    assert output.hidden is not None
    assert len(output.hidden) == 72


def test_layer_that_a_drafter_reads_is_whole(
    runner: ModelRunner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted, runner.reads_hidden = count_last(monkeypatch), False
    runner.feature_layers = (0, 2)
    output = runner.forward(last_rows(LONG))
    assert not counted
    assert output.features is not None
    assert output.features.shape == (72, 2 * 64)


def test_few_rows_and_shared_experts_are_whole(
    runner: ModelRunner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted, runner.reads_hidden = count_last(monkeypatch), False
    runner.forward(last_rows([[1, 2, 3], [4]]))
    assert not counted
    runner.forward(last_rows(LONG))
    assert len(counted) == 1
    sharers: Any = object()
    runner.sharers = sharers
    assert not runner._leaves_rows_out(last_rows(LONG))
