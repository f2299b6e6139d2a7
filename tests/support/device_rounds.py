"""Whole engines whose rounds run on the device's path on a CPU: nothing is captured, and nothing is
late."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.platforms.cpu import Passed
from specengine.draft.worker import DraftWorker
from specengine.engine.pipeline import RoundPipeline
from specengine.engine.round.build import compose, drafted_by, make_rule
from specengine.engine.round.executor import RoundExecutor
from tests.support.cpu_graphs import Function
from tests.support.device_lengths import DeviceLengths
from tests.support.rounds import make


def chain_of(name: str, drafters: dict[str, str]) -> SpecConfig | None:
    """Three steps, always; None is plain decoding."""
    if name == "plain":
        return None
    path = drafters[name]
    return SpecConfig(algorithm=name, adaptive=False, draft_model_path=path, num_steps=3)


def prepare_drafter(llm: LLM) -> None:
    """Attention and drafters as rounds on the device need them. Before any request."""
    parts = llm.engine.parts
    inner = getattr(parts.drafter, "inner", parts.drafter)
    if isinstance(inner, DraftWorker):
        inner.device_rounds = True
    for runner in (parts.worker.runner, *getattr(inner, "runners", ())):
        runner.attn_backend = DeviceLengths(torch.device("cpu"))


def make_eager_rounds(
    llm: LLM, sizes: Sequence[int] = (1, 2, 4), chooses: bool = False
) -> RoundExecutor:
    """sizes: requests of a round. chooses: depths may be chosen, and the drafter may pause where it
    can. Raises HostRoundsError."""
    parts = llm.engine.parts
    runner = parts.worker.runner
    drafted = drafted_by(parts.drafter, max(sizes), runner.device, chooses)
    rule = make_rule(parts.verifier, parts.drafter)
    may_pause = chooses and parts.drafter.can_pause
    return without_graphs(compose(runner, drafted, rule, list(sizes), may_pause=may_pause))


def without_graphs(rounds: RoundExecutor) -> RoundExecutor:
    """Rounds run operator by operator."""
    rounds.record = run_again
    return rounds


def run_again(parts: Sequence[Callable[[], object]]) -> list[Function]:
    """In place of captures: each part runs once, as before a capture, and at each replay."""
    for part in parts:
        part()
    return [Function(part, None) for part in parts]


def run_on_device(
    llm: LLM, overlaps: bool = True, sizes: Sequence[int] = (1, 2, 4)
) -> RoundExecutor:
    """From now on. Before any request."""
    prepare_drafter(llm)
    parts, rounds = llm.engine.parts, make_eager_rounds(llm, sizes)
    llm.engine.pipeline = RoundPipeline(rounds, parts.drafter, parts.scheduler, None, overlaps)
    return rounds


def make_on_device(
    where: str,
    target: Path,
    spec: SpecConfig | None,
    overlaps: bool = True,
    sizes: Sequence[int] = (1, 2, 4),
    **flags: Any,
) -> tuple[LLM, RoundExecutor]:
    """An engine whose rounds run on the device: on a "cpu" without graphs, on a "gpu" as captured.
    sizes: requests of a round."""
    if where == "cpu":
        llm = make(target, spec, **flags)
        return llm, run_on_device(llm, overlaps, sizes)
    flags |= {"cuda_graph_bs": tuple(sizes), "disable_overlap_schedule": not overlaps}
    llm = make(target, spec, **flags)
    assert llm.engine.device_rounds is not None
    return llm, llm.engine.device_rounds


def come_and_go(
    host: LLM,
    llm: LLM,
    prompts: Sequence[str | list[int]],
    params: Sequence[SamplingParams],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever runs around it, on the device or not, a seed's text is what it is in a batch of the
    host, and of two what it is alone there. prompts: of the params in turn."""
    runs_on_device, draw = llm.engine._runs_on_device, random.Random(2)
    monkeypatch.setattr(
        llm.engine,
        "_runs_on_device",
        lambda *given: draw.random() < 0.8 and runs_on_device(*given),
    )
    found, waiting = dict[str, list[int]](), draw.sample(range(len(params)), len(params))
    while waiting or llm.engine.has_work:
        if waiting and draw.random() < 0.4:
            number = waiting.pop()
            given = prompts[number % len(prompts)]
            ids = llm.tokenizer.encode(given) if isinstance(given, str) else given
            llm.engine.add_request(str(number), ids, params[number])
        found |= {one.rid: one.token_ids for one in llm.engine.step()}
        llm.engine.scheduler.check_invariant()
    asked = [one for one, _ in zip(cycle(prompts), params, strict=False)]
    together = [one.token_ids for one in host.generate(asked, params)]
    assert found == {str(number): one for number, one in enumerate(together)}
    few = (0, len(params) // 2)
    alone = [host.generate([asked[n]], [params[n]])[0].token_ids for n in few]
    assert alone == [together[n] for n in few]


class Behind(Passed):
    """An event of a device that is always behind, until it is waited for."""

    def query(self) -> bool:
        return False
