"""What kernels on clusters of blocks are asked for, and refuse."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from specengine.kernels.accept import accept_sibling_cuda
from specengine.kernels.sample import row_cluster
from specengine.kernels.sample.draw_siblings import draw_siblings
from tests.kernels.sampled_world import random_round

ROWS = torch.zeros(2, 50)


def test_they_run_where_they_are_asked_for_by_name() -> None:
    assert row_cluster.takes("cuda", ROWS)
    assert not any(row_cluster.takes(backend, ROWS) for backend in ("auto", "torch", "triton"))


@pytest.mark.parametrize("length", [1, 65_536, 65_537, 151_936, 262_144])
def test_a_row_fits_its_form(length: int) -> None:
    form = row_cluster.ClusterForm.of(length)
    room = row_cluster.BLOCKS * form.threads * form.per_lane
    assert room - row_cluster.BLOCKS * form.threads < length <= room
    assert form.per_lane <= 32


@pytest.mark.parametrize(
    "rows",
    [ROWS.double(), torch.zeros(50, 2).T, ROWS[:0], torch.zeros(1, 1).expand(1, 262_145)],
    ids=["float64", "lying apart", "none", "too long"],
)
def test_what_they_cannot_take(rows: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="leave the backend"):
        row_cluster.takes("cuda", rows)
    with pytest.raises(ValueError, match="leave the backend"):
        draw_siblings(rows, torch.zeros(len(rows), 1).double(), backend="cuda")


def test_drafts_must_have_weights() -> None:
    drafts = random_round(random.Random(0), 2, 3, 9, tree=True)
    assert accept_sibling_cuda.takes("cuda", drafts)
    assert drafts.draft_BNV is not None
    for draft in (None, drafts.draft_BNV.double()):
        with pytest.raises(ValueError, match="float32 weights"):
            accept_sibling_cuda.takes("cuda", replace(drafts, draft_BNV=draft))
