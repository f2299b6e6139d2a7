"""What a step bench gives back, and its JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from specengine.lab.card import Card
from specengine.lab.files import finite
from specengine.lab.step.attribution import NodeTime
from specengine.lab.throughput.workload import Workload

PARTS = {
    "draft": "forwards of the draft model, without its head",
    "draft head": "the draft's head and its best token, of every step",
    "verify": "the target's forward over the root and the drafts, without its head",
    "verify head": "the target's head; in captured rounds of greedy requests, the best token too",
    "sample": "choosing tokens otherwise: temperature, top-k and top-p, edits of logits",
    "begin": "state of the requests, and what joins the parts before verification ends",
    "accept": "counting accepted drafts, and the next round's inputs",
    "keep": "moving the KV of a tree's accepted path",
    "observe": "the draft model over what was verified",
    "prepare": "building the batch to verify",
    "host": "scheduling, committing, handing out",
}


@dataclass(frozen=True)
class Part:
    """Of one round. Seconds; idle: the device waits before its kernels, within the round."""

    name: str
    seconds: float
    idle: float = 0.0
    kernels: int | None = None
    bytes: float | None = None  # that must be read
    operations: float | None = None
    least: float | None = None  # seconds that the card needs for these

    @property
    def fraction(self) -> float | None:
        """Of the card's limit."""
        return None if self.least is None or not self.seconds else self.least / self.seconds


@dataclass(frozen=True)
class Step:
    """Rounds of a batch. between: seconds from one round's last kernel to the next one's first;
    null where the host runs the parts itself. host: seconds a round, while the device runs; calls:
    those of the driver, a round; nodes: of the graph, in their order."""

    batch_size: int
    is_captured: bool
    steps: float  # tokens drafted, of each request
    context: float  # tokens of each request whose KV is kept, on average
    rounds: int
    seconds: float  # of a round
    parts: list[Part]
    between: float | None = None
    host: dict[str, float] = field(default_factory=dict)
    calls: dict[str, float] = field(default_factory=dict)
    nodes: list[NodeTime] = field(default_factory=list)

    @property
    def least(self) -> float | None:
        known = [part.least for part in self.parts if part.least is not None]
        return sum(known) if known else None


@dataclass(frozen=True)
class Report:
    date: str
    environment: dict[str, Any]
    model: dict[str, Any]
    options: dict[str, Any]  # of speculation, those that are not the defaults
    workload: Workload
    card: Card
    limit: str  # how the card's limit was reckoned
    points: list[Step]

    @property
    def title(self) -> str:
        algorithm = self.options.get("algorithm", "no speculation")
        return f"Where a round's time goes: {self.model['name']}, {algorithm}"

    def to_json(self) -> str:
        whole = {"title": self.title, "parts": PARTS, **asdict(self)}
        for written, step in zip(whole["points"], self.points, strict=True):
            written["least"] = step.least
        return json.dumps(finite(whole), indent=1, ensure_ascii=False) + "\n"
