"""What a bench gives back, and its JSON."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specengine.core.errors import ConfigError
from specengine.lab.accept.speed import Speed
from specengine.lab.accept.summary import Difference, Summary

DEFINITION = (
    "τ, the accepted length, is the mean number of tokens that a round emits, the bonus token "
    "included: all tokens of all rounds over the number of rounds (micro-averaged; not a mean of "
    "prompts' means)."
)
ROUNDS = (
    "Every round counts: those in which nothing was drafted, and the last ones of an answer, whose "
    "drafts are shorter for want of room. Tokens decided after the end of an answer are not "
    "emitted and count nowhere. The first token of an answer comes from the prefill and belongs to "
    "no round."
)
POSITIONS = (
    "Position d is the d-th token below the root (in a tree: its depth). Joint: the share of all "
    "rounds in which position d stood. Conditional: the share of the rounds in which it was tried, "
    "that is, all above it stood, something was drafted there, and the answer had not ended."
)
INTERVALS = (
    "Intervals are 95% percentile bootstrap intervals over prompts (all rounds of a prompt are "
    "drawn together, each prompt set by itself); differences are paired by prompt."
)


@dataclass(frozen=True)
class RunResult:
    """One setting at one temperature."""

    temperature: float
    conversation: str  # the setting whose answers stand between the questions
    answers: int
    same_answers: int  # of these, token for token what that setting answered
    seconds: float
    skipped: tuple[str, ...]  # requests left out, and why
    summary: Summary


@dataclass
class SettingResult:
    name: str
    options: dict[str, Any]  # those that are not the defaults
    draft: dict[str, Any] | None = None  # path and hashes of the draft model
    draft_vocabulary: int | None = None  # tokens that it knows, where these are not the target's
    is_lossy: bool = False
    runs: list[RunResult] = field(default_factory=list)
    speed: Speed | None = None
    error: str | None = None  # why it, or what is missing of it, could not be measured


@dataclass(frozen=True)
class Report:
    date: str
    environment: dict[str, Any]
    target: dict[str, Any]
    data: list[dict[str, Any]]
    protocol: dict[str, Any]
    settings: list[SettingResult]
    differences: list[Difference]

    @property
    def title(self) -> str:
        sets = ", ".join(one["name"] for one in self.data)
        return f"Acceptance on {self.target['name']}: {sets}"

    def to_json(self) -> str:
        definitions = {
            "tau": DEFINITION,
            "rounds": ROUNDS,
            "positions": POSITIONS,
            "intervals": INTERVALS,
        }
        whole = {"title": self.title, "definitions": definitions, **asdict(self)}
        return json.dumps(_finite(whole), indent=1, ensure_ascii=False) + "\n"


def write_text(path: Path, text: str) -> None:
    """In one piece. Raises ConfigError where that cannot be done."""
    half = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        half.write_text(text, encoding="utf-8")
        os.replace(half, path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error


def _finite(value: Any) -> Any:
    """JSON knows no NaN: null stands for it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value
