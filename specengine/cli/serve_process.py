"""A process of a server: the engine, or a front end. server/processes/supervisor.py starts it."""

from __future__ import annotations

import faulthandler
import signal
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

from specengine.cli.logs import set_up_logging
from specengine.core.config import EngineConfig
from specengine.core.trim import map_large_blocks, share_arenas
from specengine.engine.garbage import frozen_objects, importing
from specengine.server.processes.channel import (
    Channel,
    Keys,
    Message,
    StartEngine,
    StartFrontEnd,
)

if TYPE_CHECKING:
    from specengine.engine.loop import Engine


def main() -> int:
    """The exit status. Its argument is the descriptor of the channel to the supervisor."""
    faulthandler.enable()  # where it hangs, the supervisor asks where
    for one in (signal.SIGINT, signal.SIGTERM):  # these are for the supervisor
        signal.signal(one, signal.SIG_IGN)
    share_arenas()
    channel = Channel.of_descriptor(int(sys.argv[-1]))
    start, keys = receive_start(channel)
    if start is None:
        return 1
    if isinstance(start, StartEngine):
        return run_engine(channel, start)
    assert isinstance(start, StartFrontEnd)
    map_large_blocks()
    set_up_logging(start.config.server.log_level, start.config.server.log_format)
    with importing():
        from specengine.server.processes.front_end import run_front_end

    return run_front_end(channel, start, keys)


def receive_start(channel: Channel) -> tuple[Message | None, list[str]]:
    """What this process is to be, and the keys of the API, of a front end; None where the
    supervisor has gone."""
    keys: list[str] = []
    while (received := channel.receive()) is not None:
        if not isinstance(received.message, Keys):
            return received.message, keys
        keys += received.message.keys
    return None, keys


def run_engine(channel: Channel, start: StartEngine) -> int:
    set_up_logging(start.config.server.log_level, start.config.server.log_format)
    with importing():
        from specengine.engine.build import build_engine, load_sharing
        from specengine.engine.phases import Phases
        from specengine.engine.serving.pacing import pace_prompts
        from specengine.engine.sharing import Meeting
        from specengine.server.processes.engine_process import run_engine

    with ExitStack() as until_the_end:

        def build(config: EngineConfig) -> Engine:
            loaded = None
            if start.meeting:
                place = Meeting(start.meeting, start.number, config.parallel.dp_size)
                loaded = load_sharing(config, Phases(), place)
            engine = build_engine(config, loaded)
            pace_prompts(engine.parts)
            until_the_end.enter_context(frozen_objects())
            return engine

        return run_engine(channel, start, build)


if __name__ == "__main__":
    sys.exit(main())
