from __future__ import annotations

import pytest
import torch

from specengine.kernels.accept_chain import RoundState, Simulated, accept_chain, begin_round

pytestmark = pytest.mark.parametrize("backend", ["torch", "triton"])


def state_of(lens: list[int], roots: list[int], steps: int, device: torch.device) -> RoundState:
    state = RoundState.of(len(lens), 4, steps, device)
    state.lens.copy_(torch.tensor(lens))
    state.roots.copy_(torch.tensor(roots))
    return state


def test_the_matching_run_is_accepted(device: torch.device, backend: str) -> None:
    chosen = torch.tensor([[5, 6, 7], [5, 9, 7], [1, 6, 7], [3, 3, 3]], device=device)
    drafts = torch.tensor([[5, 6], [5, 6], [5, 6], [3, 3]], device=device)
    rows = torch.tensor([1, 4, 2, 0], device=device)
    state = state_of([0, 10, 20, 30, 40], [0, 1, 2, 3, 4], 2, device)
    accepted = accept_chain(state, rows, chosen, drafts, 100, backend=backend)  # type: ignore[arg-type]
    assert accepted.tolist() == [2, 1, 0, 2]
    if device.type == "cuda":
        torch.cuda.synchronize()
    outcomes = state.outcomes[0, :, :4].tolist()
    assert outcomes == [[2, 5, 6, 7], [1, 5, 9, 7], [0, 1, 6, 7], [2, 3, 3, 3]]
    assert state.lens.tolist() == [0, 13, 21, 30, 42]
    assert state.roots.tolist() == [0, 7, 1, 3, 9]


def test_a_request_may_limit_what_stands(device: torch.device, backend: str) -> None:
    chosen = torch.tensor([[5, 6, 7], [5, 9, 7], [1, 6, 7]], device=device)
    drafts = torch.tensor([[5, 6], [5, 6], [1, 6]], device=device)
    rows = torch.tensor([1, 3, 2], device=device)
    state = state_of([0, 10, 20, 30], [0, 1, 2, 3], 2, device)
    state.limits.copy_(torch.tensor([2, 1, 0, 2]))
    accepted = accept_chain(state, rows, chosen, drafts, 100, backend=backend)  # type: ignore[arg-type]
    assert accepted.tolist() == [1, 1, 0]
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert state.outcomes[0, :3, 0].tolist() == [1, 1, 0]
    assert state.lens.tolist() == [0, 12, 21, 32]
    assert state.roots.tolist() == [0, 6, 1, 9]
    state.limits.zero_()
    accept_chain(state, rows, chosen, drafts, 100, Simulated(2, 0.0), backend=backend)  # type: ignore[arg-type]
    assert state.lens.tolist() == [0, 13, 22, 33]


def test_without_drafts_a_token_is_chosen(device: torch.device, backend: str) -> None:
    chosen = torch.tensor([[5], [6]], device=device)
    drafts = torch.empty(2, 0, dtype=torch.int64, device=device)
    rows = torch.tensor([1, 2], device=device)
    state = state_of([0, 7, 98], [0, 0, 0], 0, device)
    accepted = accept_chain(state, rows, chosen, drafts, 99, backend=backend)  # type: ignore[arg-type]
    assert accepted.tolist() == [0, 0]
    assert state.lens.tolist() == [0, 8, 98], "the context has an end"
    assert state.roots.tolist() == [0, 5, 6]


def test_rounds_take_turns(device: torch.device, backend: str) -> None:
    state = state_of([0, 7, 9], [0, 70, 90], 0, device)
    rows = torch.tensor([2, 1], device=device)
    lens, roots = begin_round(state, rows, backend=backend)  # type: ignore[arg-type]
    assert (lens.tolist(), roots.tolist(), state.turn.item()) == ([9, 7], [90, 70], 1)
    begin_round(state, rows, backend=backend)  # type: ignore[arg-type]
    assert state.turn.item() == 0


def test_simulated_counts(device: torch.device, backend: str) -> None:
    chosen = torch.zeros(1, 4, dtype=torch.int64, device=device)
    drafts, rows = torch.ones(1, 3).long().to(device), torch.tensor([1], device=device)
    state = state_of([0, 4], [0, 0], 3, device)
    counts = []
    for _ in range(40):
        simulated = Simulated(1, 0.5)
        counts += accept_chain(
            state,
            rows,
            chosen,
            drafts,
            10**6,
            simulated,
            backend=backend,  # type: ignore[arg-type]
        ).tolist()
    assert set(counts) == {1, 2}
    assert 10 <= counts.count(2) <= 30
    assert state.lens[1] == 4 + sum(counts) + 40
