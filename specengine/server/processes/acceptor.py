"""Connections, from the listening socket to the front ends."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Iterable

from specengine.server.processes.channel import Connection
from specengine.server.processes.children import Child

logger = logging.getLogger(__name__)

AT_ONCE = 64  # connections accepted before other work gets its turn
FILLED = 4  # connections that a front end has before the next one gets any
PAUSE = 0.1  # seconds without descriptors, or without a front end that takes any


def choose(front_ends: Iterable[Child]) -> Child | None:
    """Few connections share a front end, for each one costs the engine a message a step; many are
    spread evenly. While some still load what others have, those others get all."""
    up = [one for one in front_ends if one.is_up]
    able = [one for one in up if one.serves] or up
    filling = [one for one in able if one.num_open < FILLED]
    if filling:
        return max(filling, key=lambda one: one.num_open)
    return min(able, key=lambda one: one.num_open, default=None)


class Acceptor:
    """Accepts while there is a front end; until then connections wait in the socket's backlog.

    front_ends: those that run now.
    """

    def __init__(
        self,
        listener: socket.socket,
        front_ends: Callable[[], Iterable[Child]],
        max_connections: int,
    ) -> None:
        self._listener = listener
        self._front_ends = front_ends
        self._max_connections = max_connections
        self._is_accepting = False
        self._restart: asyncio.TimerHandle | None = None  # the end of a pause
        listener.setblocking(False)

    def start(self) -> None:
        if not self._is_accepting:
            self._is_accepting = True
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def stop(self) -> None:
        """Accept nothing until `start`; a pause does not end by itself any more."""
        if self._restart is not None:
            self._restart.cancel()
            self._restart = None
        if self._is_accepting:
            self._is_accepting = False
            asyncio.get_running_loop().remove_reader(self._listener.fileno())

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            chosen = choose(self._front_ends())
            if chosen is None:
                self.stop()  # until one is up
                return
            chosen.mailbox.read()  # it may have ended since
            if not chosen.is_up:
                continue
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError, InterruptedError):
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    raise
                logger.warning("cannot accept connections for now: %s", error)
                self._rest()
                return
            with connection:
                is_surplus = self._num_open() >= self._max_connections
                chosen.mailbox.send(Connection(is_surplus), connection)
                chosen.num_open += 1

    def _num_open(self) -> int:
        return sum(one.num_open for one in self._front_ends())

    def _rest(self) -> None:
        self.stop()
        self._restart = asyncio.get_running_loop().call_later(PAUSE, self.start)
