"""Masks of trees, a bit a key, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def pack_tree_mask(
    mask_BNM: Tensor, num_queries_B: Tensor, seq_lens_B: Tensor, starts_B: Tensor, out: Tensor
) -> None:
    num_past = mask_BNM.shape[2] - mask_BNM.shape[1]
    places = 1 << torch.arange(8, device=out.device)
    lens = zip(num_queries_B.tolist(), seq_lens_B.tolist(), starts_B.tolist(), strict=True)
    for mask_NM, (count, keys, start) in zip(mask_BNM, lens, strict=True):
        if count == 0:
            continue
        nodes = min(count + num_past, keys)
        seen = torch.ones(count, keys, dtype=torch.uint8, device=out.device)
        seen[:, keys - nodes :] = mask_NM[:count, count + num_past - nodes : count + num_past]
        bits = pad(seen.view(-1), (0, -count * keys % 8)).view(-1, 8)
        out[start : start + len(bits)] = (bits * places).sum(1)
