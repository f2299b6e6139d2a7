"""What a throughput bench gives back, of our engine or of a peer, and its JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from specengine.lab.card import Card
from specengine.lab.files import finite
from specengine.lab.throughput.workload import Workload

PLAIN = "no speculation"
DEFINITIONS = {
    "rates": (
        "Output tokens a second of whole requests, from the first one added to the last token of "
        "the last one, prefill included; one a repeat. The best counts."
    ),
    "tau": (
        "The accepted length: tokens that a round of a request emits, the bonus token included: 1 "
        "+ accepted / rounds, by the engine's own counters of the best run."
    ),
    "rounds": "Forwards of the target after the prefill, a request.",
}


@dataclass(frozen=True)
class Point:
    """A batch size. tau, rounds and drafted are null where an engine does not tell."""

    batch_size: int
    rates: tuple[float, ...]
    tau: float | None = None
    rounds: float | None = None
    drafted: float | None = None  # tokens a round of a request
    limit: float | None = None  # the rate that the card allows

    @property
    def rate(self) -> float:
        return max(self.rates)

    @property
    def fraction(self) -> float | None:
        """Of the card's limit."""
        return None if self.limit is None else self.rate / self.limit


@dataclass(frozen=True)
class Startup:
    """Seconds. process: from its start, imports and all, until this engine was ready."""

    total: float
    phases: dict[str, float] = field(default_factory=dict)
    process: float | None = None


@dataclass(frozen=True)
class Peers:
    """rates: output tokens a second, by engine and batch size."""

    date: str
    source: str
    engines: dict[str, str]  # their versions and settings
    rates: dict[str, dict[int, float]]
    startup_seconds: dict[str, str]


@dataclass
class Setting:
    name: str
    options: dict[str, Any]
    startup: Startup | None = None
    peers: Peers | None = None
    is_lossy: bool = False  # the accepted length was forced, or a rule does not keep the output
    graphs: dict[str, Any] = field(default_factory=dict)  # captures, replays, fallbacks, by kind
    points: list[Point] = field(default_factory=list)

    def at(self, batch_size: int) -> Point | None:
        return next((one for one in self.points if one.batch_size == batch_size), None)


@dataclass(frozen=True)
class Report:
    date: str
    environment: dict[str, Any]
    engine: str  # its name and version
    model: dict[str, Any]
    workload: Workload
    settings: list[Setting]
    card: Card | None = None
    limit: str = ""  # how the card's limit was reckoned

    @property
    def title(self) -> str:
        return f"Offline throughput of {self.engine} on {self.model['name']}"

    @property
    def plain(self) -> Setting | None:
        """What the others are compared with."""
        if len(self.settings) < 2:
            return None
        return next((one for one in self.settings if one.name == PLAIN), None)

    def ratio(self, setting: Setting, point: Point) -> float | None:
        """Of a rate to that of plain decoding in the same run."""
        plain = None if self.plain is None else self.plain.at(point.batch_size)
        return None if plain is None or setting is self.plain else point.rate / plain.rate

    def to_json(self) -> str:
        whole = {"title": self.title, "definitions": DEFINITIONS, **asdict(self)}
        for written, setting in zip(whole["settings"], self.settings, strict=True):
            for row, point in zip(written["points"], setting.points, strict=True):
                row |= {
                    "rate": point.rate,
                    "fraction_of_limit": point.fraction,
                    "ratio_to_plain": self.ratio(setting, point),
                }
        return json.dumps(finite(whole), indent=1, ensure_ascii=False) + "\n"
