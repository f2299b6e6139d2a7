"""What a front end of a server of several processes makes of what it is told."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from specengine.core.config import EngineConfig
from specengine.server.app import create_app
from specengine.server.processes import front_end as module
from specengine.server.processes.channel import (
    Channel,
    EngineDown,
    EngineInfo,
    Received,
    Serves,
    StartFrontEnd,
    channel_pair,
)
from specengine.server.processes.front_end import FrontEnd
from specengine.server.service import Service
from tests.server.conftest import make_tokenizer


def test_engine_that_ends_while_a_front_end_loads_is_never_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_load, tokenizer = threading.Event(), make_tokenizer()

    def load(directory: str) -> Any:
        may_load.wait(60)
        return tokenizer

    frozen: list[bool] = []
    monkeypatch.setattr(module, "load_tokenizer", load)
    monkeypatch.setattr(module, "freeze_objects", lambda: frozen.append(may_load.is_set()))
    config = EngineConfig()
    first, second = (
        EngineInfo(f"ipc://{tmp_path}/{name}", str(tmp_path), name, 200, 257, False, config)
        for name in ("first", "second")
    )

    async def run() -> None:
        heard: list[Received] = []
        ours, theirs = channel_pair()
        supervisor = Channel(theirs).watched(heard.append, lambda: None)
        service, start = Service(config.limits), StartFrontEnd(config, "a", 0, 1, [])
        one = FrontEnd(create_app(service, [], config.server), service, ours, start)
        one._mailbox = ours.watched(one._obey, lambda: None)
        supervisor.send(first)
        supervisor.send(EngineDown("it has failed"))
        await until(lambda: one._tasks)
        may_load.set()
        await until(lambda: not one._tasks)
        assert service.engine is None
        assert heard == []
        supervisor.send(second)
        await until(lambda: heard)
        assert [received.message for received in heard] == [Serves()]
        assert service.engine.model_name == "second"
        assert frozen == [True]  # once, when what all requests share was there
        service.engine.shutdown()
        one._mailbox.close()
        supervisor.close()

    async def until(holds: Any) -> None:
        async with asyncio.timeout(60):
            while not holds():
                await asyncio.sleep(0.001)

    asyncio.run(run())
