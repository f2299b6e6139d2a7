"""The kernels of captured graphs and how long each takes, on request (--cuda-graph-profile)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from specengine.core.errors import ConfigError
from specengine.core.platform import Graph, KernelSpan, Platform
from specengine.engine.round.executor import RoundExecutor
from specengine.runner.forward_graphs.prefill import PrefillGraphs
from specengine.runner.graph_cache import GraphCache
from specengine.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)

_REPLAYS = 2  # even, since rounds take turns with the halves of a buffer
_NOTE = (
    "Each graph ran for no request: attention reads no context, and all rows choose alike.\n"
    "Graphs that are captured when they are first needed are not here."
)


@dataclass(frozen=True)
class KernelRow:
    """One kernel of a graph: how often it runs in a replay, and microseconds of all its runs."""

    name: str
    count: float
    microseconds: float


@torch.inference_mode()
def profile_graphs(
    runner: ModelRunner, rounds: RoundExecutor | None, place: str, writes: bool = True
) -> None:
    """Replay every graph of a whole forward or round that was captured at start, and write a table
    each: to the file `place`, or "log". Right after the captures: later their inputs name requests,
    or are those of another graph. writes: whether this rank does; all ranks replay alike. Raises
    ConfigError where the file cannot be written."""
    if rounds is not None:
        rounds.clear_rows()
    tables = [
        table_of(f"{kind} {key}", kernel_rows(graph, runner.platform))
        for kind, key, graph in captured_graphs(runner, rounds)
    ]
    if not writes:
        return
    if place == "log":
        for table in tables:
            logger.info("%s", table)
        return
    try:
        Path(place).write_text("\n\n".join(["# Captured graphs", _NOTE, *tables]) + "\n")
    except OSError as error:
        raise ConfigError(f"--cuda-graph-profile {place}: {error}") from error
    logger.info("wrote the kernels of %d graphs to %s", len(tables), place)


def captured_graphs(
    runner: ModelRunner, rounds: RoundExecutor | None
) -> Iterator[tuple[str, object, Graph]]:
    """Kind, key and graph; but for rounds that wait for token masks amid them."""
    caches: list[GraphCache] = []  # type: ignore[type-arg]
    if runner.decode_graphs is not None:
        caches.append(runner.decode_graphs.cache)
    if isinstance(runner.prefill_graphs, PrefillGraphs):
        caches.append(runner.prefill_graphs.cache)
    for cache in caches:
        for key, captured in cache.captured.items():
            yield cache.kind, key, captured.graph
    if rounds is not None:
        for round_key, graph in rounds.whole_graphs().items():
            yield rounds.cache.kind, round_key, graph


def kernel_rows(graph: Graph, platform: Platform) -> list[KernelRow]:
    """Of one replay, the costliest first."""
    spans = platform.kernel_spans(_replays_of(graph))
    found: dict[str, list[KernelSpan]] = {}
    for span in spans:
        found.setdefault(span.name, []).append(span)
    rows = [
        KernelRow(name, len(of) / _REPLAYS, sum(one.microseconds for one in of) / _REPLAYS)
        for name, of in found.items()
    ]
    return sorted(rows, key=lambda row: row.microseconds, reverse=True)


def _replays_of(graph: Graph) -> Callable[[], None]:
    def run() -> None:
        for _ in range(_REPLAYS):
            graph.replay()

    return run


def table_of(title: str, rows: list[KernelRow]) -> str:
    """In Markdown."""
    count, took = sum(row.count for row in rows), sum(row.microseconds for row in rows)
    lines = [f"## {title}", "", f"{count:g} kernels, {took:.1f} us", ""]
    lines += ["| kernel | count | us |", "|---|---|---|"]
    lines += [
        f"| {row.name.replace('|', chr(92) + '|')} | {row.count:g} | {row.microseconds:.1f} |"
        for row in rows
    ]
    return "\n".join(lines)
