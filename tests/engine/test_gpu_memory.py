"""Memory of an engine on a GPU: what was planned, and no more with time."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from specengine import LLM, SamplingParams, SpecConfig
from specengine.engine.loop import Engine
from tests.support.rounds import ON_GPU

pytestmark = ON_GPU

EAGLE3 = SpecConfig(algorithm="EAGLE3", adaptive=False, num_steps=3)


def run(llm: LLM, count: int, max_tokens: int) -> list[list[int]]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    prompts = [[5 + i, 6, 7, 8 + i] * 4 for i in range(count)]
    return [one.token_ids for one in llm.generate(prompts, params, progress=False)]


def rounds(engine: Engine) -> int:
    assert engine.device_rounds is not None
    return engine.device_rounds.counters["replays"]


def test_kv_takes_as_much_memory_as_the_formula() -> None:
    """135M: 30 layers, K and V, 3 heads of 64, 2 bytes. What is made once in a process, like the
    workspaces of cuBLAS, belongs to the first engine, which does not count."""
    more, taken = 100_000, []
    for tokens in (more, more, 2 * more):
        gc.collect()
        before = torch.cuda.memory_allocated()
        llm = LLM("smollm2-shape", load_format="dummy", max_total_tokens=tokens, cuda_graph_bs=(1,))
        taken.append(torch.cuda.memory_allocated() - before)
        del llm
        gc.collect()
        torch.cuda.empty_cache()
    assert (taken[2] - taken[1]) / more == pytest.approx(30 * 2 * 3 * 64 * 2, rel=0.03)


def test_memory_does_not_grow_over_5000_rounds() -> None:
    llm = LLM("tiny", EAGLE3, max_total_tokens=4096, cuda_graph_bs=(1, 4))
    free = llm.engine.scheduler.num_free_slots
    run(llm, 4, 400)
    torch.cuda.synchronize()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    begun = rounds(llm.engine)
    while rounds(llm.engine) - begun < 5000:
        run(llm, 4, 400)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= allocated + (1 << 20)
    assert torch.cuda.memory_reserved() <= reserved
    assert llm.engine.scheduler.num_free_slots == free
    llm.engine.scheduler.check_invariant()


@pytest.mark.parametrize("slots", [150, 230, 400])
def test_small_pool_changes_no_token(slots: int) -> None:
    """Requests wait, are retracted and come back; their tokens stay the same."""
    flags = {"dtype": "float32", "cuda_graph_bs": (1, 2, 4, 8)}
    expected = run(LLM("tiny", None, max_total_tokens=4096, **flags), 6, 90)
    tight = LLM("tiny", EAGLE3, max_total_tokens=slots, **flags)
    assert run(tight, 6, 90) == expected
    tight.engine.scheduler.check_invariant()


def test_paused_drafter_changes_no_token(tmp_path: Path) -> None:
    """Drafts never pay: the drafter pauses, resumes, and is tried again."""
    table = tmp_path / "costs.json"
    table.write_text('{"seconds": {"1": {"0": 0.001, "3": 0.1}, "4": {"0": 0.001, "3": 0.1}}}')
    spec = SpecConfig(algorithm="EAGLE3", num_steps=3, adaptive=True, cost_table=str(table))
    flags = {"dtype": "float32", "max_total_tokens": 4096, "cuda_graph_bs": (1, 4)}
    expected = run(LLM("tiny", None, **flags), 3, 400)
    paused = LLM("tiny", spec, **flags)
    assert run(paused, 3, 400) == expected
    assert paused.engine.pipeline is not None
    assert paused.engine.pipeline.depths.pause is not None
    decision = paused.engine.stats().depth
    assert decision is not None
    assert decision.num_steps == 0
