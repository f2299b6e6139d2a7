"""The embedding and the state, joined the wrong way round."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from specengine.lab.doctor.files import DraftFiles
from specengine.lab.doctor.hypothesis import Hypothesis, Trial
from specengine.lab.doctor.patient import Patient


def suspects(patient: Patient, trial: Trial) -> Iterator[Hypothesis]:
    """The two halves and their norms, each alone and both: trainers swap either."""
    files, anatomy = trial.files, patient.anatomy
    has_columns = bool(anatomy.joined) and files.has(*anatomy.joined)
    has_norms = bool(anatomy.joined_norms) and files.has(*anatomy.joined_norms)

    def columns(f: DraftFiles) -> DraftFiles:
        return swap_halves(f, anatomy.joined)

    def norms(f: DraftFiles) -> DraftFiles:
        return f.swapped(anatomy.joined_norms[0], anatomy.joined_norms[1])

    fixed = "(--write-fixed does it)"
    names, norm_names = ", ".join(anatomy.joined), " and ".join(anatomy.joined_norms)
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
