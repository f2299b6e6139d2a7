"""Looks for what makes a drafter better: one change at a time, then the next on top of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations, product

from specengine.lab.doctor.draft_rows import Judgement
from specengine.lab.doctor.hypothesis import Hypothesis, Trial
from specengine.lab.doctor.scores import Gain, Score, gain, score
from specengine.lab.doctor.trial_runner import Refused, TrialRunner

# A gain in tau that is worth a cause, beyond what chance explains.
SMALLEST_GAIN = 0.05
# The same where it is judged on other tokens.
SMALLEST_GAIN_ELSEWHERE = 0.25
# Acceptance of the first token from which a drafter is of use.
HEALTHY = 0.3
_MOST_CAUSES = 3
_PAIRED = 5

Hypotheses = Callable[[Trial], Iterable[Hypothesis]]
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Finding:
    """after: None where the engine refuses the files, for the reason `refusal`."""

    suspect: str
    claim: str
    remedy: str
    before: Score | None
    after: Score | None
    gain: Gain | None  # None where nothing ran before
    refusal: str = ""
    can_write: bool = False
    other_tokens: bool = False

    @property
    def helps(self) -> bool:
        if self.after is None:
            return False
        is_useful = self.after.first.value >= HEALTHY
        if self.gain is None:
            return is_useful
        enough = SMALLEST_GAIN_ELSEWHERE if self.other_tokens else SMALLEST_GAIN
        gains = self.gain.tau.low > 0 and self.gain.tau.value >= enough
        return gains and (is_useful or not self.other_tokens)


@dataclass(frozen=True)
class Step:
    """A hypothesis, tried on a trial."""

    hypothesis: Hypothesis
    trial: Trial
    judged: Judgement | Refused
    finding: Finding


class Search:
    def __init__(self, runner: TrialRunner, hypotheses: Hypotheses, progress: Progress) -> None:
        self.runner = runner
        self.hypotheses = hypotheses
        self.progress = progress
        self.tried: list[Finding] = []
        self.causes: list[Finding] = []

    def run(self, trial: Trial, judged: Judgement | Refused) -> tuple[Trial, Judgement | Refused]:
        """The trial with every cause removed that was found."""
        for _ in range(_MOST_CAUSES):
            steps = [self._try(one, trial, judged) for one in self.hypotheses(trial)]
            best = _best(steps)
            if best is None and not is_healthy(judged):
                best = _best(self._pairs(steps, trial, judged))
            if best is None:
                break
            self.causes.append(best.finding)
            trial, judged = best.trial, best.judged
            if best.hypothesis.edit is None:
                break
        return trial, judged

    def _try(self, one: Hypothesis, trial: Trial, before: Judgement | Refused) -> Step:
        self.progress(one.claim)
        changed = one.apply(trial)
        judged = self.runner.run(changed)
        step = Step(one, changed, judged, _finding(one, before, judged))
        self.tried.append(step.finding)
        return step

    def _pairs(self, steps: list[Step], trial: Trial, before: Judgement | Refused) -> list[Step]:
        """Two mistakes can hide each other."""
        pairs = (pair for pair in _hopeful_pairs(steps, before) if _differ(*pair))
        return [self._try(_both(*pair), trial, before) for pair in pairs]


def _hopeful_pairs(steps: list[Step], before: Judgement | Refused) -> Iterable[tuple[Step, Step]]:
    """Of the changes that make the target's tokens likelier, any two. Where the engine refuses the
    files as they are: what lets it complain of something else, with any other change."""
    edits = [step for step in steps if step.hypothesis.edit is not None]
    if isinstance(before, Refused):
        further = [step for step in edits if step.finding.refusal != before.message]
        return product(further, edits)
    usual = float(before.logprobs.mean())
    hopeful = sorted((step for step in edits if _logprob(step) > usual), key=_logprob)
    return combinations(hopeful[::-1][:_PAIRED], 2)


def _differ(one: Step, other: Step) -> bool:
    return one.finding.suspect != other.finding.suspect


def is_healthy(judged: Judgement | Refused) -> bool:
    return not isinstance(judged, Refused) and float(judged.hits[:, 0].mean()) >= HEALTHY


def _finding(one: Hypothesis, before: Judgement | Refused, after: Judgement | Refused) -> Finding:
    had = None if isinstance(before, Refused) else before
    has = None if isinstance(after, Refused) else after
    return Finding(
        one.suspect,
        one.claim,
        one.remedy,
        before=None if had is None else score(had),
        after=None if has is None else score(has),
        gain=None if had is None or has is None else gain(has, had),
        refusal=after.message if isinstance(after, Refused) else "",
        can_write=one.edit is not None,
        other_tokens=one.other_tokens,
    )


def _best(steps: Iterable[Step]) -> Step | None:
    """The one with the highest tau among those that help."""
    helping: Iterator[Step] = (step for step in steps if step.finding.helps)
    return max(helping, key=_tau, default=None)


def _tau(step: Step) -> float:
    return step.finding.after.tau.value if step.finding.after else 0.0


def _logprob(step: Step) -> float:
    return step.finding.after.logprob if step.finding.after else float("-inf")


def _both(first: Step, second: Step) -> Hypothesis:
    one, other = first.hypothesis, second.hypothesis
    edit_one, edit_other = one.edit, other.edit
    assert edit_one is not None
    assert edit_other is not None
    return Hypothesis(
        f"{one.suspect} and {other.suspect}",
        f"{one.claim}; and {other.claim}",
        f"{one.remedy}; and {other.remedy}",
        lambda files: edit_other(edit_one(files)),
    )
