from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from specengine.kernels.sample.edit_rows import count_tokens_, edit_rows_
from specengine.kernels.sample.types import ENDS, IN_PROMPT, DraftedNodes, EditTables

VOCAB = 70
pytestmark = pytest.mark.parametrize("backend", ["torch", "triton"])


def tables_of(device: torch.device) -> EditTables:
    """Rows 1 and 3 of the page table have slots 2 and 1; row 2 has none."""
    tables = EditTables.of(5, 3, VOCAB, device)
    generator = torch.Generator().manual_seed(0)
    tables.slots[1], tables.slots[3] = 2, 1
    tables.penalties[1] = torch.tensor([0.0, 0.0, 1.0])
    tables.penalties[2] = torch.tensor([0.7, -0.3, 1.8])
    tables.held_until[1] = 12
    tables.bias[1:, :9] = torch.randn(2, 9, generator=generator).to(device)
    tables.counts[2, [3, 60]] = torch.tensor([1.0, 4.0], device=device)
    tables.flags[2, [3, 5]] = IN_PROMPT
    tables.flags[1, [7, 8]] = ENDS | IN_PROMPT
    return tables


def read_plainly(
    row: list[float], tables: EditTables, slot: int, above: list[int], position: int
) -> list[float]:
    """The docstring, a token at a time."""
    frequency, presence, repetition = tables.penalties[slot].tolist()
    edited = []
    for token, x in enumerate(row):
        x += float(tables.bias[slot, token])
        count = float(tables.counts[slot, token]) + above.count(token)
        flags = int(tables.flags[slot, token])
        if count > 0 or flags & IN_PROMPT:
            x = x / repetition if x > 0 else x * repetition
        x = x - frequency * count - presence * (count > 0)
        is_held = position < int(tables.held_until[slot])
        edited.append(-math.inf if is_held and flags & ENDS else x)
    return edited


def check(found: Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(found.cpu(), torch.tensor(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("each", [3, 1], ids=["all nodes", "the last"])
def test_chains(each: int, device: torch.device, backend: str) -> None:
    tables, nodes = tables_of(device), 3
    rows = torch.tensor([3, 2, 1], device=device)
    starts = torch.tensor([10, 0, 5], device=device)
    tokens = torch.tensor([[9, 3, 3], [1, 2, 3], [60, 20, 20]], device=device)
    logits = 2 * torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(1)).to(device)
    logits = logits[: 3 * each]
    before = logits.tolist()
    edit_rows_(logits, tables, DraftedNodes(rows, starts, tokens), backend=backend)  # type: ignore[arg-type]
    expected = []
    for r, row in enumerate(before):
        request, node = r // each, r % each + nodes - each
        slot = int(tables.slots[rows[request]])
        above = tokens[request, 1 : node + 1].tolist()
        position = int(starts[request]) + node
        expected.append(read_plainly(row, tables, slot, above, position) if slot else row)
    check(logits, expected)
    assert bool(logits[0, 7].isinf()) == (each == nodes)
    assert not bool(logits[each - 1, 7].isinf()), "held no longer"


def test_trees(device: torch.device, backend: str) -> None:
    """0 - 1 - 3, and 2 beside 1."""
    tables = tables_of(device)
    rows, starts = torch.tensor([1], device=device), torch.tensor([5], device=device)
    tokens = torch.tensor([[60, 20, 21, 20]], device=device)
    mask = torch.eye(4, dtype=torch.bool, device=device)
    mask[:, 0] = True
    mask[3, 1] = True
    depths = torch.tensor([0, 1, 1, 2], device=device)
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(2)).to(device)
    before = logits.tolist()
    drafted = DraftedNodes(rows, starts, tokens, depths, mask[None])
    edit_rows_(logits, tables, drafted, backend=backend)  # type: ignore[arg-type]
    paths = [[], [20], [21], [20, 20]]
    check(
        logits,
        [
            read_plainly(row, tables, 2, above, 5 + len(above))
            for row, above in zip(before, paths, strict=True)
        ],
    )


def test_levels_of_trees_that_grow(device: torch.device, backend: str) -> None:
    """Two beams of two levels below unnamed roots: 2 and 3 stand below 1."""
    tables = tables_of(device)
    rows, starts = torch.tensor([3, 1], device=device), torch.tensor([10, 5], device=device)
    tokens = torch.tensor([[7, 8, 9, 10], [20, 3, 20, 60]], device=device)
    paths = [[1, 2], [1, 3]]
    mask = torch.zeros(2, 2, 4, dtype=torch.bool, device=device)
    for beam, path in enumerate(paths):
        mask[:, beam, path] = True
    depths = torch.ones(4, dtype=torch.int64, device=device)
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(3)).to(device)
    before = logits.tolist()
    drafted = DraftedNodes(rows, starts, tokens, depths, mask, has_root=False)
    edit_rows_(logits, tables, drafted, backend=backend)  # type: ignore[arg-type]
    expected = []
    for r, row in enumerate(before):
        request, beam = divmod(r, 2)
        slot = int(tables.slots[rows[request]])
        above = tokens[request, paths[beam]].tolist()
        expected.append(read_plainly(row, tables, slot, above, int(starts[request]) + 1))
    check(logits, expected)
    assert bool(logits[:2, 7].isinf().all())


def test_nodes_count_from_the_first_on(device: torch.device, backend: str) -> None:
    """Where it is not the root."""
    tables = tables_of(device)
    rows, starts = torch.tensor([1], device=device), torch.tensor([5], device=device)
    depths = torch.zeros(2, dtype=torch.int64, device=device)
    tokens, mask = torch.tensor([[20, 21]], device=device), torch.eye(2).bool()[None].to(device)
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(4)).to(device)
    before = logits.tolist()
    drafted = DraftedNodes(rows, starts, tokens, depths, mask, has_root=False)
    edit_rows_(logits, tables, drafted, backend=backend)  # type: ignore[arg-type]
    given = zip(before, [[20], [21]], strict=True)
    check(logits, [read_plainly(row, tables, 2, above, 5) for row, above in given])


def test_counting(device: torch.device, backend: str) -> None:
    tables = tables_of(device)
    before = tables.counts.clone()
    rows = torch.tensor([1, 2, 3, 0], device=device)
    tokens = torch.tensor([[4, 4, 5], [4, 4, 4], [6, 7, 8], [1, 1, 1]], device=device)
    last = torch.tensor([2, 2, 0, 1], device=device)
    count_tokens_(tables, rows, tokens, last, backend=backend)  # type: ignore[arg-type]
    before[2, 4] += 2
    before[2, 5] += 1
    before[1, 6] += 1
    assert torch.equal(tables.counts, before)
