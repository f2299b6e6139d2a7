"""What a serving bench gives back, and its JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from specengine.lab.files import finite
from specengine.lab.serving.measures import DEFINITIONS, Point


@dataclass(frozen=True)
class Report:
    """label: of the server, as the user calls it. requests: what was asked, in fields. details:
    of each point, each request's times in seconds from sending, where wanted."""

    date: str
    environment: dict[str, Any]
    label: str
    url: str
    model: str
    requests: dict[str, Any]
    slo: dict[str, float]
    points: list[Point] = field(default_factory=list)
    details: list[list[dict[str, Any]]] = field(default_factory=list)

    @property
    def title(self) -> str:
        return f"{self.label} serving {self.model}"

    @property
    def num_failed(self) -> int:
        return sum(one.num_requests - one.num_finished for one in self.points)

    def to_json(self) -> str:
        whole = {"title": self.title, "definitions": DEFINITIONS, **asdict(self)}
        for row, point in zip(whole["points"], self.points, strict=True):
            row["name"] = point.load.name
        return json.dumps(finite(whole), indent=1, ensure_ascii=False) + "\n"
