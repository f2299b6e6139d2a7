from __future__ import annotations

import pytest
import torch

from specengine.kernels.accept.accept_chain import accept_chain, begin_round, commit_chain
from specengine.kernels.accept.types import Accepted, RoundState, Simulated

pytestmark = pytest.mark.parametrize("backend", ["torch", "triton"])


def state_of(lens: list[int], roots: list[int], steps: int, device: torch.device) -> RoundState:
    state = RoundState.of(len(lens), 4, steps, device)
    state.lens.copy_(torch.tensor(lens))
    state.roots.copy_(torch.tensor(roots))
    return state


def test_matching_drafts_are_accepted(device: torch.device, backend: str) -> None:
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


def test_request_limits_how_many_drafts_are_accepted(device: torch.device, backend: str) -> None:
    chosen = torch.tensor([[5, 6, 7], [5, 9, 7], [1, 6, 7]], device=device)
    drafts = torch.tensor([[5, 6], [5, 6], [1, 6]], device=device)
    rows = torch.tensor([1, 3, 2], device=device)
    state = state_of([0, 10, 20, 30], [0, 1, 2, 3], 2, device)
    state.max_accepted.copy_(torch.tensor([2, 1, 0, 2]))
    accepted = accept_chain(state, rows, chosen, drafts, 100, backend=backend)  # type: ignore[arg-type]
    assert accepted.tolist() == [1, 1, 0]
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert state.outcomes[0, :3, 0].tolist() == [1, 1, 0]
    assert state.lens.tolist() == [0, 12, 21, 32]
    assert state.roots.tolist() == [0, 6, 1, 9]
    state.max_accepted.zero_()
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


@pytest.mark.parametrize("steps", [1, 3, 8])
def test_commit_moves_requests_on_by_what_the_rule_accepted(
    steps: int, device: torch.device, backend: str
) -> None:
    """As a loop over the requests does: row 0 is padding, and one request is at the context's
    end. Drafts are columns of a wider tensor."""
    context, draw = 60, torch.Generator().manual_seed(steps)
    before, roots = [0, 10, 55, 30, 58], [0, 1, 2, 3, 4]
    rows, batch = [4, 2, 0, 1, 0], 5
    wide = torch.randint(100, (batch, steps + 2), generator=draw)
    last = torch.randint(100, 200, (batch,), generator=draw)
    ends = [0, steps, steps, steps // 2, 1]
    state = RoundState.of(len(before), batch, steps, device)
    state.lens.copy_(torch.tensor(before))
    state.roots.copy_(torch.tensor(roots))
    state.turn.fill_(1)
    drafts = wide.clone().to(device)[:, :steps]
    accepted = Accepted(torch.tensor(ends, device=device), last.to(device))
    given = state, torch.tensor(rows, device=device), drafts, accepted, context
    emitted = commit_chain(*given, backend=backend)  # type: ignore[arg-type]
    if device.type == "cuda":
        torch.cuda.synchronize()
    lens = list(before)
    for b, (row, end, token) in enumerate(zip(rows, ends, last.tolist(), strict=True)):
        path = [*wide[b, :steps].tolist(), token]
        path[end] = token
        assert emitted[b].tolist() == path
        assert state.outcomes[1, b, : steps + 2].tolist() == [end, *path]
        if row:
            lens[row], roots[row] = min(lens[row] + end + 1, context - 1), token
    assert (state.lens.tolist(), state.roots.tolist()) == (lens, roots)
    assert not state.outcomes[0].any(), "the other turn's"
    assert torch.equal(drafts.cpu(), wide[:, :steps]), "drafts are not written over"
