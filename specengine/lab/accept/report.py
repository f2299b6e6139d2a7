"""What a bench gives back, and its JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from specengine.lab.accept.speed import Speed
from specengine.lab.accept.summary import Difference, Summary
from specengine.lab.files import finite

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
    "rounds in which position d was accepted. Conditional: the share of the rounds in which it was "
    "tried, that is, all above it was accepted, something was drafted there, and the answer had "
    "not ended."
)
INTERVALS = (
    "Intervals are 95% percentile bootstrap intervals over prompts (all rounds of a prompt are "
    "drawn together, each prompt set by itself); differences are paired by prompt."
)


@dataclass(frozen=True)
class RunResult:
    """One setting at one temperature."""

    temperature: float
    conversation: str  # the setting whose answers are between the questions
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
        return json.dumps(finite(whole), indent=1, ensure_ascii=False) + "\n"
