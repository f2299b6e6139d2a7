"""Sums of what two GPUs have, in one kernel, over memory that each has mapped of the other."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from specengine.kernels.cuda import program
from specengine.kernels.cuda.program import compiled
from specengine.kernels.dispatch import has_dependent_launch

_SOURCE = Path(__file__).parents[1] / "cuda" / "pair_sum.cu"
_CHUNK = 16  # bytes of a thread
_THREADS, _BLOCKS = 128, 2048  # as in the source
_WORD = 4  # bytes of a chunk that a word of 8 carries

DTYPES = (torch.bfloat16, torch.float32)  # that it adds
LARGEST = _CHUNK * _THREADS * _BLOCKS  # bytes of a sum
MAILBOX = 2 * LARGEST * 8 // _WORD  # bytes
_PATIENCE = 600  # seconds: a rank may load or capture while the other waits


def takes(x: Tensor) -> bool:
    """Whether it does, by shape and dtype alone: both ranks must decide alike."""
    size = x.numel() * x.itemsize
    return x.dtype in DTYPES and 0 < size <= LARGEST and size % _CHUNK == 0


def can_run(device: torch.device) -> bool:
    """Whether CUDA C++ can be compiled here, for a card of this generation."""
    return program.available() and has_dependent_launch(torch.empty(0, device=device))


class PairSum:
    """One rank's side. Both ranks make the same calls, in one order, each on one stream or on
    streams that wait for each other; captured ones count by their replays."""

    def __init__(self, mailbox: Tensor, theirs: Tensor) -> None:
        """uint8 [MAILBOX] each, zeros before either rank calls: this rank's own memory, and that
        of the other's, mapped here."""
        self._mailbox, self._theirs = mailbox, theirs
        self._turns = torch.zeros(_BLOCKS, dtype=torch.int32, device=mailbox.device)

    def __call__(
        self, x: Tensor, stream: Tensor | None = None, gives_up_after: int | None = None
    ) -> Tensor:
        """``sum over ranks of x``, rounded to its dtype, or ``stream + `` that, rounded again.

        x: what `takes` says. stream: of its shape and dtype, the same on both ranks. Neither is
        modified. gives_up_after: seconds, after which the result may be anything, and no later
        call may be made; None: after ten minutes the kernel fails, and with it all of CUDA.
        """
        own, before = _aligned(x), None if stream is None else _aligned(stream)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        chunks = x.numel() * x.itemsize // _CHUNK
        defines = (
            ("TYPE", 0),
            ("WIDE", int(x.dtype == torch.float32)),
            ("STREAM", int(stream is not None)),
        )
        kernel = compiled(_SOURCE, "pair_sum", defines, 0, x.device.index or 0)
        patience = _PATIENCE if gives_up_after is None else gives_up_after
        kernel.launch(
            (-(-chunks // _THREADS), 1, 1),
            _THREADS,
            0,
            (
                own,
                before,
                out,
                self._mailbox,
                self._theirs,
                self._turns,
                chunks,
                patience,
                int(gives_up_after is not None),
            ),
        )
        return out


def _aligned(x: Tensor) -> Tensor:
    """With its rows one behind the other, from a multiple of 16 bytes on."""
    x = x.contiguous()
    return x if x.data_ptr() % _CHUNK == 0 else x.clone()
