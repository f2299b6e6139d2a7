"""States and logits of every form of MTP layer against a plain reading of its equations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from specengine.core.batch import ForwardBatch, ForwardMode, ModelWorkerBatch
from specengine.core.config import EngineConfig, ModelConfig, SpecConfig
from specengine.draft.loaded import DraftTarget
from specengine.draft.mtp.load import load_mtp
from specengine.draft.mtp.model import MtpModel
from specengine.kernels.linear import layer_tail, layer_tail_cuda, layer_tail_ref
from specengine.kernels.linear.types import Tail
from specengine.memory.kv_cache import MHATokenToKVPool
from specengine.memory.req_to_token import ReqToTokenPool
from specengine.runner.attention.torch_backend import TorchAttentionBackend
from specengine.runner.loader.load import load_model
from specengine.runner.loader.loaded_model import LoadedModel
from specengine.runner.loader.source import resolve_model
from specengine.runner.memory.kv_shape import kv_shape_of
from specengine.runner.model_runner import MemoryPools, ModelRunner
from specengine.target.registry import find_model_class
from tests.draft.mtp_reading import FORMS, Reading, add_mtp

CPU = torch.device("cpu")
TOKENS = [(7 * i * i + 3 * i) % 300 for i in range(40)]
TARGETS = {"deepseek": "llama", "qwen3_next": "qwen3", "mimo": "qwen2", "ernie": "llama"}


def load_target(folder: Path, load_format: str = "auto", **spec: Any) -> DraftTarget:
    config = ModelConfig(model=str(folder), load_format=load_format)
    source = resolve_model(config)
    model: Any = load_model(source, find_model_class, torch.float32, CPU)
    loaded = LoadedModel(source, EngineConfig(model=replace(config, device="cpu")), model, None)
    options = SpecConfig(**{"algorithm": "MTP", "num_steps": 1, **spec})
    return DraftTarget(options, loaded, 512, torch.float32, find_model_class)


def load_models(folder: Path, **spec: Any) -> list[MtpModel]:
    models = load_mtp(load_target(folder, **spec)).models
    assert all(isinstance(model, MtpModel) for model in models)
    return cast(list[MtpModel], list(models))


class Runner:
    """Runs one MTP layer on one request, whose KV stays from call to call."""

    def __init__(self, model: MtpModel, kv_layers: int = 1) -> None:
        rows = ReqToTokenPool(1, 128, CPU)
        slots = torch.randperm(128, generator=torch.Generator().manual_seed(1)) + 1
        rows.req_to_token[0] = slots.to(torch.int32)
        shape = replace(kv_shape_of([model], torch.float32), num_layers=kv_layers, layer_ids=None)
        pools = MemoryPools(rows, MHATokenToKVPool(129, shape, CPU))
        self.runner = ModelRunner(model, CPU, pools, TorchAttentionBackend())
        self.length = 0

    def __call__(self, tokens: list[int], features: Tensor) -> tuple[Tensor, Tensor]:
        """States and logits of every row."""
        mode = ForwardMode.DECODE if len(tokens) == 1 else ForwardMode.DRAFT_EXTEND
        batch = ModelWorkerBatch(
            forward_mode=mode,
            input_ids=torch.tensor(tokens),
            req_pool_indices=[0],
            prefix_lens=[self.length],
            extend_lens=[len(tokens)],
            logits_rows=None,
            sampling=None,
        )
        self.length += len(tokens)
        on_device: ForwardBatch = self.runner.new_forward_batch(batch)
        on_device.features = features
        output = self.runner.forward(on_device)
        assert output.hidden is not None
        return output.hidden, output.logits


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == torch.float32
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5


@pytest.fixture(scope="module", params=[(form, TARGETS[form]) for form in FORMS], ids=FORMS)
def checkpoint(
    request: pytest.FixtureRequest,
    small_models: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, Path]:
    form, family = request.param
    return form, add_mtp(small_models[family], tmp_path_factory.mktemp(form), form)


def test_logits_equal_the_reading(checkpoint: tuple[str, Path]) -> None:
    form, folder = checkpoint
    reading = Reading.of(folder)
    hidden = reading.hidden(TOKENS[:-1])
    expected = reading.mtp(form, TOKENS[1:], hidden)
    [model] = load_models(folder)
    states, logits = Runner(model)(TOKENS[1:], hidden)
    assert_near(states, expected)
    assert_near(logits, reading.mtp_head(form, expected))


def test_rows_may_come_in_parts_and_continue_on_their_own_output(
    checkpoint: tuple[str, Path],
) -> None:
    """A prompt in two chunks, then two steps that each take the state of the step before."""
    form, folder = checkpoint
    reading = Reading.of(folder)
    hidden = reading.hidden(TOKENS[:-2])
    [model] = load_models(folder)
    runner = Runner(model)
    runner(TOKENS[1:11], hidden[:10])
    states, _ = runner(TOKENS[11:-2], hidden[10:-1])
    rows = hidden[:-1]
    for token in TOKENS[-2:]:
        rows = torch.cat([rows, states[-1:]])
        states, logits = runner([token], states[-1:])
    expected = reading.mtp(form, TOKENS[1:], rows)
    assert_near(states, expected[-1:])
    assert_near(logits, reading.mtp_head(form, expected[-1:]))


def test_fused_layer_equals_the_plain_one(
    checkpoint: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of a GPU with few rows, on the reference kernels."""
    monkeypatch.setattr("specengine.runner.loader.load.pack_linears", lambda *_: None)
    folder = checkpoint[1]
    hidden = Reading.of(folder).hidden(TOKENS[:9])
    [model] = load_models(folder)
    plain, _ = Runner(model)(TOKENS[1:10], hidden)
    monkeypatch.setattr("specengine.kernels.linear.few_row.fits", lambda *_: True)
    assert_near(Runner(model)(TOKENS[1:10], hidden)[0], plain)


def test_streamed_layer_equals_the_plain_one(
    checkpoint: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, of a wide model."""
    monkeypatch.setattr("specengine.runner.loader.load.pack_linears", lambda *_: None)
    folder, rows = checkpoint[1], list[int]()
    hidden = Reading.of(folder).hidden(TOKENS[:9])
    [model] = load_models(folder)
    plain, _ = Runner(model)(TOKENS[1:10], hidden)

    def tail(heads: Tensor, *given: Any) -> Tail:
        rows.append(len(heads))
        return layer_tail_ref.layer_tail(heads, *given)

    monkeypatch.setattr(layer_tail, "fits", lambda *_: True)
    monkeypatch.setattr(layer_tail_cuda, "layer_tail", tail)
    assert_near(Runner(model)(TOKENS[1:10], hidden)[0], plain)
    assert rows == [9]


@pytest.mark.parametrize("form", FORMS)
def test_every_layer_of_several_reads_its_own_weights(
    form: str, small_models: dict[str, Path], tmp_path: Path
) -> None:
    folder = add_mtp(small_models[TARGETS[form]], tmp_path, form, layers=3)
    reading = Reading.of(folder)
    hidden = reading.hidden(TOKENS[:-1])
    models = load_models(folder, num_steps=3)
    assert len(models) == 3
    for index, model in enumerate(models):
        expected = reading.mtp(form, TOKENS[1:], hidden, index)
        assert_near(Runner(model, kv_layers=3)(TOKENS[1:], hidden)[0], expected)


def test_tables_of_the_checkpoint_itself_come_before_the_targets(
    small_models: dict[str, Path], tmp_path: Path
) -> None:
    folder = add_mtp(small_models["llama"], tmp_path, "deepseek", own_tables=True)
    reading = Reading.of(folder)
    hidden = reading.hidden(TOKENS[:-1])
    expected = reading.mtp_head("deepseek", reading.mtp("deepseek", TOKENS[1:], hidden))
    [model] = load_models(folder)
    assert_near(Runner(model)(TOKENS[1:], hidden)[1], expected)


def test_tables_are_shared_where_the_checkpoint_has_none(checkpoint: tuple[str, Path]) -> None:
    target = load_target(checkpoint[1])
    target_model = cast(Any, target.loaded.model)
    [model] = cast(list[MtpModel], list(load_mtp(target).models))
    assert model.embed is target_model.embed
    assert model.head is target_model.head
