"""Hooks see what layers give, in copies, whatever would have run in a graph."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine import LLM, SpecConfig
from specengine.core.errors import ConfigError
from specengine.core.forward_mode import ForwardMode
from specengine.runner.fallbacks import HOOKED
from specengine.runner.layer_hooks import LayerOutput
from tests.support.fake_platform import use_fake_platform
from tests.support.rounds import GREEDY, ON_CPU, ON_GPU, PROMPTS, make


def tokens(llm: LLM) -> list[list[int]]:
    return [one.token_ids for one in llm.generate(PROMPTS[:2], GREEDY)]


def eagle3(drafters: dict[str, str]) -> SpecConfig:
    path = drafters["EAGLE3"]
    return SpecConfig(algorithm="EAGLE3", adaptive=False, draft_model_path=path, num_steps=2)


@ON_CPU
def test_hooks_see_each_layer_and_change_nothing(target: Path, drafters: dict[str, str]) -> None:
    """The drafter reads features of layers, which stay its own."""
    llm = make(target, eagle3(drafters), device="cpu")
    expected, seen = tokens(llm), list[LayerOutput]()

    def spoil(output: LayerOutput) -> None:
        seen.append(LayerOutput(**{**asdict(output), "hidden_TH": output.hidden_TH.clone()}))
        for one in (output.hidden_TH, output.tokens_T, output.positions_T, output.starts):
            one.zero_()

    first, second = llm.add_layer_hook("layers.*", spoil), llm.add_layer_hook("layers.1", spoil)
    assert llm.engine.stats().layer_hooks == ("layers.*", "layers.1")
    llm.engine.flush_cache()
    assert tokens(llm) == expected
    layers = llm.engine.parts.worker.runner.model.num_layers
    per_forward = layers + 1
    assert len(seen) % per_forward == 0
    names = [one.layer for one in seen[:per_forward]]
    assert names == ["layers.0", "layers.1", *[f"layers.{n}" for n in range(1, layers)]]
    assert torch.equal(seen[1].hidden_TH, seen[2].hidden_TH), "a copy each"
    assert {one.mode for one in seen} >= {ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY}
    ids = [token for text in PROMPTS[:2] for token in llm.tokenizer(text)["input_ids"]]
    assert seen[0].tokens_T.tolist() == ids
    assert seen[0].starts[-1] == len(ids) == len(seen[0].hidden_TH)
    for one in (first, second, second):
        one.remove()
    assert llm.engine.stats().layer_hooks == ()
    count = len(seen)
    assert tokens(llm) == expected
    assert len(seen) == count


@ON_CPU
def test_what_hooks_see_is_what_the_model_computes(target: Path) -> None:
    """Behind the last layer, the norm and the head give the logits that were sampled."""
    llm = make(target, None, device="cpu")
    model: Any = llm.engine.parts.worker.runner.model
    last, found = model.num_layers - 1, list[int]()

    def read(output: LayerOutput) -> None:
        rows = output.hidden_TH[output.starts[1:] - 1]
        found.append(int(model.head.logits(model.model.norm(rows)).argmax(-1)[0]))

    llm.add_layer_hook(f"layers.{last}", read)
    (one,) = llm.generate(PROMPTS[:1], GREEDY)
    assert found == one.token_ids


def assert_hooks_keep_graphs_out(llm: LLM) -> None:
    rounds, seen = llm.engine.device_rounds, list[str]()
    assert rounds is not None
    expected, replays = tokens(llm), rounds.counters["replays"]
    hook = llm.add_layer_hook("layers.0", lambda output: seen.append(output.layer))
    llm.engine.flush_cache()
    assert tokens(llm) == expected
    stats = llm.engine.stats().graphs
    assert stats["round"].replays == replays
    assert stats["round"].fallbacks[HOOKED] > 3
    assert stats["prefill"].fallbacks[HOOKED] > 0
    assert len(seen) > stats["round"].fallbacks[HOOKED]
    assert not llm.engine.use_idle_moment(), "no capture either"
    hook.remove()
    assert tokens(llm) == expected
    assert rounds.counters["replays"] > replays


@ON_CPU
def test_graphs_of_a_fake_accelerator_do_not_run_beside_hooks(
    target: Path, drafters: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_fake_platform(monkeypatch)
    spec = eagle3(drafters)
    assert_hooks_keep_graphs_out(make(target, spec, device="cpu", cuda_graph_bs=(1, 2)))


@pytest.mark.parametrize("_", [pytest.param(None, marks=ON_GPU)])
def test_graphs_do_not_run_beside_hooks(_: None, target: Path, drafters: dict[str, str]) -> None:
    assert_hooks_keep_graphs_out(make(target, eagle3(drafters), cuda_graph_bs=(1, 2)))


@ON_CPU
def test_pattern_without_a_layer_is_refused(target: Path) -> None:
    llm = make(target, None, device="cpu")
    with pytest.raises(ConfigError, match=r"layers\.0 to layers\."):
        llm.add_layer_hook("layer.0", print)
    assert llm.engine.stats().layer_hooks == ()
