"""The forwards of ModelRunner agree with each other, and refuse a plan made for another batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specengine.core.batch import ForwardMode, ModelWorkerBatch
from specengine.core.config import ModelConfig
from specengine.core.errors import PlanMismatchError
from specengine.core.tree import Tree
from specengine.memory.kv_cache import KVShape, MHATokenToKVPool
from specengine.memory.req_to_token import ReqToTokenPool
from specengine.runner.attention.torch_backend import TorchAttentionBackend
from specengine.runner.loader.load import load_model
from specengine.runner.loader.source import resolve_model
from specengine.runner.model_runner import MemoryPools, ModelRunner
from specengine.runner.worker import TpModelWorker
from specengine.target.registry import find_model_class

CPU = torch.device("cpu")
TOKENS = [5, 9, 40, 77, 9, 9, 123, 300, 2]


@pytest.fixture(scope="module")
def model(small_models: dict[str, Path]) -> torch.nn.Module:
    source = resolve_model(ModelConfig(model=str(small_models["llama"])))
    return load_model(source, find_model_class, torch.float32, CPU)


@pytest.fixture
def runner(model: torch.nn.Module) -> ModelRunner:
    rows = ReqToTokenPool(3, 64, CPU)
    shape = KVShape(num_layers=3, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    kv = MHATokenToKVPool(200, shape, CPU)
    slots = torch.randperm(192).numpy().astype("int32") + 1
    for i in range(3):
        row = rows.alloc()
        assert row is not None
        rows.write(row, 0, slots[i * 64 : (i + 1) * 64])
    return ModelRunner(model, CPU, MemoryPools(rows, kv), TorchAttentionBackend())  # type: ignore[arg-type]


def extend(
    tokens: list[list[int]],
    prefix_lens: list[int] | None = None,
    mode: ForwardMode = ForwardMode.EXTEND,
    tree: Tree | None = None,
) -> ModelWorkerBatch:
    """New tokens of requests 1, 2, ..., every row of which gets logits."""
    return ModelWorkerBatch(
        forward_mode=mode,
        input_ids=torch.tensor([t for one in tokens for t in one], dtype=torch.int64),
        req_pool_indices=[i + 1 for i in range(len(tokens))],
        prefix_lens=prefix_lens or [0] * len(tokens),
        extend_lens=[len(one) for one in tokens],
        logits_rows=None,
        sampling=None,
        tree=tree,
    )


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


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
