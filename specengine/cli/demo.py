"""Answer the same prompts with and without speculation, side by side, over HTTP."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from specengine.cli.args import add_config_arguments, add_model_argument, config_of
from specengine.cli.logs import set_up_logging

if TYPE_CHECKING:
    from specengine.cli.chat_client import Endpoint
    from specengine.core.config import EngineConfig, SpecConfig
    from specengine.runner.loader.loaded_model import LoadedModel

# KV slots of each engine, unless --max-total-tokens says otherwise.
KV_SLOTS = 4096
# Depth of the drafts of a drafter that ships.
NUM_STEPS = 3

CODE = """def area(width, height):
    if width < 0 or height < 0:
        raise ValueError("sides must not be negative")
    return width * height


def perimeter(width, height):
    if width < 0 or height < 0:
        raise ValueError("sides must not be negative")
    return 2 * (width + height)
"""
PROMPTS = {
    "change code": "Add a docstring to each function and return the whole code:\n\n"
    f"```python\n{CODE}```",
    "correct a text": "Correct the spelling of this text, and change nothing else:\n\nThe river "
    "rises in the mountains, flows thruogh three old towns, and reaches the sea after two hundred "
    "kilometres. In spring the river rises quickly, and the three old towns close their gates. In "
    "summer it is shallow, and children walk through it.",
    "free prose": "Tell me a short story about a lighthouse.",
}


# Options of a server, and of a trace, which one of the engines has nothing to write to.
WITHOUT = (
    "served_model_name",
    "trace",
    "trace_every_position",
    "trace_max_mb",
    "tp_size",
    "draft_tp_size",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    group = parser.add_argument_group("demo")
    group.add_argument(
        "--max-tokens", type=int, default=96, metavar="N", help="tokens an answer (default: 96)"
    )
    group.add_argument("--stay", action="store_true", help="keep the endpoints open until Ctrl-C")
    add_config_arguments(parser, without=WITHOUT)


def run(args: argparse.Namespace) -> int:
    from specengine.cli.demo_view import DemoView

    config = config_of(args)
    set_up_logging(config.server.log_level)
    with ExitStack() as stack:
        endpoints = open_endpoints(stack, config)
        view = DemoView(endpoints, args.max_tokens)
        view.introduce()
        replies = {title: view.compare(title, prompt) for title, prompt in PROMPTS.items()}
        view.summarise(replies)
        if args.stay:
            view.invite()
            with suppress(KeyboardInterrupt):
                signal.pause()
    return 0 if all(len({reply.text for reply in one}) == 1 for one in replies.values()) else 1


def contenders(config: EngineConfig) -> list[SpecConfig]:
    """What is compared with plain decoding: what was asked for, or else the drafter that ships for
    the model, if any, and NGRAM."""
    from specengine.core.config import SpecConfig
    from specengine.draft.zoo.shipped import draft_path_of

    if config.spec != SpecConfig():
        return [replace(config.spec, algorithm=config.spec.algorithm or "NGRAM")]
    trained, ngram = (
        SpecConfig(algorithm="EAGLE3", num_steps=NUM_STEPS),
        SpecConfig(algorithm="NGRAM"),
    )
    return [ngram] if draft_path_of(trained, config.model) is None else [trained, ngram]


def open_endpoints(stack: ExitStack, config: EngineConfig) -> list[Endpoint]:
    """Without speculation, then with; all engines share one copy of the weights."""
    from specengine.core.config import SpecConfig
    from specengine.engine.build import load
    from specengine.engine.phases import Phases

    memory = replace(config.memory, max_total_tokens=config.memory.max_total_tokens or KV_SLOTS)
    plain = replace(config, memory=memory, spec=SpecConfig())
    loaded = load(plain, Phases())
    engines = {"no speculation": plain}
    engines |= {str(spec.algorithm): replace(plain, spec=spec) for spec in contenders(config)}
    return [
        stack.enter_context(open_endpoint(title, one, loaded)) for title, one in engines.items()
    ]


@contextmanager
def open_endpoint(title: str, config: EngineConfig, loaded: LoadedModel) -> Iterator[Endpoint]:
    from specengine.cli.chat_client import Endpoint
    from specengine.engine.async_engine import AsyncEngine
    from specengine.engine.build import build_engine
    from specengine.server.app import create_app
    from specengine.server.run import background_server
    from specengine.server.service import Service

    service = Service()
    service.engine = engine = AsyncEngine(build_engine(config, loaded))
    local = replace(config.server, host="127.0.0.1", port=0, log_level="warning")
    try:
        with background_server(create_app(service), local) as url:
            yield Endpoint(title, url, engine.model_name)
    finally:
        engine.shutdown()
