"""A family that only scales is one class: Granite, as an outsider would add it, on every path."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from specengine.core.batch import ForwardMode
from specengine.core.config import ModelConfig
from specengine.draft.eagle.layer import EagleForm
from specengine.draft.eagle.model import EagleModel
from specengine.layers.compute_paths import FAST_HEADS, FAST_PATHS, HEAD_BEST, ComputePath
from specengine.layers.layer_spec import LayerSpec, Multipliers
from specengine.runner.loader.load import load_model
from specengine.runner.loader.source import resolve_model
from specengine.target.models.llama import LlamaForCausalLM
from tests.support.fast_paths import FEATURE_LAYERS, Forward, let_take, run_path

PROMPT = [(7 * i * i + 3 * i) % 300 for i in range(40)]
CPU = torch.device("cpu")


class GraniteLike(LlamaForCausalLM):
    """All that its file in target/models/ would hold."""

    @classmethod
    def multipliers(cls, config: Any) -> Multipliers:
        return Multipliers(
            embedding=config.embedding_multiplier,
            residual=config.residual_multiplier,
            attention=config.attention_multiplier,
            logits=1 / config.logits_scaling,
        )


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(5)
    config = transformers.GraniteConfig(
        architectures=["GraniteForCausalLM"],
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.12,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.4,
        logits_scaling=6.0,
        rms_norm_eps=0.05,  # large enough to show where it is wrong
        tie_word_embeddings=request.param,
    )
    model = transformers.GraniteForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    folder = tmp_path_factory.mktemp("granite")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(params=[False, True], ids=["as on a GPU", "packed"])
def is_packed(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def load(folder: Path, monkeypatch: pytest.MonkeyPatch, is_packed: bool = False) -> Any:
    """Its weights as a GPU keeps them, or packed for a CPU."""
    if not is_packed:
        monkeypatch.setattr("specengine.runner.loader.load.pack_linears", lambda *_: None)
    source = resolve_model(ModelConfig(model=str(folder)))
    assert source.architectures == ["GraniteForCausalLM"]
    return load_model(source, lambda _: GraniteLike, torch.float32, CPU)


def reference(folder: Path) -> tuple[Forward, Tensor]:
    """A forward of transformers, and its logits [T, V]."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert isinstance(model, transformers.GraniteForCausalLM)
    with torch.no_grad():
        out = model(torch.tensor([PROMPT]), output_hidden_states=True)
    behind = [out.hidden_states[1 + layer][0] for layer in FEATURE_LAYERS]
    return Forward(out.hidden_states[-1][0], behind, True), out.logits[0]


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert float((found - expected).abs().max() / expected.abs().max()) < 2e-5


def test_plain_path_equals_transformers(
    folder: Path, is_packed: bool, mini_runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(folder, monkeypatch, is_packed)
    expected, logits = reference(folder)
    found = run_path(mini_runner(model), None, [PROMPT], monkeypatch)
    found.assert_near(expected, 2e-5)
    assert_near(model.head.logits(found.hidden), logits)


@pytest.mark.parametrize("path", FAST_PATHS, ids=lambda path: path.name)
def test_fast_path_equals_transformers(
    path: ComputePath, folder: Path, mini_runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(folder, monkeypatch)
    expected, logits = reference(folder)
    found = run_path(mini_runner(model), path, [PROMPT], monkeypatch)
    assert found.was_taken
    found.assert_near(expected, 2e-5)
    assert_near(model.head.logits(found.hidden), logits)


def test_decode_equals_transformers(
    folder: Path, mini_runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = mini_runner(load(folder, monkeypatch))
    parts = [runner.logits(ForwardMode.EXTEND, [PROMPT[:30]])]
    parts += [runner.logits(ForwardMode.DECODE, [[token]]) for token in PROMPT[30:]]
    assert_near(torch.cat(parts), reference(folder)[1])


@pytest.mark.parametrize("path", FAST_HEADS, ids=lambda path: path.name)
def test_fused_head_equals_transformers(
    path: ComputePath, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best token is the kernel's; the candidates are left to the scaled logits."""
    head, calls = load(folder, monkeypatch).head, list[object]()
    forward, logits = reference(folder)
    let_take(path, calls, monkeypatch)
    assert torch.equal(head.best(forward.hidden), logits.argmax(-1))
    assert head.top(forward.hidden, 4) is None
    assert bool(calls) == (path is HEAD_BEST)


def test_draft_borrows_the_embedding_unscaled_and_the_head_scaled(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load(folder, monkeypatch)
    ids = torch.tensor([3, 4, 100, 319])
    config = SimpleNamespace(**target.config.to_dict())
    form = EagleForm(config, LayerSpec.from_config(config), 320, len(ids), feature_size=64)
    draft = EagleModel(form)
    draft.set_target_ids(ids - torch.arange(len(ids)))
    draft.share(target.embed, target.head)
    forward, logits = reference(folder)
    assert_near(draft.head.logits(forward.hidden), logits[:, ids])
    assert torch.equal(draft.head.best(forward.hidden), ids[logits[:, ids].argmax(-1)])
    table = transformers.AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings()
    assert torch.equal(draft.embed(ids), table.weight[ids].float())
