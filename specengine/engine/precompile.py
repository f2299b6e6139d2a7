"""Kernels that graphs will need are compiled before they are captured, all at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from time import perf_counter

import torch

from specengine.core.batch import AttentionBackend
from specengine.core.config import EngineConfig
from specengine.core.drafter import Drafter
from specengine.core.platform import best_device, platform_of
from specengine.engine.round.executor import RoundExecutor
from specengine.engine.round.key import RoundKey
from specengine.kernels.precompile import precompile
from specengine.runner.forward_graphs.decode import DecodeGraphs
from specengine.runner.forward_graphs.prefill import PrefillGraphs
from specengine.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)

Call = Callable[[], object]

# Where kernels change with the number of rows, or attention begins to split its keys.
_REPRESENTATIVE = (128, 64, 48, 32, 16, 1)


def representative_sizes(batch_sizes: list[int]) -> list[int]:
    """Some of the batch sizes, from large to small, that use nearly all kernels of the others."""
    largest = max(batch_sizes)
    under = [
        [size for size in batch_sizes if size <= limit] for limit in (largest, *_REPRESENTATIVE)
    ]
    return sorted({max(sizes) for sizes in under if sizes} | {min(batch_sizes)}, reverse=True)


def can_precompile(config: EngineConfig, *backends: AttentionBackend) -> bool:
    """Whether all that a forward launches is PyTorch's or this project's, and not compiled as a
    whole; and whether there is anything to compile."""
    compiles = platform_of(torch.device(config.model.device)).precompiles
    ours = all(backend.limits.precompiles for backend in backends)
    return compiles and ours and not config.graph.enable_torch_compile


def precompile_calls(calls: Sequence[Call], num_representative: int = 1) -> None:
    """Compile the kernels that the calls launch, in parallel. Only the first `num_representative`
    calls are run if the caches have all of their kernels."""
    start = perf_counter()
    with torch.inference_mode(), precompile() as stage:
        for number, call in enumerate(calls):
            if number == num_representative and not stage.compiles():
                break
            call()
    if stage.tally.kernels:
        platform_of(best_device()).empty_cache()
        took = perf_counter() - start
        logger.info("compiled %d kernels at once in %.1f s", stage.tally.kernels, took)


def compile_ahead(
    config: EngineConfig, runner: ModelRunner, rounds: RoundExecutor | None, drafter: Drafter
) -> None:
    """Compile what the graphs of an engine need, those of idle moments too. What this leaves out is
    compiled when a graph is captured."""
    sizes = config.graph.cuda_graph_bs
    if sizes is None or not can_precompile(config, runner.attn_backend):
        return
    padding = not config.graph.disable_cuda_graph_padding
    calls = [*_representative_calls(runner, list(sizes), padding, rounds, drafter)]
    precompile_calls(calls, num_representative=1 if rounds is None else 2)


def _representative_calls(
    runner: ModelRunner,
    batch_sizes: list[int],
    padding: bool,
    rounds: RoundExecutor | None,
    drafter: Drafter,
) -> Iterator[Call]:
    """The smallest of either kind, which have the most kernels of their own; the largest, for the
    kernels that take longest; and the rest."""
    decode = DecodeGraphs(runner, batch_sizes, padding)
    *larger, smallest = (
        partial(decode.precompile, size) for size in representative_sizes(batch_sizes)
    )
    calls = [] if rounds is None else [partial(_run, rounds, one) for one in _round_keys(rounds)]
    yield smallest
    yield from calls[:1]
    yield from larger[:1]
    yield from calls[1:2]
    if padding:
        prefill = PrefillGraphs(runner)
        yield from (partial(prefill.precompile, key) for key in prefill.precompile_keys)
    yield from larger[1:]
    yield from calls[2:]
    yield from drafter.precompile_calls()


def _round_keys(rounds: RoundExecutor) -> Iterator[RoundKey]:
    """The smallest as it samples, then each size at its deepest and plain, and the largest in every
    form. The second largest has kernels of its own for drafts that are few: there plain rounds do
    what decoding does, which is asked for beside them. Few rows and many are sampled by different
    kernels."""
    largest, *others = representative_sizes(rounds.batch_sizes)
    smallest, deepest = min(rounds.batch_sizes), rounds.steps[-1]
    greedy, sampled = rounds.sampling.greedy, rounds.sampling.sampled
    yield RoundKey(smallest, deepest, sampled)
    yield from sorted(rounds.keys(largest, greedy), key=_deep_and_whole_first)
    shallowest = min(filter(None, rounds.steps), default=0)
    for size in others[:1]:
        for steps in sorted({shallowest, deepest}, reverse=True):
            yield RoundKey(size, steps, greedy)
    deep_and_plain = sorted({0, deepest} & set(rounds.steps), reverse=True)
    for size in others[1:]:
        for steps in deep_and_plain:
            yield RoundKey(size, steps, greedy)
    for size, steps in product((largest, smallest), deep_and_plain):
        yield RoundKey(size, steps, sampled)


def _deep_and_whole_first(key: RoundKey) -> tuple[int, bool]:
    return -key.num_steps, key.num_nodes is not None


def _run(rounds: RoundExecutor, key: RoundKey) -> None:
    """A round of no request."""
    rounds.rows[: key.batch_size].zero_()
    rounds.bind(key).run()
