"""Serve a model on an OpenAI-compatible HTTP endpoint."""

from __future__ import annotations

import argparse
from contextlib import ExitStack

from specengine.cli.args import add_config_arguments, add_model_argument, config_of
from specengine.cli.logs import set_up_logging
from specengine.core.config import EngineConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    add_config_arguments(parser, serves=True)


def run(args: argparse.Namespace) -> int:
    config = config_of(args)
    set_up_logging(config.server.log_level, config.server.log_format)
    serve_forever(config)
    return 0


def serve_forever(config: EngineConfig) -> None:
    from specengine.server.processes.supervisor import num_workers, supervise, usable_cores

    workers = num_workers(config.server.api_workers, usable_cores())
    if workers:
        supervise(config, workers)
    else:
        serve_in_one_process(config)


def serve_in_one_process(config: EngineConfig) -> None:
    from specengine.server.run import serve
    from specengine.server.service import ServedEngine

    with ExitStack() as until_the_end:

        def build() -> ServedEngine:
            from specengine.engine.async_engine import AsyncEngine
            from specengine.engine.build import build_engine
            from specengine.engine.garbage import frozen_objects
            from specengine.engine.serving.pacing import pace_prompts

            engine = build_engine(config)
            pace_prompts(engine.parts)
            until_the_end.enter_context(frozen_objects())
            return AsyncEngine(engine, True, interval=config.server.stream_interval)

        serve(config.server, build, config.limits)
