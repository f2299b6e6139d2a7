"""Which prompts run a few layers at a time, beside rounds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, islice

from specengine.scheduler.admission import LOOK_BEHIND, shorter_than
from specengine.scheduler.queues import RequestQueues

_LOOK_AHEAD = 64  # waiting prompts whose tokens are counted


@dataclass
class SplitPrompts:
    """What the scheduler knows of split prefills.

    min_tokens: prompt tokens of a forward from which it is split; a shorter one runs between two
    rounds. most: split prefills at once, each of which holds its hidden states. alone: each prompt
    has one of its own.
    settle: called before KV slots, rows and states that requests have left are given to others on
    the device: from then on no split prefill may write what it no longer owns.
    is_ready: the last layer of one has run, and the next forward is to wait until it is committed.
    runs_whole: while it holds, no further prompt is split.
    """

    min_tokens: int
    most: int = 2
    alone: bool = False
    settle: Callable[[], None] = lambda: None
    is_ready: bool = False
    runs_whole: Callable[[], bool] = lambda: False

    def is_full(self, queues: RequestQueues) -> bool:
        """While it is, only prompts that need not be split are taken in."""
        return bool(queues.split) and queues.num_splits >= self.most

    def has_short(self, queues: RequestQueues) -> bool:
        """Whether such a prompt is to be taken in."""
        started = (req for req in queues.prefilling if req not in queues.split)
        first = queues.in_turn(LOOK_BEHIND)
        return bool(shorter_than(chain(started, first), self.min_tokens))

    @property
    def most_together(self) -> int:
        """Tokens of several prompts in one forward."""
        return self.min_tokens - 1 if self.alone else sys.maxsize


def waiting_tokens(queues: RequestQueues) -> int:
    """Of prompts that no forward has begun to run, as far as is worth counting."""
    waiting = islice(queues.waiting, _LOOK_AHEAD)
    left = [req for req in queues.prefilling if req not in queues.split]
    return sum(req.prefill_len - req.kv_len for req in [*left, *waiting])
