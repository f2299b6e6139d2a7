"""What a rank does that is not rank 0: what rank 0 tells it. program.py is its process."""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import os
import signal
import sys
import threading
from contextlib import suppress
from functools import singledispatchmethod
from importlib import import_module
from typing import Any, BinaryIO

import torch
from torch._C._distributed_c10d import FileStore

from specengine.core.errors import (
    ConfigError,
    EngineStoppedError,
    ModelLoadError,
    SpecEngineError,
)
from specengine.core.parallel import Communicator
from specengine.core.platform import best_device, platform_of
from specengine.core.registry import load_place
from specengine.core.sharing import ExpertSharers
from specengine.engine.build import build_engine, load
from specengine.engine.garbage import freeze_objects, importing
from specengine.engine.parallel.lead import RankEngine
from specengine.engine.parallel.links import FollowerLink
from specengine.engine.parallel.messages import (
    Add,
    Build,
    Call,
    Do,
    Drop,
    Idle,
    Load,
    Message,
    Step,
)
from specengine.engine.parallel.ring import Ring
from specengine.engine.phases import Phases
from specengine.engine.sharing import Meeting, meet
from specengine.runner.communicators.connect import connect
from specengine.runner.communicators.host_memory import HostMemoryCommunicator
from specengine.runner.loader.loaded_model import LoadedModel

logger = logging.getLogger(__name__)


class Follower:
    """Does one message after the other. An error ends the program, by which rank 0 learns of it."""

    def __init__(self, link: FollowerLink, sharers: ExpertSharers | None) -> None:
        self.link, self.sharers = link, sharers
        self.loaded: LoadedModel | None = None
        self.engines: dict[int, RankEngine] = {}

    def run(self) -> None:
        while True:
            self.do(self.link.next())

    @singledispatchmethod
    def do(self, message: Message) -> None:
        raise EngineStoppedError(f"{type(message).__name__} comes out of turn")

    @do.register
    def _(self, message: Load) -> None:
        self.engines.clear()
        self.loaded = None
        _free()
        self.loaded = load(message.config, Phases(), self.link, self.sharers)

    @do.register
    def _(self, message: Build) -> None:
        engine = build_engine(message.config, self.loaded)
        assert isinstance(engine, RankEngine)
        self.engines[message.engine] = engine

    @do.register
    def _(self, message: Drop) -> None:
        self.engines.pop(message.engine, None)
        _free()

    @do.register
    def _(self, message: Add) -> None:
        engine = self.engines[message.engine]
        engine.add_request(message.rid, message.prompt_ids, message.sampling, stream=False)

    @do.register
    def _(self, message: Do) -> None:
        """What rank 0 refuses, this rank refuses as well; rank 0 raises the error to its caller."""
        with suppress(ConfigError, ModelLoadError):
            getattr(self.engines[message.engine], message.method)(*message.arguments)

    @do.register
    def _(self, message: Step) -> None:
        engine = self.engines[message.engine]
        if engine.digest != message.digest:
            rank = self.link.communicator.rank
            raise EngineStoppedError(f"rank {rank} has chosen other tokens than rank 0")
        engine.advance()  # its text is made on rank 0 alone

    @do.register
    def _(self, message: Idle) -> None:
        self.engines[message.engine].use_idle_moment(message.may_capture)

    @do.register
    def _(self, message: Call) -> None:
        load_place(message.place)(self.engines[message.engine], **message.arguments)


def _free() -> None:
    """What engines that are gone have left, before memory is planned."""
    gc.collect()
    platform_of(best_device()).empty_cache()


def main() -> None:
    lines = sys.stdin.buffer
    given: dict[str, Any] = json.loads(lines.readline())
    rank = given["rank"]
    faulthandler.register(signal.SIGUSR1)  # prints the stack of a rank that hangs
    threading.Thread(target=_end_with, args=(lines,), daemon=True).start()
    logging.basicConfig(
        level=given["log_level"].upper(),
        stream=sys.stderr,
        format=f"%(asctime)s %(levelname)s rank {rank}: %(message)s",
        datefmt="%H:%M:%S",
    )
    # Rank 0 logs its start; the others would log the same.
    logging.getLogger("specengine.startup").setLevel(logging.WARNING)
    try:
        follower = Follower(_connect(rank, given), _meet(rank, given))
        with importing():
            import_module("specengine.runner.loader.families")  # and transformers; as a load does
        freeze_objects()  # of libraries: all ranks wait for the one that collects
        follower.run()
    except SpecEngineError as error:
        logger.error("%s", error)
        os._exit(1)
    except BaseException:
        logger.exception("the rank has failed")
        os._exit(1)  # nothing that waits for other ranks may keep it


def _connect(rank: int, given: dict[str, Any]) -> FollowerLink:
    device = torch.device(given["device"])
    platform_of(device).use_device(rank)
    if given["threads"] is not None:
        torch.set_num_threads(given["threads"])
    store = FileStore(f"{given['folder']}/store", given["size"])
    store.set(f"up {rank}", "")
    communicator: Communicator
    if given["memory"] is not None:
        communicator = HostMemoryCommunicator(given["memory"], rank, given["size"])
    else:
        communicator = connect(store, rank, given["size"], device, given["symm_mem"])
    return FollowerLink(communicator, Ring(given["ring"]))


def _meet(rank: int, given: dict[str, Any]) -> ExpertSharers | None:
    if given["meeting"] is None:
        return None
    place, device = Meeting(**given["meeting"]), torch.device(given["device"])
    return meet(place, device, given["symm_mem"], rank, given["size"])


def _end_with(lines: BinaryIO) -> None:
    """Rank 0 is gone, or has no use for this one any more."""
    lines.read()
    os._exit(0)
