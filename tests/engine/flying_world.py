"""Whole engines whose rounds fly on a CPU: a graph is what it was made from, run when it is
replayed, and nothing is late."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from specengine import LLM, SamplingParams, SpecConfig
from specengine.engine import graph_round, graph_ruled
from specengine.engine.flights import Flights
from specengine.engine.graph_build import _row_drafter, new_round
from specengine.engine.graph_round import GraphRound
from tests.support.device_lengths import DeviceLengths


@dataclass(frozen=True)
class EagerGraph:
    run: Callable[[], object]

    def replay(self) -> None:
        self.run()


class Passed:
    """An event of a device that is never behind."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def capture_parts(parts: Sequence[Callable[[], object]], pool: Any) -> list[EagerGraph]:
    for part in parts:
        part()
    return [EagerGraph(part) for part in parts]


def capture(run: Callable[[], object], pool: Any) -> tuple[EagerGraph, None]:
    (graph,) = capture_parts([run], pool)
    return graph, None


def chain_of(name: str, drafters: dict[str, str]) -> SpecConfig | None:
    """Three steps, always; None is plain decoding."""
    if name == "plain":
        return None
    path = drafters[name]
    return SpecConfig(algorithm=name, adaptive=False, draft_model_path=path, num_steps=3)


def let_fly(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, overlaps: bool = True, most: int = 4
) -> GraphRound:
    """From now on. most: requests a round."""
    monkeypatch.setattr(graph_round, "capture", capture)
    monkeypatch.setattr(graph_ruled, "capture_parts", capture_parts)
    monkeypatch.setattr(torch.cuda, "Event", Passed)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    parts, backend = llm.engine.parts, DeviceLengths(torch.device("cpu"))
    found = _row_drafter(parts.drafter, most, torch.device("cpu"), chooses=False)
    assert found is not None
    drafter, steps = found
    inner = getattr(drafter, "inner", drafter)
    for runner in (parts.worker.runner, *getattr(inner, "runners", ())):
        runner.attn_backend = backend
    flying = new_round(parts, drafter, steps, [1, 2, most])
    llm.engine.flights = Flights(flying, parts.drafter, parts.scheduler, None, overlaps)
    return flying


def come_and_go(
    host: LLM,
    llm: LLM,
    prompts: Sequence[str | list[int]],
    wishes: Sequence[SamplingParams],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever runs around it, on the device or not, a seed says what it says alone. prompts: of
    the wishes in turn."""
    can_fly, draw = llm.engine._can_fly, random.Random(2)
    monkeypatch.setattr(
        llm.engine, "_can_fly", lambda *given: draw.random() < 0.8 and can_fly(*given)
    )
    found, waiting = dict[str, list[int]](), draw.sample(range(len(wishes)), len(wishes))
    while waiting or llm.engine.has_work:
        if waiting and draw.random() < 0.4:
            number = waiting.pop()
            given = prompts[number % len(prompts)]
            ids = llm.tokenizer.encode(given) if isinstance(given, str) else given
            llm.engine.add_request(str(number), ids, wishes[number])
        found |= {one.rid: one.token_ids for one in llm.engine.step()}
        llm.engine.scheduler.check_invariant()
    pairs = zip(cycle(prompts), wishes, strict=False)
    alone = [host.generate([one], [wish])[0] for one, wish in pairs]
    assert found == {str(number): one.token_ids for number, one in enumerate(alone)}
