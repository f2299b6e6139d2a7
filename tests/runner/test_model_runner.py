"""The forwards of ModelRunner agree with each other, and refuse a plan made for another batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specengine.core.batch import ForwardMode
from specengine.core.errors import PlanMismatchError
from specengine.core.tree import Tree
from specengine.runner.model_runner import ModelRunner
from specengine.runner.worker import TpModelWorker
from tests.support.extends import close, extend

CPU = torch.device("cpu")
TOKENS = [5, 9, 40, 77, 9, 9, 123, 300, 2]


def test_decode_continues_an_extend(runner: ModelRunner) -> None:
    whole = runner.forward(extend([TOKENS])).logits
    runner.forward(extend([TOKENS[:-1]]))
    last = extend([TOKENS[-1:]], [len(TOKENS) - 1], ForwardMode.DECODE)
    close(runner.forward(last).logits, whole[-1:])


def test_chunks_equal_the_whole(runner: ModelRunner) -> None:
    whole = runner.forward(extend([TOKENS])).logits
    parts = [runner.forward(extend([TOKENS[a:b]], [a])).logits for a, b in ((0, 2), (2, 3), (3, 9))]
    close(torch.cat(parts), whole)


def test_mixed_serves_a_prompt_and_a_decoding_request(runner: ModelRunner) -> None:
    alone = runner.forward(extend([TOKENS])).logits
    prompt = runner.forward(extend([[1, 2, 3]])).logits
    runner.forward(extend([[1], TOKENS[:-1]]))
    mixed = extend([[1, 2, 3], TOKENS[-1:]], [0, len(TOKENS) - 1], ForwardMode.MIXED)
    logits = runner.forward(mixed).logits
    close(logits[:3], prompt)
    close(logits[3:], alone[-1:])


@pytest.mark.parametrize("layers_a_call", [1, 2, 3, 7])
def test_split_prefill_equals_extend(runner: ModelRunner, layers_a_call: int) -> None:
    expected = runner.forward(extend([TOKENS, [1, 2]])).logits
    batch = runner.new_forward_batch(extend([TOKENS, [1, 2]], mode=ForwardMode.SPLIT_PREFILL))
    outputs = []
    while batch.split_index < 3:
        outputs.append(runner.split_layers(batch, layers_a_call))
    assert outputs[:-1] == [None] * (len(outputs) - 1)
    assert outputs[-1] is not None
    close(runner.logits(outputs[-1], batch).logits, expected)


def test_split_prefill_in_one_forward(runner: ModelRunner) -> None:
    expected = runner.forward(extend([TOKENS])).logits
    close(runner.forward(extend([TOKENS], mode=ForwardMode.SPLIT_PREFILL)).logits, expected)


def test_split_prefill_wants_its_mode(runner: ModelRunner) -> None:
    with pytest.raises(ValueError, match="SPLIT_PREFILL"):
        runner.split_layers(runner.new_forward_batch(extend([TOKENS])), 1)


def test_idle_runs_on_nothing_without_a_plan(runner: ModelRunner) -> None:
    output = runner.forward(extend([], mode=ForwardMode.IDLE))
    assert output.logits.shape == (0, 320)


def test_verify_of_a_chain_equals_extend(runner: ModelRunner) -> None:
    whole = runner.forward(extend([TOKENS])).logits
    runner.forward(extend([TOKENS[:5]]))
    verify = extend([TOKENS[5:]], [5], ForwardMode.TARGET_VERIFY)
    close(runner.forward(verify).logits, whole[5:])


def test_verify_of_a_tree_equals_its_paths(runner: ModelRunner) -> None:
    """
    7 ─┬─ 8 ─── 10
       └─ 9
    """
    prefix = TOKENS[:4]
    left = runner.forward(extend([[*prefix, 7, 8, 10]])).logits
    right = runner.forward(extend([[*prefix, 7, 9]])).logits
    runner.forward(extend([prefix]))
    sees = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    tree = Tree(torch.tensor([0, 1, 1, 2]), torch.tensor([sees], dtype=torch.bool))
    verify = extend([[7, 8, 9, 10]], [4], ForwardMode.TARGET_VERIFY, tree)
    logits = runner.forward(verify).logits
    close(logits[[0, 1, 3]], left[-3:])
    close(logits[2], right[-1])


def test_only_the_rows_asked_for_get_logits(runner: ModelRunner) -> None:
    whole = runner.forward(extend([TOKENS])).logits
    some = runner.forward(replace(extend([TOKENS]), logits_rows=[2, 8])).logits
    close(some, whole[[2, 8]])


def test_a_plan_is_reused_where_it_fits_and_refused_where_not(runner: ModelRunner) -> None:
    worker = TpModelWorker(runner)
    expected = worker.forward_batch_generation(extend([TOKENS])).logits
    batch = runner.new_forward_batch(extend([TOKENS]))
    with pytest.raises(PlanMismatchError, match="no attention plan"):
        runner.forward(batch, skip_attn_backend_init=True)
    runner.attn_backend.init_forward_metadata(batch)
    close(runner.forward(batch, skip_attn_backend_init=True).logits, expected)
    other = runner.new_forward_batch(extend([TOKENS[:3]]))
    other.attn_plan = batch.attn_plan
    with pytest.raises(PlanMismatchError, match="does not fit"):
        runner.forward(other, skip_attn_backend_init=True)


def test_captured_features_are_layer_outputs(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "feature_layers", (0, 2))
    output = runner.forward(extend([TOKENS]))
    assert output.features is not None
    assert output.hidden is not None
    assert output.features.shape == (len(TOKENS), 2 * 64)
    final = runner.model.model.norm(output.features[:, 64:])  # type: ignore[attr-defined]
    close(final, output.hidden)
