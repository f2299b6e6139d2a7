"""The methods that are the parts of a round."""

from __future__ import annotations

from typing import Any

import torch

from specengine.engine.loop import Engine
from specengine.engine.round.executor import RoundExecutor
from specengine.lab.step.stopwatch import Watched

HOST, WAIT = "host", "wait for the device"


def captured_parts(engine: Engine, rounds: RoundExecutor) -> list[Watched]:
    """Of a round on the device. The rest of it begins and accepts."""
    drafter, round, head = engine.drafter.model_drafter, rounds.round, rounds.runner.model.head
    parts = [] if round.rule is None else [Watched(round.rule, "decide", "accept")]
    return [
        *parts,
        *_heads(drafter, "logits", "draft head"),
        *_heads(drafter, "top", "draft head"),
        *_heads(drafter, "best", "draft head"),
        Watched(drafter, "draft_rows", "draft"),
        Watched(drafter, "draft_tree_rows", "draft"),
        Watched(round.layout, "keep_kv", "keep"),
        Watched(rounds.sampling, "target_weights", "sample"),
        Watched(rounds.runner.sampler, "draw", "sample"),
        Watched(rounds.runner, "forward_extend", "verify"),
        Watched(round, "node_logits", "verify"),
        Watched(head, "best", "verify head"),
        Watched(head, "logits", "verify head"),
        Watched(drafter, "sync_accepted", "observe"),
        Watched(drafter, "observe_rows", "observe"),
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


def host_parts(engine: Engine, rounds: RoundExecutor) -> list[Watched]:
    """Of the host, while rounds run on the device: what is left of a step schedules, commits and
    hands out, and what is left of collecting reads what was decided."""
    return [
        Watched(engine, "step", "schedule and commit"),
        Watched(engine.drafter, "draft", "draft on the host"),
        Watched(rounds, "launch", "launch"),
        Watched(rounds, "follow", "launch"),
        Watched(rounds, "collect", "collect"),
        Watched(torch.cuda.Event, "synchronize", WAIT),
    ]


def _heads(drafter: Any, method: str, part: str) -> list[Watched]:
    """Of the heads of the drafter's models, each once."""
    runners = getattr(drafter, "runners", ())
    heads = {id(runner.model.head): runner.model.head for runner in runners}
    return [Watched(head, method, part) for head in heads.values()]
