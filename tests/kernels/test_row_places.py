from __future__ import annotations

import torch

from specengine.kernels.kv.row_places import row_places


def test_places_follow_the_lengths(device: torch.device) -> None:
    table = torch.arange(30, dtype=torch.int32, device=device).view(3, 10) + 100
    rows = torch.tensor([2, 1], device=device)
    lens = torch.tensor([4, 0], device=device)
    for backend in ("torch", "triton"):
        found = row_places(table, rows, lens, 3, offset=1, backend=backend)
        assert found.positions_T.tolist() == [5, 6, 7, 1, 2, 3]
        assert found.slots_T.tolist() == [125, 126, 127, 111, 112, 113]
        assert found.seq_lens_B.tolist() == [8, 4]


def test_places_past_the_table_are_nobodys(device: torch.device) -> None:
    table = torch.arange(1, 9, dtype=torch.int32, device=device).view(2, 4)
    rows, lens = torch.tensor([1], device=device), torch.tensor([3], device=device)
    for backend in ("torch", "triton"):
        found = row_places(table, rows, lens, 3, backend=backend)
        assert found.slots_T.tolist() == [8, 0, 0]
        assert found.positions_T.tolist() == [3, 3, 3]
        assert found.seq_lens_B.tolist() == [6]


def test_positions_of_a_tree(device: torch.device) -> None:
    table = torch.arange(16, dtype=torch.int32, device=device).view(2, 8)
    rows, lens = torch.tensor([1, 0], device=device), torch.tensor([5, 1], device=device)
    depths = torch.tensor([1, 1, 4, 0, 2, 2], device=device)
    for backend in ("torch", "triton"):
        found = row_places(table, rows, lens, 3, 1, depths, backend=backend)
        assert found.positions_T.tolist() == [6, 6, 7, 1, 3, 3]
        assert found.slots_T.tolist() == [14, 15, 0, 2, 3, 4]
        assert found.seq_lens_B.tolist() == [9, 5]
