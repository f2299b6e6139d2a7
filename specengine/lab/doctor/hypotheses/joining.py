"""The embedding and the state, joined the wrong way round."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from specengine.lab.doctor.examined_drafter import ExaminedDrafter
from specengine.lab.doctor.files import DraftFiles
from specengine.lab.doctor.hypothesis import Hypothesis, Trial


def hypotheses(drafter: ExaminedDrafter, trial: Trial) -> Iterator[Hypothesis]:
    """The two halves and their norms, each alone and both: trainers swap either."""
    files, parts = trial.files, drafter.parts
    has_columns = bool(parts.joined) and files.has(*parts.joined)
    has_norms = bool(parts.joined_norms) and files.has(*parts.joined_norms)

    def columns(f: DraftFiles) -> DraftFiles:
        return swap_halves(f, parts.joined)

    def norms(f: DraftFiles) -> DraftFiles:
        return f.swapped(parts.joined_norms[0], parts.joined_norms[1])

    fixed = "(--write-fixed does it)"
    names, norm_names = ", ".join(parts.joined), " and ".join(parts.joined_norms)
    if has_columns:
        yield Hypothesis(
            "concatenation",
            "embedding and state are joined the other way round",
            f"{names}: exchange the two halves of the columns {fixed}",
            columns,
        )
    if has_norms:
        yield Hypothesis(
            "concatenation",
            "the norms of embedding and state carry each other's name",
            f"{norm_names}: exchange them {fixed}",
            norms,
        )
    if has_columns and has_norms:
        yield Hypothesis(
            "concatenation",
            "embedding and state are joined the other way round, and so are their norms",
            f"{names}: exchange the two halves of the columns; {norm_names}: exchange them {fixed}",
            lambda f: norms(columns(f)),
        )


def swap_halves(files: DraftFiles, names: tuple[str, ...]) -> DraftFiles:
    edited = {}
    for name in names:
        weight = files.get(name)
        assert weight is not None
        edited[name] = torch.cat(weight.chunk(2, dim=1)[::-1], dim=1)
    return files.with_tensors(edited)
