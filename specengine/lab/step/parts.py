"""The methods that are the parts of a round."""

from __future__ import annotations

from typing import Any

import torch

from specengine.engine.graph_relaxed import RelaxedRounds
from specengine.engine.graph_round import GraphRound
from specengine.engine.graph_tree import GraphTreeRound
from specengine.engine.graph_weighed import WeighingRound
from specengine.engine.graph_weighed_tree import GraphWeighedTreeRound
from specengine.engine.loop import Engine
from specengine.lab.step.stopwatch import Watched

HOST, WAIT = "host", "wait for the device"


def captured_parts(engine: Engine, flying: GraphRound) -> list[Watched]:
    """Of a round that runs on the device. The rest of it begins and accepts."""
    runner, parts = flying.runner, list[Watched]()
    model = getattr(flying.drafter, "inner", flying.drafter)  # where text stands beside it
    if isinstance(flying, GraphTreeRound | WeighingRound):
        parts += _heads(model, "logits", "draft head")
    if isinstance(flying, GraphTreeRound):
        parts += [
            *_if_there(model, "draft_tree_rows", "draft"),
            *_heads(model, "top", "draft head"),
            Watched(flying, "keep", "keep"),
        ]
    if isinstance(flying, GraphWeighedTreeRound) and flying.grower is not None:
        parts.append(Watched(flying.grower, "draft_limited_rows", "draft"))
    if isinstance(flying, WeighingRound):
        parts += [Watched(flying, "target_weights", "sample"), Watched(flying, "judge", "accept")]
    if isinstance(flying, RelaxedRounds):
        parts.append(Watched(flying.verifier, "decide", "accept"))
    return [
        *parts,
        Watched(model, "draft_rows", "draft"),
        *_heads(model, "best", "draft head"),
        Watched(runner, "forward_extend", "verify"),
        Watched(flying, "choose", "verify"),
        Watched(runner.model.head, "best", "verify head"),
        Watched(runner.model.head, "logits", "verify head"),
        Watched(flying.choices, "tokens", "sample"),
        *_if_there(model, "catch_up_rows", "observe"),
        Watched(model, "observe_rows", "observe"),
    ]


def eager_parts(engine: Engine) -> list[Watched]:
    """Of a round that the host runs piece by piece, and of the step around it."""
    parts = engine.parts
    samplers = [parts.verifier] if hasattr(parts.verifier, "sampler") else []
    return [
        Watched(engine, "step", HOST),
        Watched(parts.drafter, "draft", "draft"),
        *_heads(parts.drafter, "logits", "draft head"),
        Watched(parts.verifier, "prepare", "prepare"),
        Watched(parts.worker, "forward_batch_generation", "verify"),
        Watched(parts.worker.runner.model.head, "logits", "verify head"),
        Watched(parts.verifier, "accept", "accept"),
        *(Watched(one, "sampler", "sample") for one in samplers),
        Watched(parts.drafter, "observe", "observe"),
    ]


def host_parts(engine: Engine, flying: GraphRound) -> list[Watched]:
    """Of the host, while rounds fly: what is left of a step schedules, commits and hands out, and
    what is left of landing reads what was decided."""
    return [
        Watched(engine, "step", "schedule and commit"),
        Watched(engine.drafter, "draft", "draft on the host"),
        Watched(flying, "launch", "launch"),
        Watched(flying, "follow", "launch"),
        Watched(flying, "land", "land"),
        Watched(torch.cuda.Event, "synchronize", WAIT),
    ]


def _if_there(drafter: Any, method: str, part: str) -> list[Watched]:
    return [Watched(drafter, method, part)] if hasattr(drafter, method) else []


def _heads(drafter: Any, method: str, part: str) -> list[Watched]:
    """Of the heads of the drafter's models, each once."""
    runners = getattr(drafter, "runners", ())
    heads = {id(runner.model.head): runner.model.head for runner in runners}
    return [Watched(head, method, part) for head in heads.values()]
