"""What may be wrong with a drafter, and how its rows are fed when it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from specengine.lab.doctor.files import DraftFiles

SERVED = "served"


@dataclass(frozen=True)
class View:
    """How the drafter is fed and judged. As served: row i takes the target's feature i and token
    i + 1, is at position i, and is right when it says token i + 2; each further level is
    one position on.

    text: which rendering of the prompts. token_shift, label_shift: added to the indices of what a
    row takes and of what it should say. position_step: positions from level to level.
    before_norm: the feature is the target's last state without its final norm.
    """

    text: str = SERVED
    token_shift: int = 0
    label_shift: int = 0
    position_step: int = 1
    before_norm: bool = False


@dataclass(frozen=True)
class Trial:
    """A drafter as it might be meant."""

    files: DraftFiles
    view: View = field(default_factory=View)


Edit = Callable[[DraftFiles], DraftFiles]


@dataclass(frozen=True)
class Hypothesis:
    """suspect: the kind of mistake. claim: what would be so. remedy: what to do if it is.

    edit: makes the files what they should be; None where no edit of them can. other_tokens: it is
    judged on other tokens, which may be easier or harder to foresee, so that it must gain much.
    """

    suspect: str
    claim: str
    remedy: str
    edit: Edit | None = None
    view: View | None = None
    other_tokens: bool = False

    def apply(self, trial: Trial) -> Trial:
        files = trial.files if self.edit is None else self.edit(trial.files)
        return replace(trial, files=files, view=self.view or trial.view)
