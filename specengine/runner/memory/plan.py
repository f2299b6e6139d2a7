"""Sizes the KV memory: total x fraction - used - peak + current - graphs, where `used` includes the
weights; and estimates what graphs will take."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from specengine.core.errors import OutOfMemoryError
from specengine.core.parallel import Communicator
from specengine.runner.forward_graphs.keys import MAX_TOKENS

logger = logging.getLogger(__name__)
GIB = 1 << 30
_LAUNCHES = 64 << 10  # bytes of one graph's launches per layer, a safe guess


@dataclass(frozen=True)
class GraphDemand:
    """What the graphs of an engine are captured for."""

    batch_sizes: tuple[int, ...]
    nodes: int  # most tokens of a request in a round
    depths: int  # kinds of rounds, one graph for each batch size
    num_layers: int
    vocab_size: int
    bytes_per_token: int  # of a forward's temporary tensors, without logits
    prompts: tuple[int, ...] = ()  # tokens of each graph of prefills
    kept_weights: int = 0  # vocabulary rows of draft weights a token, beside the target's logits

    @property
    def num_bytes(self) -> int:
        """An estimate, in bytes: float32 logits of plain decoding and verification for every size;
        the temporary tensors of the largest forward, which the others share; the same for prefills,
        of which hidden states and features (a quarter) stay; and the launches."""
        rows = min(self.batch_sizes[-1] * self.nodes, MAX_TOKENS)
        kept = sum(self.batch_sizes) + (2 * rows if self.nodes > 1 else 0)
        temporary = rows * (self.bytes_per_token + (6 + 4 * self.kept_weights) * self.vocab_size)
        graphs = len(self.batch_sizes) * (2 + self.depths)
        prefills = (max(self.prompts, default=0) + sum(self.prompts) // 4) * self.bytes_per_token
        launches = (graphs + len(self.prompts)) * self.num_layers * _LAUNCHES
        return kept * 4 * self.vocab_size + temporary + prefills + launches


@dataclass(frozen=True)
class MemoryPlan:
    """In bytes, except `num_tokens`: the KV slots that fit. `peak - current` is what a forward at
    full size allocates temporarily."""

    total: int
    fraction: float
    used: int
    peak: int
    current: int
    bytes_per_token: int  # KV of target and draft together
    limit_tokens: int  # rows x context, or --max-total-tokens
    page_size: int
    graphs: int = 0  # what CUDA graphs are expected to take
    states: int = 0  # recurrent state of requests, snapshots and verified nodes
    snapshots: int = 0  # what snapshots take of it

    @property
    def kv_budget(self) -> int:
        held = self.used + self.peak - self.current + self.graphs + self.states
        return int(self.total * self.fraction) - held

    @property
    def graph_budget(self) -> int:
        """What graphs may take: what is reserved for them and half of what the fraction leaves."""
        return self.graphs + int(self.total * (1 - self.fraction)) // 2

    @property
    def num_tokens(self) -> int:
        """KV slots that fit, in whole pages."""
        tokens = min(self.kv_budget // self.bytes_per_token, self.limit_tokens)
        return max(tokens, 0) // self.page_size * self.page_size

    def snapshots_beside(self, needed_tokens: int, num_bytes: int, most: int) -> int:
        """How many snapshots of `num_bytes` fit, `most` at most, where `states` counts none yet:
        half of what `needed_tokens` slots leave is theirs, and all that no slot can use."""
        left = self.kv_budget - needed_tokens * self.bytes_per_token
        unused = self.kv_budget - self.limit_tokens * self.bytes_per_token
        return max(0, min(most, max(left // 2, unused) // num_bytes))

    def least_of(self, ranks: Communicator) -> tuple[int, int]:
        """num_tokens and graph_budget of the rank that has least: the page table is the same on
        all. All ranks call it at the same place."""
        tokens, budget = ranks.greatest([-self.num_tokens, -self.graph_budget])
        return -tokens, -budget

    def check(self, needed_tokens: int) -> None:
        """Raise OutOfMemoryError unless `needed_tokens` slots fit, naming what would help."""
        if self.num_tokens >= needed_tokens:
            return
        missing = needed_tokens * self.bytes_per_token - self.kv_budget
        fraction = self.fraction + missing / self.total
        most = max(self.kv_budget, 0) // self.bytes_per_token
        if self.states and self.kv_budget < needed_tokens * self.bytes_per_token <= (
            self.kv_budget + self.states
        ):
            flags = "--max-running-requests" + " or --max-state-snapshots" * bool(self.snapshots)
            remedy = f"recurrent state takes {self.states / GIB:.2f} GiB of it: lower {flags}"
        elif fraction <= 0.98:
            remedy = f"--mem-fraction-static {fraction + 0.005:.2f} fits"
        elif most >= self.page_size:
            remedy = f"--context-length {most} fits (or --max-total-tokens {most})"
        else:
            remedy = (
                f"the weights alone leave no room: {missing / GIB:.1f} GiB more memory, a smaller "
                "model or --quantization is needed"
            )
        raise OutOfMemoryError(
            f"{needed_tokens} KV tokens ({needed_tokens * self.bytes_per_token / GIB:.2f} GiB) do "
            f"not fit in {max(self.kv_budget, 0) / GIB:.2f} GiB ({self.describe()}); {remedy}"
        )

    def describe(self) -> str:
        return (
            f"{self.total / GIB:.1f} GiB x {self.fraction:g} - {self.used / GIB:.2f} used - "
            f"{self.peak / GIB:.2f} peak + {self.current / GIB:.2f} current - "
            f"{self.graphs / GIB:.2f} graphs - {self.states / GIB:.2f} states"
        )

    def log(self) -> None:
        logger.info(
            "KV memory: %d tokens x %d B = %.2f GiB (%s)",
            self.num_tokens,
            self.bytes_per_token,
            self.num_tokens * self.bytes_per_token / GIB,
            self.describe(),
        )
