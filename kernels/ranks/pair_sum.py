"""Sums of what two GPUs have, in one kernel, over memory that each has mapped of the other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specengine.kernels.cuda import program
from specengine.kernels.cuda.program import compiled
from specengine.kernels.dispatch import has_dependent_launch

_SOURCE = Path(__file__).parents[1] / "cuda" / "pair_sum.cu"
_CHUNK = 16  # bytes
_THREADS, _BLOCKS, _SLOTS = 128, 2048, 2  # as in the source
_WORD = 4  # bytes of a chunk that a word of 8 carries
_FLAG = 32  # bytes from one block's to the next

DTYPES = (torch.bfloat16, torch.float32)  # that it adds
LARGEST = _CHUNK * _THREADS * _BLOCKS  # bytes of a sum
LARGEST_IN_WORDS = 1 << 20  # bytes of a sum; those of a larger one travel bare
BARE_CHUNKS = 4  # of a thread, where they do
_WORDS_AREA = _SLOTS * LARGEST * 8 // _WORD  # bytes
_BARE_AREA = _SLOTS * (LARGEST + _BLOCKS * _FLAG)
MAILBOX = _WORDS_AREA + _BARE_AREA
_PATIENCE = 600  # seconds: a rank may load or capture while the other waits


def takes(x: Tensor) -> bool:
    """Whether it does, by shape and dtype alone: both ranks must decide alike."""
    size = x.numel() * x.itemsize
    return x.dtype in DTYPES and 0 < size <= LARGEST and size % _CHUNK == 0


def can_run(device: torch.device) -> bool:
    """Whether CUDA C++ can be compiled here, for a card of this generation."""
    return program.available() and has_dependent_launch(torch.empty(0, device=device))


@dataclass(frozen=True)
class _Form:
    """How data travel, with the memory of this form alone."""

    bare: int  # 0: in words; else how many chunks a thread has
    mailbox: Tensor
    theirs: Tensor
    turns: Tensor  # int32 [_BLOCKS]


class PairSum:
    """One rank's side. Both ranks make the same calls, in one order, each on one stream or on
    streams that wait for each other; captured ones count by their replays."""

    def __init__(
        self,
        mailbox: Tensor,
        theirs: Tensor,
        largest_in_words: int = LARGEST_IN_WORDS,
        bare_chunks: int = BARE_CHUNKS,
    ) -> None:
        """mailbox, theirs: uint8 [MAILBOX] each, zeros before either rank calls: this rank's own
        memory, and that of the other's, mapped here. largest_in_words: bytes. bare_chunks: of a
        thread, at least 1. Both are the same on both ranks."""
        self._largest_in_words = largest_in_words
        self._turns = torch.zeros(2, _BLOCKS, dtype=torch.int32, device=mailbox.device)
        at = _WORDS_AREA
        self._words = _Form(0, mailbox[:at], theirs[:at], self._turns[0])
        self._bare = _Form(bare_chunks, mailbox[at:], theirs[at:], self._turns[1])

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
        size = x.numel() * x.itemsize
        form = self._words if size <= self._largest_in_words else self._bare
        chunks = size // _CHUNK
        defines = (
            ("TYPE", 0),
            ("WIDE", int(x.dtype == torch.float32)),
            ("STREAM", int(stream is not None)),
            ("BARE", form.bare),
        )
        kernel = compiled(_SOURCE, "pair_sum", defines, 0, x.device.index or 0)
        patience = _PATIENCE if gives_up_after is None else gives_up_after
        kernel.launch(
            (-(-chunks // (_THREADS * max(form.bare, 1))), 1, 1),
            _THREADS,
            0,
            (
                own,
                before,
                out,
                form.mailbox,
                form.theirs,
                form.turns,
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
