"""One generation request, as the scheduler keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from struct import pack
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specengine.core.grammar import GrammarState
from specengine.core.sampling import SamplingParams
from specengine.core.spec_stats import SpecStats


class ReqState(Enum):
    WAITING = auto()
    PREFILLING = auto()  # some prompt KV is written, some is not (chunked prefill)
    RUNNING = auto()
    FINISHED = auto()


@dataclass(frozen=True, slots=True)
class FinishReason:
    """kind: "stop" (EOS, stop token or stop string), "length", "abort" or "error" (the
    request asks for what cannot be done, and `message` says what)."""

    kind: str
    matched: int | str | None = None  # the token id or string that stopped it
    message: str | None = None


@dataclass(slots=True)
class TokenLogprob:
    """Raw-distribution logprob of one token, and the best alternatives, best first."""

    token: int
    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Req:
    """A request and its place in the KV memory.

    owner: what it is a choice of, together with others; where it is alone, "" until it is
    queued, and its rid from then on. place: in the order in which requests are served, set when it
    is queued (scheduler/queues.py).

    While it runs, `kv_len == len(token_ids) - 1`: the last token (the root of the next round) has
    been chosen, but its KV is not written yet.
    """

    rid: str
    prompt_ids: list[int]
    sampling: SamplingParams
    eos_ids: frozenset[int] = frozenset()
    seed: int = 0  # sampling.seed, or one drawn on arrival
    grammar: GrammarState | None = None  # its state is that after output_ids
    needs_all_rows: bool = False  # of the prompt: no KV of it may come from the prefix cache
    owner: str = ""
    place: int = 0
    num_passed: int = 0  # requests that were admitted while it was the first to wait
    output_ids: list[int] = field(default_factory=list)
    state: ReqState = ReqState.WAITING
    finish_reason: FinishReason | None = None

    # KV memory: set by the scheduler
    req_pool_idx: int | None = None
    kv_len: int = 0  # tokens whose KV is committed
    reserved_len: int = 0  # token slots in this request's row of the page table
    cached_len: int = 0  # leading slots that the radix cache owns
    last_node: Any = None  # radix node locked by this request
    prefix_hit_len: int = 0  # prompt tokens found in the cache when first admitted
    # Of a target that keeps recurrent state: tokens whose KV the cache had, though no state to go
    # on from; and slots taken for snapshots, each behind so many of its tokens.
    state_branch: int = 0
    state_saves: list[tuple[int, int]] = field(default_factory=list)

    # results, filled as tokens are committed
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    spec: SpecStats = field(default_factory=SpecStats)
    num_retractions: int = 0
    _prompt: NDArray[np.int64] | None = field(default=None, init=False, repr=False)
    end_ids: frozenset[int] = field(init=False)  # tokens that may end it
    stop_checker: Any = None  # scheduler.finish.StopStrings when stop strings were asked for

    # times, seconds of time.monotonic()
    arrival_time: float = field(default_factory=monotonic)
    admitted_time: float | None = None  # first taken out of the queue
    first_token_time: float | None = None
    finish_time: float | None = None

    def __post_init__(self) -> None:
        self.needs_all_rows |= self.sampling.prompt_logprobs is not None
        eos_ids = frozenset() if self.sampling.ignore_eos else self.eos_ids
        self.end_ids = eos_ids.union(self.sampling.stop_token_ids)

    @property
    def row(self) -> int:
        """Its row of the page table."""
        assert self.req_pool_idx is not None, f"{self.rid} has no row in the request pool"
        return self.req_pool_idx

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_ids + self.output_ids

    def tokens(self, start: int, end: int) -> NDArray[np.int64]:
        """Those of prompt and output from the start-th up to the end-th, as far as there are: int64
        [end - start]. Read only: it may view what later calls view."""
        if self._prompt is None:
            self._prompt = _int64(self.prompt_ids)
        first = len(self.prompt_ids)
        if end <= first:
            return self._prompt[start:end]
        behind = _int64(self.output_ids[max(start - first, 0) : end - first])
        return behind if start >= first else np.concatenate((self._prompt[start:], behind))

    @property
    def seq_len(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def last_token(self) -> int:
        return self.output_ids[-1] if self.output_ids else self.prompt_ids[-1]

    @property
    def prefill_len(self) -> int:
        """Tokens whose KV must be written before a round can run.

        A fresh request prefills its whole prompt and samples its first token from the last row. A
        retracted one already knows its last token: it prefills everything before it and samples
        nothing, so that the random stream continues where it stopped.
        """
        return self.seq_len - 1 if self.output_ids else len(self.prompt_ids)

    @property
    def rank(self) -> tuple[int, int]:
        """The lower, the earlier it is served and the later it is retracted."""
        return self.sampling.priority, self.place

    @property
    def is_finished(self) -> bool:
        return self.state is ReqState.FINISHED


def _int64(ids: list[int]) -> NDArray[np.int64]:
    """Through bytes: of a list of ints, numpy takes four times as long."""
    return np.frombuffer(pack(f"{len(ids)}q", *ids), np.int64)
