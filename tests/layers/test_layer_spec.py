"""A path refuses every layer that has what it does not compute: each field over each path."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, make_dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from specengine.core.errors import ModelLoadError
from specengine.core.parallel import split_over
from specengine.draft.eagle import layer as eagle
from specengine.draft.eagle.model import EagleModel
from specengine.draft.mtp.form import DEEPSEEK, MtpLayerName
from specengine.draft.mtp.model import MtpModel
from specengine.draft.train.layer import DraftLayer
from specengine.layers import compute_paths, decoder, head
from specengine.layers.compute_paths import (
    DRAFT_LAYER,
    FAST_HEADS,
    FAST_PATHS,
    FEW_ROWS,
    HEAD_LOGITS,
    LAYER_TAIL,
    MTP_LAYER,
    PLAIN,
    TRAINED_LAYER,
    WHOLE_STACK,
    ComputePath,
    log_refusals,
)
from specengine.layers.layer_spec import (
    ExpertsSpec,
    GatedDeltaSpec,
    HeadSpec,
    LatentSpec,
    LayerSpec,
)
from specengine.layers.linear import LMHead
from specengine.layers.query_temperature import QueryTemperature
from specengine.layers.rotary import RotaryEmbedding
from specengine.target.models.llama import LlamaForCausalLM
from tests.support.fast_paths import let_take, run_path
from tests.support.pretended_ranks import PretendedRanks
from tests.target.conftest import MiniRunner

CONFIG = LlamaConfig(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
SIZES = {
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "rms_norm_eps",
}
TOKENS = [[(7 * i * i + 3 * i) % 300 for i in range(12)], [5, 9, 301]]
# A field that is added, and that no path knows yet.
NovelLayer = make_dataclass("NovelLayer", [("novel", float, 1.0)], bases=(LayerSpec,), frozen=True)
NovelHead = make_dataclass("NovelHead", [("novel", float, 1.0)], bases=(HeadSpec,), frozen=True)


def features(kind: type) -> dict[str, Field[Any]]:
    return {one.name: one for one in fields(kind) if one.default is not MISSING}


LAYER_FIELDS, HEAD_FIELDS = features(NovelLayer), features(NovelHead)


KNOWN: dict[str, Any] = {
    "experts": ExpertsSpec(num_experts=4, num_chosen=2, intermediate_size=48),
    "gated_delta": GatedDeltaSpec(2, 4, key_dim=8, value_dim=8, conv_width=4),
    "query_temperature": QueryTemperature(step=4.0, scale=0.5),
    "latent": LatentSpec(kv_rank=24, nope_dim=8, rope_dim=8, value_dim=12, q_rank=20),
    "activation": "gelu_tanh",
    "norm": "layer",
    "norm_places": "around",
    "logits_softcap": 20.0,
}


def other_value(field: Field[Any]) -> Any:
    """One that is not the default."""
    if field.name in KNOWN:
        return KNOWN[field.name]
    if field.default is None:
        return 4 if field.type == "int | None" else 0.3
    values = {bool: not field.default, int: 2, float: 0.5, str: "other"}
    value = values[type(field.default)]
    assert value != field.default
    return value


def layer_with(name: str) -> LayerSpec:
    sizes = vars(LayerSpec.from_config(CONFIG))
    made: LayerSpec = NovelLayer(**{**sizes, name: other_value(LAYER_FIELDS[name])})
    return made


def head_with(name: str) -> HeadSpec:
    made: HeadSpec = NovelHead(**{name: other_value(HEAD_FIELDS[name])})
    return made


def model_of(*specs: LayerSpec) -> LlamaForCausalLM:
    class Family(LlamaForCausalLM):
        @classmethod
        def layer_specs(cls, config: Any) -> list[LayerSpec]:
            return list(specs)

    with split_over(PretendedRanks(specs[0].tp_size)):
        model = Family(CONFIG)
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.15)
    return model


def everything(path: ComputePath, kind: dict[str, Any]) -> ComputePath:
    return replace(path, computes=frozenset(kind))


@pytest.fixture
def _plain_computes_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a feature is added to the plain path alone."""
    monkeypatch.setattr(decoder, "PLAIN", everything(PLAIN, LAYER_FIELDS))
    monkeypatch.setattr(eagle, "DRAFT_LAYER", everything(DRAFT_LAYER, LAYER_FIELDS))
    monkeypatch.setattr(head, "HEAD_LOGITS", everything(HEAD_LOGITS, HEAD_FIELDS))


def test_only_sizes_have_no_default() -> None:
    """What has none is never refused."""
    assert {one.name for one in fields(LayerSpec)} - set(features(LayerSpec)) == SIZES
    assert all(one.default is not MISSING for one in fields(HeadSpec))


def test_paths_name_fields_that_exist() -> None:
    declared = [one for one in vars(compute_paths).values() if isinstance(one, ComputePath)]
    assert len(declared) == 13
    names = set(features(LayerSpec)) | set(features(HeadSpec))
    assert all(path.computes <= names for path in declared)
    assert all(path.computes <= PLAIN.computes for path in FAST_PATHS)


@pytest.mark.usefixtures("_plain_computes_everything")
@pytest.mark.parametrize("name", LAYER_FIELDS)
@pytest.mark.parametrize("path", FAST_PATHS, ids=lambda path: path.name)
def test_fast_path_takes_a_layer_only_with_what_it_declares(
    path: ComputePath, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(*[layer_with(name)] * 3)
    plain = run_path(MiniRunner(model), None, TOKENS, monkeypatch)
    found = run_path(MiniRunner(model), path, TOKENS, monkeypatch)
    assert found.was_taken == (name in path.computes)
    found.assert_near(plain)


@pytest.mark.parametrize("path", FAST_PATHS, ids=lambda path: path.name)
def test_fast_path_takes_layers_without_features(
    path: ComputePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the walk's refusals are those of the field."""
    model = model_of(*[LayerSpec.from_config(CONFIG)] * 3)
    plain = run_path(MiniRunner(model), None, TOKENS, monkeypatch)
    found = run_path(MiniRunner(model), path, TOKENS, monkeypatch)
    assert found.was_taken
    found.assert_near(plain)


@pytest.mark.parametrize(
    ("path", "name"), [(LAYER_TAIL, "o_bias"), (WHOLE_STACK, "sliding_window")]
)
def test_path_over_all_layers_is_refused_by_one(
    path: ComputePath, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = LayerSpec.from_config(CONFIG)
    model = model_of(usual, usual, replace(usual, **{name: other_value(LAYER_FIELDS[name])}))
    plain = run_path(MiniRunner(model), None, TOKENS, monkeypatch)
    found = run_path(MiniRunner(model), path, TOKENS, monkeypatch)
    assert not found.was_taken
    found.assert_near(plain)


def test_whole_stack_takes_only_equal_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = LayerSpec.from_config(CONFIG)
    model = model_of(usual, usual, replace(usual, attention_multiplier=0.4))
    plain = run_path(MiniRunner(model), None, TOKENS, monkeypatch)
    found = run_path(MiniRunner(model), WHOLE_STACK, TOKENS, monkeypatch)
    assert not found.was_taken
    found.assert_near(plain)


def test_one_model_has_one_stream() -> None:
    usual = LayerSpec.from_config(CONFIG)
    with pytest.raises(ValueError, match="one set of multipliers"):
        model_of(usual, usual, replace(usual, residual_multiplier=0.5))


MAKERS: dict[str, tuple[ComputePath, Callable[[LayerSpec], object]]] = {
    "target": (PLAIN, lambda spec: model_of(spec, spec, spec)),
    "MTP": (MTP_LAYER, lambda spec: MtpModel(CONFIG, spec, MtpLayerName(DEEPSEEK, 3))),
    "EAGLE": (DRAFT_LAYER, lambda spec: EagleModel(eagle_form(spec))),
    "training": (TRAINED_LAYER, lambda spec: DraftLayer(spec, 64, has_hidden_norm=False)),
}


def eagle_form(spec: LayerSpec) -> eagle.EagleForm:
    return eagle.EagleForm(CONFIG, spec, 320, 320, feature_size=64)


@pytest.mark.parametrize("name", LAYER_FIELDS)
@pytest.mark.parametrize("maker", MAKERS)
def test_layer_with_what_nothing_computes_is_not_made(maker: str, name: str) -> None:
    path, make = MAKERS[maker]
    spec = layer_with(name)
    with split_over(PretendedRanks(spec.tp_size)):
        if name in path.computes:
            make(spec)
        else:
            with pytest.raises(ModelLoadError, match=f"^{name} .* is not supported by {path.name}"):
                make(spec)


def test_layer_is_not_made_for_other_ranks_than_it_says() -> None:
    spec = LayerSpec.from_config(CONFIG)
    with split_over(PretendedRanks(2)), pytest.raises(ValueError, match="made on 2 ranks"):
        decoder.DecoderLayer(spec, 0, RotaryEmbedding.from_config(CONFIG))


@pytest.mark.usefixtures("_plain_computes_everything")
@pytest.mark.parametrize("name", LAYER_FIELDS)
@pytest.mark.parametrize(
    ("path", "way"), [(LAYER_TAIL, eagle.Way.TAIL), (FEW_ROWS, eagle.Way.FEW_ROWS)]
)
def test_eagle_layer_takes_a_fast_way_only_with_what_it_declares(
    path: ComputePath, way: eagle.Way, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_take(path, [], monkeypatch)
    spec = layer_with(name)
    with split_over(PretendedRanks(spec.tp_size)):
        layer = EagleModel(eagle_form(spec)).layer
    found = layer._way_of(torch.zeros(2, 64))
    assert found is (way if name in path.computes else eagle.Way.PLAIN)


@pytest.mark.usefixtures("_plain_computes_everything")
@pytest.mark.parametrize("name", HEAD_FIELDS)
@pytest.mark.parametrize("path", FAST_HEADS, ids=lambda path: path.name)
def test_fused_head_is_taken_only_with_what_it_declares(
    path: ComputePath, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    product, hidden, calls = LMHead(64, 200), torch.randn(3, 64), list[object]()
    nn.init.normal_(product.plain)
    let_take(path, calls, monkeypatch)
    made = head.Head(product, head_with(name))
    logits = made.logits(hidden)
    assert torch.equal(made.best(hidden), logits.argmax(-1))
    top = made.top(hidden, 4)
    if top is not None:
        torch.testing.assert_close(top.log_sums(), logits.logsumexp(-1))
        assert torch.equal(top.best()[0], logits.topk(4).indices)
    assert bool(calls) == (name in path.computes)


@pytest.mark.parametrize("name", HEAD_FIELDS)
def test_head_with_what_nothing_computes_is_not_made(name: str) -> None:
    if name in HEAD_LOGITS.computes:
        head.Head(LMHead(8, 4), head_with(name))
    else:
        with pytest.raises(ModelLoadError, match=f"^{name} .* is not supported by the head"):
            head.Head(LMHead(8, 4), head_with(name))


@pytest.mark.parametrize("multiplier", [0.0, -1.0, float("nan")])
def test_multiplier_of_logits_keeps_their_order(multiplier: float) -> None:
    with pytest.raises(ModelLoadError, match="it must be positive"):
        HeadSpec(multiplier)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_refused_paths_are_logged_with_the_field(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    usual = LayerSpec.from_config(CONFIG)
    with caplog.at_level(logging.INFO):
        log_refusals(FAST_PATHS, [usual, replace(usual, mlp_bias=True)], torch.device(device))
        log_refusals(FAST_HEADS, [HeadSpec(0.5)], torch.device(device))
    expected = [
        "no fast path few_row: it does not compute mlp_bias True",
        "no fast path layer_tail: it does not compute mlp_bias True",
        "no fast path decoder_stack: it does not compute mlp_bias True",
        "no fast path head_topk: it does not compute logits_multiplier 0.5",
    ]
    found = [record.getMessage() for record in caplog.records]
    assert found == (expected if device == "cuda" else [])
