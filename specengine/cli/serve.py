"""Serve a model on an OpenAI-compatible HTTP endpoint."""

from __future__ import annotations

import argparse

from specengine.cli.args import add_config_arguments, add_model_argument, config_of
from specengine.cli.logs import set_up_logging
from specengine.core.config import EngineConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    config = config_of(args)
    set_up_logging(config.server.log_level)
    serve_forever(config)
    return 0


def serve_forever(config: EngineConfig) -> None:
    from specengine.server.run import serve
    from specengine.server.service import ServedEngine

    def build() -> ServedEngine:
        from specengine.engine.async_engine import AsyncEngine
        from specengine.engine.build import build_engine

        return AsyncEngine(build_engine(config))

    serve(config.server, build)
