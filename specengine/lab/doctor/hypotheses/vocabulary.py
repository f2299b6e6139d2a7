"""Which target tokens the drafter's own token ids mean."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from specengine.lab.doctor.examined_drafter import ExaminedDrafter
from specengine.lab.doctor.files import DraftFiles
from specengine.lab.doctor.hypothesis import Hypothesis, Trial


def hypotheses(drafter: ExaminedDrafter, trial: Trial) -> Iterator[Hypothesis]:
    files, vocab_size = trial.files, drafter.vocab_size
    for claim, ids in _readings(files):
        if _is_possible(ids, vocab_size) and not torch.equal(ids, _as_served(files)):
            offsets = ids - torch.arange(len(ids))
            yield Hypothesis(
                "d2t",
                claim,
                "d2t: store offsets, d2t[i] = target id of draft token i, less i (--write-fixed "
                "does it)",
                partial(DraftFiles.with_tensors, edited={"d2t": offsets}),
            )


def _readings(files: DraftFiles) -> Iterator[tuple[str, Tensor]]:
    d2t, t2d = files.get("d2t"), files.get("t2d")
    if d2t is None:
        return
    table = d2t.to(torch.int64)
    yield "d2t holds target ids, and is read as offsets", table
    if t2d is not None and int(t2d.bool().sum()) == len(table):
        yield "d2t is wrong, and t2d says which tokens the draft knows", t2d.bool().nonzero()[:, 0]
    yield "d2t is an offset the other way round", torch.arange(len(table)) - table
    yield "d2t maps nothing: draft ids are the target's", torch.arange(len(table))
    for step in (-1, 1):
        yield f"d2t is off by {-step}", _as_served(files) + step


def _as_served(files: DraftFiles) -> Tensor:
    d2t = files.get("d2t")
    assert d2t is not None
    return d2t.to(torch.int64) + torch.arange(len(d2t))


def _is_possible(ids: Tensor, vocab_size: int) -> bool:
    inside = int(ids.min()) >= 0 and int(ids.max()) < vocab_size
    return inside and len(set(ids.tolist())) == len(ids)
