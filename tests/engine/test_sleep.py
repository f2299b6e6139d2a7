"""An engine that has slept says what it would have said."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from specengine import LLM
from specengine.core.errors import ConfigError, EngineAsleepError, ModelLoadError, RequestError
from specengine.engine.async_engine import AsyncEngine
from specengine.layers.in_place import weights_of
from tests.engine.test_new_weights import (
    FLAGS,
    GREEDY,
    PROMPTS,
    SAMPLED,
    SPECS,
    TINY,
    answers,
    eagle_directory,
    noisy,
    shaken,
)
from tests.halves import each_value
from tests.support.rounds import ON_GPU

SLEEPY: dict[str, Any] = {**FLAGS, "enable_sleep_mode": True}


def weights(llm: LLM) -> list[torch.Tensor]:
    model: Any = llm.engine.parts.worker.runner.model
    return [one for one in weights_of(model) if one.nbytes > 16384]


@pytest.mark.parametrize(("name", "level"), each_value(1, ["plain", "EAGLE3"], [1, 2]))
def test_same_tokens_after_sleep(name: str, level: int) -> None:
    llm = LLM(TINY, SPECS[name], **SLEEPY)
    before = [answers(llm), answers(llm, SAMPLED)]
    for _ in range(2):
        assert llm.sleep(level) > 0
        page = weights(llm)[0].flatten()[2048:2560]
        assert not page.any(), "the memory was given back"
        llm.wake()
        assert page.any()
        assert [answers(llm), answers(llm, SAMPLED)] == before


@pytest.mark.parametrize("name", SPECS)
def test_unfinished_requests_wait_and_go_on(name: str) -> None:
    llm = LLM(TINY, SPECS[name], **SLEEPY)
    expected = answers(llm)
    found: dict[str, list[int]] = {}
    for index, text in enumerate(PROMPTS):
        prompt = list(llm.tokenizer(text)["input_ids"])
        llm.engine.add_request(str(index), prompt, GREEDY)
    for _ in range(4):
        found |= {one.rid: one.token_ids for one in llm.engine.step()}
    assert 0 < len(found["0"]) < GREEDY.max_tokens  # type: ignore[operator]
    llm.sleep()
    assert not llm.engine.has_work
    assert llm.engine.step() == []
    with pytest.raises(EngineAsleepError, match="wake_up"):
        llm.generate(PROMPTS, GREEDY)
    with pytest.raises(EngineAsleepError):
        llm.update_weights(TINY)
    assert llm.sleep(2) == 0, "it sleeps already"
    llm.wake()
    while llm.engine.has_work:
        found |= {one.rid: one.token_ids for one in llm.engine.step()}
    assert [found["0"], found["1"]] == expected
    llm.engine.scheduler.check_invariant()


def test_weights_packed_for_a_cpu_sleep_and_wake() -> None:
    """Of opaque tensors there is no memory to give back."""
    llm = LLM(TINY, **{**SLEEPY, "dtype": "bfloat16", "quantization": "int8"})
    expected = answers(llm)
    for level in (1, 2):
        assert llm.sleep(level) > 0
        llm.wake()
        assert answers(llm) == expected


def test_request_that_is_aborted_in_sleep_is_gone_afterwards() -> None:
    llm = LLM(TINY, **SLEEPY)
    expected = answers(llm)
    llm.engine.add_request("gone", [5, 9, 7], GREEDY)
    llm.engine.step()
    llm.sleep()
    llm.engine.abort("gone")
    llm.wake()
    assert not llm.engine.has_work
    assert answers(llm) == expected


def test_engine_without_the_flag_does_not_sleep() -> None:
    llm = LLM(TINY, **FLAGS)
    llm.wake()
    with pytest.raises(ConfigError, match="--enable-sleep-mode"):
        llm.sleep()
    with pytest.raises(ConfigError, match="levels 1 and 2"):
        LLM(TINY, **SLEEPY).sleep(3)


def test_updated_weights_are_those_that_wake(tmp_path: Path) -> None:
    llm = LLM(TINY, SPECS["EAGLE3"], **SLEEPY)
    assert llm.engine.weights is not None
    source = llm.engine.weights.loaded.source.directory
    assert source is not None
    other = noisy(source, tmp_path / "other", shaken)
    llm.update_weights(str(other))
    expected = answers(llm)
    for level in (1, 2):
        llm.sleep(level)
        llm.wake()
        assert answers(llm) == expected
    (file,) = other.glob("*.safetensors")
    llm.update_weights_from_tensors(load_file(file))
    with pytest.raises(ConfigError, match="level 1"):
        llm.sleep(2)
    assert answers(llm) == expected
    llm.sleep(1)
    llm.wake()
    assert answers(llm) == expected


def test_engine_whose_weights_cannot_be_read_again_sleeps_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = LLM(TINY, **SLEEPY)
    expected, running = answers(llm), llm.engine.weights
    assert running is not None
    llm.sleep(2)
    with monkeypatch.context() as patch:
        patch.setattr(running, "read_again", lambda: (_ for _ in ()).throw(ModelLoadError("gone")))
        with pytest.raises(ModelLoadError):
            llm.wake()
    assert llm.engine.sleeper.is_asleep
    assert not weights(llm)[0].flatten()[2048:2560].any()
    llm.wake()
    assert answers(llm) == expected


def test_weights_that_cannot_be_read_again_for_any_reason_refuse_to_wake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any other error would end an engine that serves."""
    llm = LLM(TINY, **SLEEPY)
    expected, running = answers(llm), llm.engine.weights
    llm.sleep(2)
    with monkeypatch.context() as patch:
        patch.setattr(running, "_target", lambda source: 1 // 0)
        with pytest.raises(ModelLoadError, match="ZeroDivisionError"):
            llm.wake()
    assert llm.engine.sleeper.is_asleep
    llm.wake()
    assert answers(llm) == expected


def test_drafter_that_came_with_the_target_is_the_one_that_wakes(tmp_path: Path) -> None:
    """Not another that ran before it."""
    llm = LLM(TINY, SPECS["EAGLE3"], **SLEEPY)
    running = llm.engine.weights
    assert running is not None
    source = running.loaded.source.directory
    assert source is not None
    (draft,) = cast(tuple[nn.Module, ...], running.draft.models)
    llm.update_weights(draft_model=str(noisy(eagle_directory(), tmp_path / "draft", shaken)))
    llm.update_weights(str(noisy(source, tmp_path / "target", shaken)))
    before = {name: one.clone() for name, one in draft.named_parameters()}
    llm.sleep(2)
    llm.wake()
    assert all(torch.equal(one, before[name]) for name, one in draft.named_parameters())


def test_callers_of_a_sleeping_engine_are_told_so() -> None:
    """What comes while it sleeps is refused; what came before is answered after it wakes."""
    llm = LLM(TINY, **SLEEPY)
    expected = answers(llm)
    ids = [list(llm.tokenizer(text)["input_ids"]) for text in PROMPTS]
    engine = AsyncEngine(llm.engine)

    async def tokens(index: int) -> list[int]:
        outputs = [one async for one in engine.generate(ids[index], GREEDY, f"r{index}")]
        return outputs[-1].token_ids

    async def talk() -> None:
        early = asyncio.create_task(tokens(0))
        await asyncio.sleep(0)
        assert await engine.sleep(1) > 0
        assert await engine.is_sleeping()
        with pytest.raises(EngineAsleepError):
            await tokens(1)
        assert not early.done()
        await engine.wake()
        assert not await engine.is_sleeping()
        assert [await early, await tokens(1)] == expected
        with pytest.raises(RequestError, match="levels"):
            await engine.sleep(7)

    try:
        asyncio.run(talk())
    finally:
        engine.shutdown()


@pytest.mark.parametrize(
    ("name", "level"),
    [pytest.param(name, level, marks=ON_GPU) for name in ("plain", "EAGLE3") for level in (1, 2)],
)
def test_captured_graphs_are_valid_after_sleep(name: str, level: int) -> None:
    pytest.importorskip("torch_memory_saver")
    flags = {**SLEEPY, "device": "cuda", "cuda_graph_bs": (1, 2), "debug_cuda_graph": True}
    llm = LLM(TINY, SPECS[name], **flags)
    before, rounds = [answers(llm), answers(llm, SAMPLED)], llm.engine.device_rounds
    assert rounds is not None
    captures, replays = rounds.counters["captures"], rounds.counters["replays"]
    free = torch.cuda.mem_get_info()[0]
    given = llm.sleep(level)
    assert given > 0
    if "PYTEST_XDIST_WORKER" not in os.environ:  # other tests would use the card meanwhile
        assert torch.cuda.mem_get_info()[0] - free >= given
    llm.wake()
    assert [answers(llm), answers(llm, SAMPLED)] == before
    assert rounds.counters["captures"] == captures
    assert rounds.counters["replays"] > replays


def test_tensors_of_the_region_are_all_that_models_hold() -> None:
    llm = LLM(TINY, SPECS["EAGLE3"], **SLEEPY)
    model: Any = llm.engine.parts.worker.runner.model
    assert isinstance(model, nn.Module)
    found = {one.data_ptr() for one in llm.engine.sleeper._tensors()}
    wanted = {one.data_ptr() for one in model.parameters()}
    kv = llm.engine.parts.worker.runner.pools.token_to_kv_pool
    wanted |= {kv.get_kv_buffer(0)[0].data_ptr()}
    assert wanted <= found
