"""Work that ends early where the client goes away."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from specengine.server.streaming import until_disconnect

GONE = {"type": "http.disconnect"}


class Client:
    """leaves: when its connection is lost."""

    def __init__(self) -> None:
        self.leaves = asyncio.Event()

    async def receive(self) -> Any:
        await self.leaves.wait()
        return GONE


async def endless(ended: list[str], error: Exception | None = None) -> str:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("ended")
        if error is not None:
            raise error
    return "never"


async def turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("error", [None, ValueError("on the way out")])
def test_client_that_leaves_ends_the_work_and_nothing_else(error: Exception | None) -> None:
    async def scene() -> tuple[str | None, int]:
        client = Client()
        asyncio.get_running_loop().call_later(0, client.leaves.set)
        found = await until_disconnect(client.receive, endless(ended, error))
        await turns()
        task = asyncio.current_task()
        assert task is not None
        return found, task.cancelling()

    ended: list[str] = []
    assert asyncio.run(scene()) == (None, 0)
    assert ended == ["ended"]


@pytest.mark.parametrize("has_left", [False, True])
def test_caller_that_is_cancelled_stays_cancelled(has_left: bool) -> None:
    async def scene() -> None:
        client = Client()
        task = asyncio.create_task(until_disconnect(client.receive, endless(ended)))
        await turns()
        if has_left:
            client.leaves.set()
            await turns(2)
        task.cancel()
        await task

    ended: list[str] = []
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(scene())
    assert ended == ["ended"]


def test_client_that_leaves_as_the_work_ends_cancels_nothing() -> None:
    async def scene() -> str | None:
        client, done = Client(), asyncio.Event()

        async def work() -> str:
            await done.wait()
            client.leaves.set()
            return "done"

        asyncio.get_running_loop().call_later(0, done.set)
        found = await until_disconnect(client.receive, work())
        await turns(5)  # a cancellation would come here
        return found

    assert asyncio.run(scene()) == "done"


def test_error_of_the_work_is_the_callers() -> None:
    async def work() -> None:
        await asyncio.sleep(0)
        raise ValueError("of the work")

    async def scene() -> None:
        await until_disconnect(Client().receive, work())

    with pytest.raises(ValueError, match="of the work"):
        asyncio.run(scene())
