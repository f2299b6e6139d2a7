"""Engines in pairs: rounds of the host, and rounds on the device that must do the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from specengine import LLM, SamplingParams, SpecConfig
from specengine.engine.llm import Generation
from specengine.engine.round.executor import RoundExecutor
from tests.support.device_rounds import run_on_device
from tests.support.rounds import CONTEXT, MANY, NOT_READY, assert_close, make, summary

NEARLY_FULL = "memory nearly full"  # or the context: nodes of a tree need a slot each


def flags(**more: Any) -> dict[str, Any]:
    return {"context_length": CONTEXT, "max_running_requests": 8} | more


def pair_of(
    folder: Path,
    spec: SpecConfig | None,
    overlaps: bool = True,
    sizes: Sequence[int] = (1, 2, 8),
    **more: Any,
) -> tuple[LLM, LLM, RoundExecutor]:
    """On a CPU, an engine of host rounds, one of device rounds, and these. sizes: requests of a
    round."""
    host, llm = (make(folder, spec, **flags(**more)) for _ in range(2))
    return host, llm, run_on_device(llm, overlaps, sizes)


def pair_on_gpu(
    folder: Path, spec: SpecConfig | None, overlaps: bool = True, **more: Any
) -> tuple[LLM, LLM]:
    """Without graphs, and with them."""
    more |= {"disable_radix_cache": True, "disable_overlap_schedule": not overlaps}
    host = make(folder, spec, disable_cuda_graph=True, **flags(**more))
    return host, make(folder, spec, **flags(**more))


def check(
    host: LLM,
    llm: LLM,
    params: Sequence[SamplingParams],
    prompts: Sequence[str | list[int]] = MANY,
) -> list[Generation]:
    """Tokens, ends, accepted drafts, rounds and logprobs are the same. prompts: of the params in
    turn."""
    given = [prompts[i % len(prompts)] for i in range(len(params))]
    found, expected = llm.generate(given, [*params]), host.generate(given, [*params])
    assert summary(found) == summary(expected)
    for one, other, wanted in zip(found, expected, params, strict=True):
        mine, its = (each.completions[0].logprobs for each in (one, other))
        count = 0 if wanted.logprobs is None else len(one.token_ids)
        assert [len(mine), len(its)] == [count] * 2
        assert_close(mine, its)
    llm.engine.scheduler.check_invariant()
    return found


def check_in_interpreter(
    host: LLM,
    llm: LLM,
    params: Sequence[SamplingParams],
    prompts: Sequence[str | list[int]],
    modules: Sequence[ModuleType],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `check`, with the Triton kernels of these modules on the device's side."""
    pytest.importorskip("triton")
    expected = summary(host.generate([*prompts], [*params]))
    for module in modules:
        monkeypatch.setattr(module, "use_triton", lambda backend, x: True)
    assert summary(llm.generate([*prompts], [*params])) == expected


def assert_replayed(llm: LLM, least: int) -> None:
    """On a GPU: more than so many rounds, and all but those near the context's end."""
    stats = llm.engine.stats().graphs["round"]
    assert stats.fallbacks.keys() <= {NEARLY_FULL, NOT_READY}, stats
    assert stats.replays > least, stats
