"""What a client process receives, and what it reports of each request. Seconds are of the monotonic
clock, which the processes of one machine share."""

from __future__ import annotations

import msgspec


class Ask(msgspec.Struct):
    """A request to send. due: seconds after the start; 0.0 in a closed loop."""

    number: int
    body: bytes  # JSON
    due: float = 0.0


class ClientJob(msgspec.Struct):
    """One client's share of a point of load.

    concurrency: requests at once, most. is_paced: each is sent when it is due, not when another
    ends. headers: of each request, as in HTTP, each line with its CRLF.
    """

    url: str  # http://host:port
    path: str
    headers: bytes
    asks: list[Ask]
    concurrency: int
    is_paced: bool
    timeout: float  # seconds a request may take


class Outcome(msgspec.Struct):
    """What one request saw. error: "" for success; else a status, "timeout", "connection",
    "cut off", or "in stream". Times are None, and lists empty, where nothing came.

    sent: when its first byte was written, its connection open. gaps: seconds between events that
    carry output. counted: whether the server sent the number of tokens, or events were counted.
    """

    number: int
    due: float
    sent: float
    first: float | None = None
    last: float | None = None
    gaps: list[float] = []
    prompt_tokens: int = 0
    output_tokens: int = 0
    is_counted: bool = True
    rounds: int = 0  # of speculation, where the server tells
    accepted: int = 0
    error: str = ""
    message: str = ""


class ClientReport(msgspec.Struct):
    """cpu: seconds of processor time, of `seconds` from the start to the last answer."""

    outcomes: list[Outcome]
    num_events: int
    cpu: float
    seconds: float
