"""Rounds whose layers go through torch.compile, up to a batch size: outputs stay the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specengine import LLM, SamplingParams
from specengine.layers import decoder
from specengine.layers.decoder import DecoderLayer
from specengine.runner.loader import load
from tests.device import DEVICE
from tests.support.device_rounds import chain_of, run_on_device
from tests.support.fake_platform import use_fake_platform
from tests.support.rounds import ON_CPU, PROMPTS

GREEDY = SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.0)
ON_GPU = DEVICE.type == "cuda"


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every call of a compiled layer. On a CPU, without a graph's compiler."""
    if not ON_GPU:
        monkeypatch.setattr(load, "pack_linears", lambda *_: None)

        def traced(function: Callable[..., Any]) -> Callable[..., Any]:
            return torch.compile(function, backend="aot_eager", dynamic=True)

        monkeypatch.setattr(decoder, "compiled", traced)
    run, seen = DecoderLayer.forward_compiled, list[int]()

    def counted(self: DecoderLayer, positions: Tensor, hidden: Tensor, *given: Any) -> Any:
        seen.append(len(hidden))
        return run(self, positions, hidden, *given)

    monkeypatch.setattr(DecoderLayer, "forward_compiled", counted)
    return seen


@pytest.mark.parametrize("name", ["plain", "EAGLE3"])
def test_compiled_layers_change_no_token(
    name: str,
    target: Path,
    drafters: dict[str, str],
    rows: list[int],
) -> None:
    """Four requests are above the limit of two, and run as without."""
    spec, found = chain_of(name, drafters), []
    for limit in (0, 2):
        given: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 2048}
        if ON_GPU:
            compile_it = {"enable_torch_compile": limit > 0, "torch_compile_max_bs": max(limit, 1)}
            llm = LLM(str(target), spec, **given, **compile_it)
        else:
            llm = LLM(str(target), spec, device="cpu", **given)
            llm.engine.parts.worker.runner.compile_max_bs = limit
            run_on_device(llm)
        few = llm.generate(PROMPTS[:1], GREEDY, progress=False)
        assert bool(rows) == (limit > 0)
        assert set(rows) <= ({1, 2} if spec is None else {1, 2, 4, 8})
        rows.clear()
        found.append([*few, *llm.generate(PROMPTS, GREEDY, progress=False)])
        rows.clear()
    assert [one.token_ids for one in found[1]] == [one.token_ids for one in found[0]]


@ON_CPU
def test_draft_models_are_compiled_and_guarded_as_the_target(
    target: Path, drafters: dict[str, str], rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_fake_platform(monkeypatch)
    flags: dict[str, Any] = {"enable_torch_compile": True, "torch_compile_max_bs": 1}
    flags |= {"debug_cuda_graph": True, "cuda_graph_bs": (2,), "max_total_tokens": 2048}
    spec = chain_of("EAGLE3", drafters)
    llm = LLM(str(target), spec, device="cpu", dtype="float32", **flags)
    drafter: Any = llm.engine.drafter
    for runner in (llm.engine.parts.worker.runner, *drafter.runners):
        assert (runner.guards_graphs, runner.compile_max_bs) == (True, 1)
    assert not rows, "the captured batch is larger"
