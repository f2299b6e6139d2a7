"""Server-sent events, and noticing that the client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specengine.server.errors import as_api_error
from specengine.server.json_bytes import dumps

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
EVENT_HEADERS = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    (b"content-type", b"text/event-stream; charset=utf-8"),
)


@dataclass(frozen=True)
class Streaming:
    """Which chunks tell the usage: the last, or every one."""

    has_usage: bool
    has_usage_in_chunks: bool


def event(payload: Mapping[str, Any]) -> bytes:
    return b"data: " + dumps(payload) + b"\n\n"


class EventWriter:
    """Events of one stream: what all of them share is encoded once."""

    def __init__(self, head: Mapping[str, Any]) -> None:
        self._start = b"data: " + dumps(head)[:-1] + b',"choices":['

    def event(self, choice: Mapping[str, Any] | None, more: Mapping[str, Any]) -> bytes:
        """choice: None for a chunk without any. more: fields behind the choices."""
        encoded = b"" if choice is None else dumps(choice)
        rest = b"," + dumps(more)[1:] if more else b"}"
        return self._start + encoded + b"]" + rest + b"\n\n"


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; None, and `work` is cancelled, where the client goes away first.

    The body of the request must have been read: `receive` then waits for the disconnect. `work`
    runs in the task of the caller, who may be cancelled as well: that is no client that goes.
    """
    caller = asyncio.current_task()
    assert caller is not None
    has_ended = has_left = False

    def leave(gone: asyncio.Task[None]) -> None:
        nonlocal has_left
        if gone.cancelled():
            return
        gone.exception()  # it has been seen
        if not has_ended:
            has_left = True
            caller.cancel()

    gone = asyncio.create_task(_disconnect(receive))
    gone.add_done_callback(leave)
    try:
        return await work
    except (asyncio.CancelledError, Exception):
        if not has_left or caller.uncancel():
            raise
        return None
    finally:
        has_ended = True
        gone.cancel()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends events as they come, and stops their source when the client goes away.

    The status is sent with the first event, so that an error before it is a proper HTTP error;
    a later one becomes the last event but `last_event`, which the source ends with as well.
    """

    def __init__(self, events: AsyncIterator[bytes], last_event: bytes = DONE) -> None:
        super().__init__()
        self.raw_headers = list(EVENT_HEADERS)
        self._events = events
        self._last_event = last_event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_disconnect(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        started = False
        async with closing(self._events) as events:
            try:
                async for chunk in events:
                    if not started:
                        started = True
                        await self._start(send)
                    await send(_body(chunk))
            except Exception as error:
                if not started:
                    raise
                await send(_body(event(as_api_error(error).body())))
                await send(_body(self._last_event))
        await send(_body(b"") | {"more_body": False})

    async def _start(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})


def _body(chunk: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": chunk, "more_body": True}


def closing(source: AsyncIterator[T]) -> aclosing[Any]:
    """Closes `source`, an asynchronous generator, on the way out."""
    generator: Any = source
    return aclosing(generator)


async def merge(sources: list[AsyncIterator[T]]) -> AsyncIterator[tuple[int, T]]:
    """(number of the source, item) in the order of arrival. Closing it closes every source."""
    queue: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue()

    async def pump(number: int, source: AsyncIterator[T]) -> None:
        try:
            async with closing(source) as items:
                async for item in items:
                    queue.put_nowait((number, item))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    pumps = [asyncio.create_task(pump(*pair)) for pair in enumerate(sources)]
    try:
        running = len(pumps)
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
