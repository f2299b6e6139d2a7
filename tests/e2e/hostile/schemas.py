"""Requests that schemathesis draws from the server's own /openapi.json, fitting it or not."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import hypothesis
import requests
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable

from tests.e2e.hostile.bodies import Hostile

BATCH = 40  # drawn at once


class Drawn:
    """Endless; one operation after the other."""

    def __init__(self, document: dict[str, Any], seed: int) -> None:
        from schemathesis import GenerationMode, openapi

        schema = openapi.from_dict(document)
        self._strategies = [
            operation.ok().as_strategy(generation_mode=mode)
            for operation in schema.get_all_operations()
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
        ]
        self._seed = seed
        self._requests = self._draw()

    def next(self) -> Hostile:
        return next(self._requests)

    def _draw(self) -> Iterator[Hostile]:
        for number, strategy in enumerate(cycle(list(self._strategies))):
            try:
                yield from _batch(strategy, self._seed + number)
            except Unsatisfiable:  # a GET without parameters has nothing that does not fit
                continue


def _batch(strategy: Any, seed: int) -> list[Hostile]:
    found: list[Hostile] = []

    @hypothesis.seed(seed)
    @settings(
        max_examples=BATCH,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(case: Any) -> None:
        found.append(_as_sent(case, len(found)))

    collect()
    return found


def _as_sent(case: Any, number: int) -> Hostile:
    if isinstance(case.body, dict) and "model" in case.body and number % 4:
        case.body["model"] = "tiny"  # else nearly all would end at an unknown model
    prepared = requests.Request(**case.as_transport_kwargs(base_url="http://x")).prepare()
    body = prepared.body or b""
    content = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else bytes(body)
    kind = str(prepared.headers.get("Content-Type", "application/json"))
    path = prepared.path_url
    return Hostile(f"{prepared.method} {path[:60]}", path, content, kind, str(prepared.method))
