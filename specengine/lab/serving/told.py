"""What a server tells of itself: its model, and its counters of speculation."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from specengine.core.errors import SpecEngineError

_SECONDS = 20.0  # for an answer
# (rounds, accepted drafts): counters of /metrics. Theirs counts the rounds that had a draft.
_COUNTERS = (
    ("specengine:spec_decode_num_rounds_total", "specengine:spec_decode_num_accepted_tokens_total"),
    ("vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total"),
)


@dataclass(frozen=True)
class SpecCounts:
    rounds: float
    accepted: float

    def tau_since(self, before: SpecCounts | None) -> float | None:
        if before is None or self.rounds <= before.rounds:
            return None
        return 1 + (self.accepted - before.accepted) / (self.rounds - before.rounds)


@dataclass(frozen=True)
class Server:
    """root: http://host:port; base: with the path before /completions, such as /v1."""

    root: str
    base: str
    api_key: str | None = None

    @classmethod
    def at(cls, base_url: str, api_key: str | None) -> Server:
        base = base_url.rstrip("/")
        scheme, _, rest = base.partition("://")
        host, _, path = rest.partition("/")
        return cls(f"{scheme}://{host}", f"/{path}" if path else "/v1", api_key)

    def model(self) -> str:
        """The first it serves. Raises SpecEngineError."""
        try:
            found: Any = json.loads(self._get(f"{self.base}/models"))
            return str(found["data"][0]["id"])
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            raise SpecEngineError(
                f"{self.root}{self.base}/models does not tell a model ({error}); is a server "
                "there? Its model can be named with --model"
            ) from error

    def spec_counts(self) -> SpecCounts | None:
        """None where it tells none."""
        try:
            text = self._get("/metrics")
        except OSError:
            return None
        for names in _COUNTERS:
            found = [_sum(text, name) for name in names]
            if found[0] is not None and found[1] is not None:
                return SpecCounts(found[0], found[1])
        return None

    def headers(self) -> bytes:
        lines = "Content-Type: application/json\r\nAccept: text/event-stream\r\n"
        if self.api_key is not None:
            lines += f"Authorization: Bearer {self.api_key}\r\n"
        return lines.encode()

    def _get(self, path: str) -> str:
        request = urllib.request.Request(self.root + path)
        if self.api_key is not None:
            request.add_header("Authorization", f"Bearer {self.api_key}")
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            return str(answer.read().decode())


def _sum(text: str, name: str) -> float | None:
    """Over all samples of a counter, whatever their labels."""
    values = [
        float(line.split()[-1])
        for line in text.splitlines()
        if line.startswith(name) and line[len(name) : len(name) + 1] in ("{", " ")
    ]
    return sum(values) if values else None
