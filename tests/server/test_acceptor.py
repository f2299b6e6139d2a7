"""The acceptor of a server of several processes, with a listening socket of its own."""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import Any, cast

import pytest

from specengine.server.processes import acceptor as module
from specengine.server.processes.acceptor import Acceptor
from specengine.server.processes.children import Child


class NoDescriptors:
    """A listening socket whose process has no descriptor left for a connection."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.num_asked = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def accept(self) -> Any:
        self.num_asked += 1
        raise OSError(errno.EMFILE, "too many open files")


class Silent:
    """The mailbox of a front end that says nothing."""

    def read(self) -> None: ...


@pytest.mark.parametrize("stops", [False, True])
def test_acceptor_without_descriptors_tries_again_unless_it_is_stopped(
    stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAUSE", 0.01)

    async def run() -> int:
        with socket.create_server(("127.0.0.1", 0)) as sock:
            listener = NoDescriptors(sock)
            child = Child("a", cast(Any, None), is_up=True)
            child.mailbox = cast(Any, Silent())
            acceptor = Acceptor(cast(Any, listener), lambda: [child], 10)
            acceptor.start()
            with socket.create_connection(sock.getsockname()):
                async with asyncio.timeout(60):
                    while not listener.num_asked:
                        await asyncio.sleep(0.001)
                    if stops:
                        acceptor.stop()
                    while not stops and listener.num_asked == 1:
                        await asyncio.sleep(0.001)
                await asyncio.sleep(0.05)
                acceptor.stop()
            return listener.num_asked

    assert (asyncio.run(run()) == 1) == stops
