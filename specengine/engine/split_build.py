"""Adds split prefills (--enable-pdmux) to an engine, or says why there can be none."""

from __future__ import annotations

import logging

from torch import nn

from specengine.core.batch import AttentionBackend
from specengine.core.config import EngineConfig
from specengine.core.errors import ConfigError
from specengine.core.forward_mode import ForwardMode
from specengine.engine.loop import Engine
from specengine.engine.pipeline import RoundPipeline
from specengine.engine.round.executor import RoundExecutor
from specengine.engine.split_prefill import SplitPrefills
from specengine.kernels.dispatch import share_device
from specengine.layers.compute_paths import SPLIT_PREFILL
from specengine.layers.decoder import DecoderLayer
from specengine.runner.attention import make_attention_backends
from specengine.runner.green_contexts import NoGreenContexts, SmParts, make_sm_parts
from specengine.runner.loader.loaded_model import LoadedModel
from specengine.runner.loader.model_source import ModelSource
from specengine.runner.model_runner import ModelRunner
from specengine.runner.split_streams import BesideRounds, SplitStreams
from specengine.scheduler.split_policy import SplitPrefillPolicy
from specengine.scheduler.split_prompts import SplitPrompts

logger = logging.getLogger(__name__)

MIN_TOKENS_GPU, MIN_TOKENS_CPU = 512, 64
# A reason, which is counted.
# Whose sums would be launched in another order on each rank, if prompts had streams of their own.
SEVERAL_RANKS = "prompts and rounds of several ranks take turns"


def check_has_rounds(config: EngineConfig, source: ModelSource) -> None:
    """Raises ConfigError where --enable-pdmux would find no rounds."""
    if config.split.enable_pdmux and source.pooling is not None:
        raise ConfigError("--enable-pdmux: an embedding model has no rounds; leave it out")


def check_split(config: EngineConfig, loaded: LoadedModel, backend: AttentionBackend) -> None:
    """backend: of the target. Raises ConfigError where --enable-pdmux cannot be served by these; by
    other options, see core/together.py and engine/resolve.py."""
    if not config.split.enable_pdmux:
        return
    check_has_rounds(config, loaded.source)
    if backend.for_mode(ForwardMode.SPLIT_PREFILL).limits.plans_on_host:
        raise ConfigError(
            f"--enable-pdmux: attention backend {backend.name} keeps one plan at a time, and "
            "prompts and rounds need one each; name another with --prefill-attention-backend"
        )
    if (reason := _why_not(loaded.model)) is not None:
        raise ConfigError(f"--enable-pdmux: split prefill does not compute {reason}; leave it out")


def _why_not(model: object) -> str | None:
    """What of a model's layers split prefill does not compute."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    specs = [layer.spec for layer in modules if isinstance(layer, DecoderLayer)]
    return SPLIT_PREFILL.refusal(specs) if specs else "layers that are not decoder layers"


def add_split_prefills(config: EngineConfig, engine: Engine, backend: AttentionBackend) -> None:
    """Before captures. backend: of the engine's target, from which prompts have one apart on a GPU.
    config: resolved, and checked by check_split."""
    split, runner = config.split, engine.parts.worker.runner
    if not split.enable_pdmux:
        return
    on_gpu = runner.platform.is_accelerator
    usual = MIN_TOKENS_GPU if on_gpu else MIN_TOKENS_CPU
    chunk = config.schedule.chunked_prefill_size or -1
    least = split.pdmux_min_tokens or (min(usual, chunk) if chunk > 0 else usual)
    streams, no_shares = SplitStreams(runner.platform.synchronize), None
    if on_gpu and engine.parts.link.communicator.size > 1:
        no_shares = SEVERAL_RANKS
    elif on_gpu:
        streams, no_shares = _streams(runner, split.sm_parts)
    if on_gpu:
        backend = make_attention_backends(config.model, runner.device).target
    made = engine.split = SplitPrefills(
        runner,
        engine.scheduler,
        SplitPrompts(least, alone=runner.pools.states is not None),
        SplitPrefillPolicy(
            runner.model.num_layers,
            streams.shares,
            split.pdmux_tpot_ratio,
            split.pdmux_layers,
            split.takes_turns,
        ),
        streams,
        backend,
        no_shares,
        engine.parts.link,
    )
    if on_gpu and engine.parts.adaptive is not None:
        engine.parts.adaptive.is_disturbed = lambda: made.is_busy


def use_lanes(split: SplitPrefills | None, rounds: RoundExecutor) -> None:
    """Before rounds are captured: on which streams."""
    if split is not None and isinstance(split.streams, BesideRounds):
        rounds.lanes.streams = split.streams.round_streams
        split.lanes = rounds.lanes


def join_pipeline(split: SplitPrefills | None, pipeline: RoundPipeline) -> None:
    """Captures rounds on the SMs that prompts leave, as far as the memory for graphs reaches: those
    of greedy requests; others follow in the background."""
    if split is None:
        return
    pipeline.is_disturbed = lambda: split.is_busy
    split.is_in_flight = lambda: pipeline.has_in_flight
    if not split.streams.shares:
        return
    try:
        _capture_beside(pipeline.executor)
    except Exception as error:  # of many kinds: a kernel that wants more SMs than it has
        logger.warning("rounds do not run on a part of the SMs: %s", error, exc_info=True)
        pipeline.executor.lanes.forget_shares()
        split.share_all_sms("rounds do not run on a part of the SMs")


def _capture_beside(rounds: RoundExecutor) -> None:
    for size in reversed(rounds.batch_sizes):
        for key in rounds.keys(size, rounds.sampling.greedy):
            for one in rounds.lanes.keys_of(key):
                if rounds.cache.has_memory_for(one):
                    rounds.graph(one, logging.DEBUG)


def _streams(runner: ModelRunner, shares: list[float]) -> tuple[SplitStreams, str | None]:
    """shares: of the SMs, beside rounds. And why prompts have none, where they were asked for."""
    whole = runner.platform.new_stream()
    parts, reason = dict[float, SmParts](), None
    try:
        made = make_sm_parts(runner.device, shares) if shares else []
        parts = dict(zip(shares, made, strict=True))
    except NoGreenContexts as error:
        reason = str(error)
        logger.info("long prompts take turns with rounds: %s", error)
    if parts:
        share_device()
    for one in parts.values():
        logger.info("prompts on %d SMs, rounds on %d", one.share.num_sms, one.rest.num_sms)
    if whole is None:
        return SplitStreams(runner.platform.synchronize), reason
    return BesideRounds(parts, whole, runner.platform), reason
