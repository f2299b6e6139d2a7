"""What two_cards.py lets every rank do: LeadEngine.call names these functions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import nn

from specengine.core.platform import platform_of
from specengine.engine.loop import Engine
from specengine.engine.round.timing import least_seconds, seconds_of
from specengine.runner.capture import capture
from specengine.runner.communicators.torch_distributed import TorchCommunicator

_MANY = 64  # collectives in a graph
_REPLAYS = 6


def memory(engine: Engine, folder: str) -> None:
    """Bytes of weights, KV and graphs of this rank, in a file of its own."""
    runner, ranks = engine.parts.worker.runner, engine.parts.link.communicator
    pool: Any = runner.pools.token_to_kv_pool
    found = {
        "weights": _bytes(cast(nn.Module, runner.model)),
        "kv": pool.num_slots * pool.shape.bytes_per_token,
        "graphs": runner.graph_memory.used,
        "allocated": torch.cuda.memory_allocated() if torch.cuda.is_available() else 0,
    }
    Path(folder, f"rank{ranks.rank}.json").write_text(json.dumps(found))


def round_seconds(engine: Engine, batch_size: int, num_steps: int) -> float:
    rounds = engine.device_rounds
    assert rounds is not None
    return seconds_of(rounds, batch_size, num_steps)


def all_reduce_seconds(engine: Engine, num_rows: int) -> float:
    """Of one all-reduce of [num_rows, H] among many in a graph."""
    runner, ranks = engine.parts.worker.runner, engine.parts.link.communicator
    x = torch.zeros(num_rows, runner.model.config.hidden_size, dtype=_dtype(engine), device="cuda")
    return seconds_in_graph(ranks, x)


def all_reduces(engine: Engine, rows: list[int]) -> dict[str, str]:
    """By rows of the residual stream, in microseconds; and whether all give NCCL's sums."""
    ranks, hidden = engine.parts.link.communicator, engine.parts.worker.runner.model.config
    assert isinstance(ranks, TorchCommunicator)
    found = {}
    for count in rows:
        torch.manual_seed(ranks.rank)
        x = torch.randn(count, hidden.hidden_size, device="cuda").bfloat16()
        expected = TorchCommunicator.all_reduce(ranks, x.clone())
        same = torch.equal(ranks.all_reduce(x.clone()), expected)
        found[str(count)] = f"{seconds_in_graph(ranks, x) * 1e6:.1f}" + ("" if same else " OTHER")
    return found


class Reduces(Protocol):
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor: ...


def seconds_in_graph(ranks: Reduces, x: torch.Tensor) -> float:
    return seconds_of_many(lambda: ranks.all_reduce(x))


def seconds_of_many(do: Callable[[], object]) -> float:
    """Of one of many in a graph."""

    def run() -> None:
        for _ in range(_MANY):
            do()

    platform = platform_of(torch.device("cuda"))
    graph, _ = capture(run, None, platform)
    return least_seconds(graph, _REPLAYS, platform) / _MANY


def _dtype(engine: Engine) -> torch.dtype:
    return (
        cast(nn.Module, engine.parts.worker.runner.model).get_parameter("model.norm.weight").dtype
    )


def _bytes(model: nn.Module) -> int:
    return sum(one.nbytes for one in model.parameters())
