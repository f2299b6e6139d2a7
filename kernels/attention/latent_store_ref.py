"""Latents and rotated queries in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.kernels.attention.rope_ref import rotate
from specengine.kernels.kv.fp8_rows import write_rows
from specengine.kernels.linear.norm_ref import rms_norm


def latent_store(
    q: Tensor,
    compressed: Tensor,
    weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin_cache: Tensor,
    has_pairs: bool,
    out: Tensor,
    cache: Tensor,
    loc: Tensor,
) -> None:
    rank = len(weight)
    heads = torch.cat((q, compressed[:, None, rank:]), 1)
    if has_pairs:
        heads = torch.cat((heads[..., ::2], heads[..., 1::2]), -1)
    rotated = rotate(heads, positions, cos_sin_cache)
    normed = rms_norm(compressed[:, :rank], weight, eps)
    write_rows(cache, loc, torch.cat((normed[:, None], rotated[:, -1:]), -1))
    out.copy_(rotated[:, :-1])
