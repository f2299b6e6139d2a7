"""Recursive rejection in CUDA C++ (cuda/accept_sibling.cu): a cluster a request, in one launch."""

from __future__ import annotations

from pathlib import Path

import torch

from specengine.kernels.accept.types import Accepted, Draws, SampledRound
from specengine.kernels.cuda.program import compiled
from specengine.kernels.dispatch import Backend
from specengine.kernels.sample import row_cluster
from specengine.kernels.sample.keyed_uniform import LANE
from specengine.kernels.sample.row_cluster import BLOCKS, ClusterForm

_SOURCE = Path(__file__).parents[1] / "cuda" / "accept_sibling.cu"


def takes(backend: Backend, drafts: SampledRound) -> bool:
    """As row_cluster.takes, which also raises ValueError."""
    is_right = drafts.draft_BNV is not None and drafts.draft_BNV.dtype == torch.float32
    if backend == "cuda" and not is_right:
        raise ValueError('on clusters, drafts have float32 weights; leave the backend to "auto"')
    return is_right and row_cluster.takes(backend, drafts.target_TV, row_cluster.MOST_ROWS)


def accept_sibling(drafts: SampledRound, draws: Draws) -> Accepted:
    assert drafts.draft_BNV is not None
    target_TV, draft_BNV = drafts.target_TV.contiguous(), drafts.draft_BNV
    if draft_BNV.stride(2) != 1:
        draft_BNV = draft_BNV.contiguous()
    (batch, nodes), vocab = drafts.tokens_BN.shape, target_TV.shape[1]
    ends_B = torch.empty_like(drafts.roots_B, memory_format=torch.contiguous_format)
    found, form = Accepted(ends_B, torch.empty_like(ends_B)), ClusterForm.of(vocab)
    streams = ("ACCEPT", draws.accept), ("RESIDUAL", draws.residual), ("SAMPLE", draws.sample)
    has_numbers = "HAS_NUMBERS", int(drafts.numbers_BN is not None)
    defines = (*form.defines, has_numbers, ("LANE", LANE), *streams)
    index = target_TV.device.index or 0
    kernel = compiled(_SOURCE, "accept_sibling", defines, form.shared_bytes, index)
    small = (
        drafts.tokens_BN,
        drafts.parents_BN,
        drafts.depths_BN,
        drafts.tokens_BN if drafts.numbers_BN is None else drafts.numbers_BN,
        drafts.roots_B,
        drafts.greedy_B.view(torch.uint8),
        draws.seeds_B,
        draws.positions_B,
    )
    kernel.launch(
        (BLOCKS, batch, 1),
        form.threads,
        form.shared_bytes,
        (
            target_TV,
            drafts.target_sum_T.contiguous(),
            draft_BNV,
            *(one.contiguous() for one in small),
            found.ends_B,
            found.tokens_B,
            vocab,
            nodes,
            target_TV.stride(0),
            *draft_BNV.stride()[:2],
        ),
    )
    return found
