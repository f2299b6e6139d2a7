"""What an examination found."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from specengine.lab.doctor.checks import Check
from specengine.lab.doctor.draft_rows import LEVELS
from specengine.lab.doctor.scores import Score
from specengine.lab.doctor.search import HEALTHY, Finding

Status = Literal["healthy", "cause found", "no cause found"]
EXIT_CODES: dict[Status, int] = {"healthy": 0, "cause found": 1, "no cause found": 2}


@dataclass(frozen=True)
class Diagnosis:
    """before, after: as configured, and without the causes. refusal: why the engine does not load
    the draft as it is. written: directory of the fixed draft. form: what the draft's files are.
    not_judged: what serving runs of the draft and no trial does."""

    target: str
    draft: str
    algorithm: str
    num_texts: int
    refusal: str
    before: Score | None
    after: Score | None
    causes: list[Finding]
    tried: list[Finding]
    checks: list[Check]
    written: str | None
    form: list[str] = field(default_factory=list)
    not_judged: list[str] = field(default_factory=list)

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if not check.holds and check.explains]

    @property
    def status(self) -> Status:
        if self.causes or self.failed or self.refusal:
            return "cause found"
        works = self.before is not None and self.before.first.value >= HEALTHY
        return "healthy" if works else "no cause found"

    @property
    def verdict(self) -> list[str]:
        """Lines of plain text."""
        lines = [f"{self.status}: {self._summary()}"]
        for cause in self.causes:
            lines += [f"cause: {cause.suspect}: {cause.claim}", f"remedy: {cause.remedy}"]
        for check in self.failed:
            lines += [f"cause: not so: {check.name} ({check.measured})", f"remedy: {check.remedy}"]
        if self.refusal and not self.causes:
            lines.append(f"cause: {self.refusal}")
        if self.written is not None:
            lines.append(f"the fixed draft is in {self.written}")
        if self.status == "no cause found":
            lines.append(_ADVICE)
        return lines

    def to_json(self) -> str:
        found: dict[str, Any] = asdict(self)
        return json.dumps({"status": self.status, "verdict": self.verdict, **found}, indent=1)

    def _summary(self) -> str:
        before = "the engine refuses the draft" if self.before is None else _scores(self.before)
        if not self.causes or self.after is None:
            return before
        return f"{before}; without what is wrong, {_scores(self.after)}"


_ADVICE = (
    "acceptance is low, and nothing that was tried raises it: the draft may belong to another "
    "target, or be hardly trained"
)


def _scores(one: Score) -> str:
    tau = f"τ {one.tau.value:.2f} for a chain of {LEVELS}"
    return f"the first drafted token is accepted {one.first.value:.1%} of the time ({tau})"
