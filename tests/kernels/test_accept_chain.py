from __future__ import annotations

import pytest
import torch

from specengine.kernels.accept_chain import accept_chain

BACKENDS = ["torch", "triton"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_matching_run_is_accepted(device: torch.device, backend: str) -> None:
    chosen = torch.tensor([[5, 6, 7], [5, 9, 7], [1, 6, 7], [3, 3, 3]], device=device)
    drafts = torch.tensor([[5, 6], [5, 6], [5, 6], [3, 3]], device=device)
    rows = torch.tensor([1, 4, 2, 0], device=device)
    lens = torch.tensor([0, 10, 20, 30, 40], device=device)
    roots = torch.tensor([0, 1, 2, 3, 4], device=device)
    outcome = accept_chain(chosen, drafts, rows, lens, roots, 100, backend=backend)  # type: ignore[arg-type]
    assert outcome.tolist() == [[2, 5, 6, 7], [1, 5, 9, 7], [0, 1, 6, 7], [2, 3, 3, 3]]
    assert lens.tolist() == [0, 13, 21, 30, 42]
    assert roots.tolist() == [0, 7, 1, 3, 9]


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_drafts_a_token_is_chosen(device: torch.device, backend: str) -> None:
    chosen = torch.tensor([[5], [6]], device=device)
    drafts = torch.empty(2, 0, dtype=torch.int64, device=device)
    rows = torch.tensor([1, 2], device=device)
    lens, roots = torch.tensor([0, 7, 98], device=device), torch.zeros(3).long().to(device)
    outcome = accept_chain(chosen, drafts, rows, lens, roots, 99, backend=backend)  # type: ignore[arg-type]
    assert outcome.tolist() == [[0, 5], [0, 6]]
    assert lens.tolist() == [0, 8, 98], "the context has an end"
    assert roots.tolist() == [0, 5, 6]


@pytest.mark.parametrize("backend", BACKENDS)
def test_forced_counts(device: torch.device, backend: str) -> None:
    chosen = torch.tensor([[5, 6, 7]], device=device)
    drafts = torch.tensor([[0, 0]], device=device)
    rows, forced = torch.tensor([1], device=device), torch.tensor([1], device=device)
    lens, roots = torch.tensor([0, 4], device=device), torch.tensor([0, 0], device=device)
    outcome = accept_chain(chosen, drafts, rows, lens, roots, 99, forced, backend=backend)  # type: ignore[arg-type]
    assert outcome.tolist() == [[1, 5, 6, 7]]
    assert (lens[1], roots[1]) == (6, 6)
