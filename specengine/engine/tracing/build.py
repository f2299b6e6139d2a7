"""From `--trace FILE` to an engine that records."""

from __future__ import annotations

from pathlib import Path

from specengine.core.config import EngineConfig
from specengine.core.errors import ConfigError
from specengine.core.spec import RoundRecorder, Verifier
from specengine.core.trace_config import TraceConfig
from specengine.draft.trace.writer import TraceWriter
from specengine.engine.factories import check_algorithm, verifier_name
from specengine.engine.loop import Engine
from specengine.engine.tracing.header import trace_header
from specengine.engine.tracing.one_token import OneTokenVerifier
from specengine.engine.tracing.recorder import TraceRecorder, WrittenElsewhere
from specengine.runner.loader.loaded_model import LoadedModel


def traced_verifier(config: TraceConfig, verifier: Verifier) -> Verifier:
    every_position = config.trace is not None and config.trace_every_position
    return OneTokenVerifier(verifier) if every_position else verifier


def record_trace(engine: Engine, loaded: LoadedModel) -> None:
    """Of several ranks the first writes; the others run their rounds as it does. Raises ConfigError
    where the file cannot be written, or nothing drafts."""
    config = engine.parts.config
    if config.trace.trace is None:
        return
    header = _header(config, engine, loaded)
    recorder: RoundRecorder = WrittenElsewhere()
    if loaded.link.communicator.rank == 0:
        writer = TraceWriter(Path(config.trace.trace), header, config.trace.trace_max_mb << 20)
        recorder = TraceRecorder(writer, engine.scheduler.round_limit, config.spec.draft_sampling)
    engine.host_round.recorders.append(recorder)
    if config.trace.trace_every_position:
        engine.watch.mute()  # nothing is accepted, on purpose


def _header(config: EngineConfig, engine: Engine, loaded: LoadedModel) -> dict[str, object]:
    if config.spec.algorithm is None:
        raise ConfigError("--trace records drafts; choose how to draft: --speculative-algorithm")
    algorithm = check_algorithm(config.spec.algorithm)
    verifier = verifier_name(config.spec, engine.drafter)
    return trace_header(config, loaded, engine.drafter, algorithm, verifier)
