"""Rows fed otherwise in training than in serving. No edit of the files mends that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from specengine.lab.doctor.examined_drafter import ExaminedDrafter
from specengine.lab.doctor.hypothesis import Hypothesis, Trial

_RULE = "row i takes feature i and token i + 1, is at position i and learns token i + 2"


def hypotheses(drafter: ExaminedDrafter, trial: Trial) -> Iterator[Hypothesis]:
    if not drafter.has_features:
        return
    if drafter.algorithm == "DFLASH":
        yield from _of_blocks(trial)
        return
    for token, label, claim in (
        (-1, 0, "rows took the current token, and not the next one"),
        (-1, -1, "rows took the current token and learnt the next one, which is known by then"),
        (0, -1, "rows learnt to repeat the token that they took"),
        (1, 1, "rows took the feature of one token earlier than serving has"),
        (1, 0, "rows took the token that they learnt to say"),
    ):
        view = replace(trial.view, token_shift=token, label_shift=label)
        yield Hypothesis(
            "token shift",
            f"in training, {claim}",
            f"train again: {_RULE}",
            view=view,
            other_tokens=label != 0,
        )
    yield Hypothesis(
        "positions",
        "in training, all levels of a row were at one position",
        "train again: level k of row i is at position i + k",
        view=replace(trial.view, position_step=0),
    )
    if drafter.algorithm != "EAGLE3":
        yield Hypothesis(
            "feature norm",
            "in training, features were the target's states before its final norm",
            "train again on the states after the target's final norm, which its head reads",
            view=replace(trial.view, before_norm=True),
        )


def _of_blocks(trial: Trial) -> Iterator[Hypothesis]:
    """Rows of a block take no token but the root and masks."""
    yield Hypothesis(
        "token shift",
        "in training, rows of a block learnt the token after their own place",
        "train again: row i of a block is i steps behind its root, and learns the token there",
        view=replace(trial.view, label_shift=1),
        other_tokens=True,
    )
    yield Hypothesis(
        "positions",
        "in training, all rows of a block were at its root's position",
        "train again: row i of a block is i positions behind its root",
        view=replace(trial.view, position_step=0),
    )
