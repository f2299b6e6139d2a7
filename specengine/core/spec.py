"""Speculation's own interfaces: every algorithm is a Drafter and a Verifier."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor

if TYPE_CHECKING:
    from specengine.core.batch import ModelWorkerBatch, RowBatch, ScheduleBatch
    from specengine.core.draft_choosing import DraftEdits, DraftPicks
    from specengine.core.interfaces import LogitsOutput, RowsOutput
    from specengine.core.request import Req, TokenLogprob
    from specengine.kernels.tree_build import DraftTree


@dataclass
class DraftProposal:
    """A tree of candidate tokens a request. Node 0 is the root: the last chosen token, whose KV is
    not written yet. Nodes are in topological order (a parent stands before its children), and the
    children of a node in order of preference.

    An empty proposal has the root alone; decoding without speculation is exactly that.

    draft_probs are for tokens that were sampled. Row i is the distribution, up to a factor, that
    the token of node i was really drawn from: after temperature, top-k and whatever else the
    drafter applies. Siblings are drawn from one distribution without replacement; each of their
    rows is that distribution before any token was taken out. The row of a token that was certain
    has its mass on that token alone. The root's row is not read, nor are those of greedy requests.
    Whether a node exists may depend on the tokens above it, but neither on its own token nor on
    those drawn beside or below it: that would bias the output.
    """

    tokens: Tensor  # int64 [B, N]; entries past num_nodes are undefined
    parents: Tensor  # int64 [B, N]; the root's is -1
    num_nodes: list[int]  # [B], 1 .. N, root included
    is_chain: bool  # parents[i] == i - 1 throughout: no tree mask, no KV to move
    draft_probs: Tensor | None = None  # float32 [B, N, V]; None where every draft is deterministic
    # [B, N] in 0..1: the estimated probability that the whole path down to a node stands
    confidence: Tensor | None = None
    # [B][num_nodes], ascending from the root's 0, where the drafter draws no sample and knows which
    # nodes promise the most: node i stands ranks[b][i]-th, so that the first n are the best n.
    ranks: Sequence[Sequence[int]] | None = None
    # Of each request whether its draft is a text's, beside a model's; None: of nobody, or of all.
    of_text: list[bool] | None = None

    @property
    def num_drafted(self) -> list[int]:
        return [n - 1 for n in self.num_nodes]

    @property
    def is_empty(self) -> bool:
        """Nobody drafted."""
        return max(self.num_nodes, default=1) == 1


class DepthChoice(Protocol):
    """How deep the drafts of a round might go, and why."""

    @property
    def num_steps(self) -> int:
        """For the whole batch: what a request allows itself, or has text for, may be less."""
        ...

    @property
    def num_nodes(self) -> int | None:
        """Of trees that are cut to their best nodes, root included; None: as large as they are."""
        ...

    @property
    def reason(self) -> str: ...

    @property
    def expected_gain(self) -> float | None:
        """Tokens a second over those of plain decoding; None where that is not known."""
        ...


@dataclass
class VerifyResult:
    """What one round decided, on the host."""

    tokens: list[list[int]]  # emitted tokens of each request: accepted drafts, then the bonus
    num_accepted: list[int]  # [B], without the bonus token
    num_drafted: list[int]  # [B]
    kv_keep: list[list[int]] | None  # node indices on the accepted path, root first; None: a chain
    logprobs: list[list[TokenLogprob]] | None = None  # beside tokens, where any request asks
    is_lossy: bool = False  # the rule does not keep the target's distribution
    depth: DepthChoice | None = None  # that the round ran under; the engine fills it in
    # Likewise: of each request the ranks of the drafts that stand, where the proposal has ranks.
    path_ranks: list[list[int]] | None = None


class Drafter(Protocol):
    """Proposes tokens. The engine calls seed after each prefill forward (a chunk at a time), draft
    before and observe after each verification, and release when a request leaves (finished, aborted
    or retracted).

    seed and observe run before the new tokens are committed to the requests; `output` is that of
    the target's forward, its hidden states and features a row a token of the batch that ran: of
    each request num_drafted + 1, for grammars may have cut what was proposed. Where drafters are
    combined, a round may skip draft, or verify what another drafter proposed: observe follows all
    the same.
    """

    needs_hidden: bool
    writes_kv: bool
    proposes_tree: bool
    emits_probs: bool
    max_nodes: int  # the most nodes a proposal can have, root included

    def seed(self, batch: ScheduleBatch, output: LogitsOutput, result: PrefillResult) -> None: ...

    def draft(self, batch: ScheduleBatch) -> DraftProposal: ...

    def observe(self, batch: ScheduleBatch, output: LogitsOutput, result: VerifyResult) -> None: ...

    def release(self, req: Req) -> None: ...


@runtime_checkable
class EarlyDrafter(Protocol):
    """A drafter that can read a prompt while the device still computes what comes first."""

    @property
    def seeds_early(self) -> bool: ...

    def seed_early(self, batch: ScheduleBatch, output: LogitsOutput, tokens_S: Tensor) -> None:
        """In place of `seed`; may not wait for the device. tokens_S: int64 on the device, first
        tokens of the requests that sample, in their order."""
        ...


@runtime_checkable
class PreparingDrafter(Protocol):
    """A drafter with graphs of its own, which nobody should wait for."""

    def captures(self) -> Iterator[Callable[[], object]]:
        """Each captures one graph that is not there yet; nothing may be in the air."""
        ...


@runtime_checkable
class TextDrafter(Protocol):
    """A drafter that looks at the text of requests and at nothing else: `observe` may be left out,
    and rounds run on the device but for the drafting."""

    reads_text_alone: bool
    max_nodes: int

    def study(self, req: Req, most: int) -> None:
        """Take in at most so many tokens of what was committed since, which `draft` takes in
        anyway: it drafts the same, and has less to do. Nothing comes of a request that was not
        seeded, or has been released."""
        ...


@runtime_checkable
class TextTreeDrafter(TextDrafter, Protocol):
    """A TextDrafter that may draft trees."""

    proposes_tree: bool  # whether it does

    def most_nodes(self, num_steps: int) -> int:
        """Of a tree so deep, root included."""
        ...


@runtime_checkable
class AheadDrafter(TextDrafter, Protocol):
    """A TextDrafter that drafts for what a round has said before that is committed."""

    drafts_ahead: bool  # whether it does

    def draft_ahead(
        self, reqs: Sequence[Req], said: Sequence[list[int]], max_nodes: Sequence[int]
    ) -> DraftProposal:
        """said: tokens of each that are yet to be committed. Whoever gets fewer of them in the end
        has ended, or is released. max_nodes: of each, root included; at least 1."""
        ...

    def release(self, req: Req) -> None:
        """As a Drafter: what was read of a request is forgotten; it may draft again."""
        ...


@runtime_checkable
class RowDrafter(Protocol):
    """A drafter of chains that needs nothing from the host in a round, so that a graph can hold the
    whole of it. Both methods are captured: they may not wait for the device, nor branch on what is
    there. They take over from `draft` and `observe`, on the same state."""

    @property
    def row_steps(self) -> int | None:
        """How deep it drafts; None where it needs the host after all."""
        ...

    def draft_rows(self, rows: RowBatch, num_steps: int, picks: DraftPicks | None = None) -> Tensor:
        """int64 [B, num_steps], after each root. picks: where drafts are not the best tokens: what
        requests change of logits, or draws of one that emits_probs."""
        ...

    def observe_rows(
        self, rows: RowBatch, output: RowsOutput, tokens_BN: Tensor, accepted_B: Tensor
    ) -> None:
        """`output` has a row a node. tokens_BN int64 [B, num_steps + 1]: the target's token at each
        node; the first accepted_B[b] + 1 of them were emitted."""
        ...


@runtime_checkable
class TreeRowDrafter(RowDrafter, Protocol):
    """A RowDrafter that may draft trees instead: then `row_steps` is None, `draft_rows` serves its
    rounds of no steps alone, and `observe_rows` is given the accepted paths as if they had been
    drafted as chains."""

    @property
    def tree_row_steps(self) -> int | None:
        """How deep its trees are; None where it drafts chains, or needs the host after all."""
        ...

    @property
    def row_slots(self) -> int:
        """Places past those that stand whose KV drafting writes."""
        ...

    def num_tree_nodes(self, num_steps: int) -> int:
        """Nodes of a tree so deep, root included."""
        ...

    def draft_tree_rows(
        self,
        rows: RowBatch,
        num_steps: int,
        edits: DraftEdits | None = None,
        num_nodes: int | None = None,
    ) -> DraftTree:
        """num_steps: at least 1, and no node lies deeper. num_nodes: root included, where it is to
        be fewer than there are: the first, and best, of those."""
        ...


@runtime_checkable
class SleepyRowDrafter(RowDrafter, Protocol):
    """A RowDrafter that need not look at every round. While it sleeps nothing is drafted; the first
    round after that is observed before it drafts. A request that is seeded has it see everything,
    whoever had that row before."""

    def miss_rows(self, rows: Tensor, lens: Tensor) -> None:
        """Before it looks again: of requests in these rows of the page table, int64 [R], it has not
        observed all that lies before lens, int64 [R]."""
        ...


@runtime_checkable
class HesitantRowDrafter(RowDrafter, Protocol):
    """A RowDrafter that must have seen some of a request before rounds may run on the device."""

    def is_ready(self, req: Req) -> bool:
        """As the host knows the request; once ready, it stays so."""
        ...


@runtime_checkable
class ForeseenDrafter(Protocol):
    """A drafter whose drafts have a shape that is known before they are made."""

    proposes_tree: bool

    def foresee(self, batch: ScheduleBatch) -> list[int] | None:
        """The nodes of each request's next draft, root included; None where that depends on what is
        drafted."""
        ...


class Verifier(Protocol):
    """Decides which drafted tokens stand, so that the output keeps the target's distribution."""

    def prepare(self, batch: ScheduleBatch, proposal: DraftProposal) -> ModelWorkerBatch: ...

    def accept(
        self, output: LogitsOutput, batch: ScheduleBatch, proposal: DraftProposal
    ) -> VerifyResult: ...


class RoundRecorder(Protocol):
    """Looks at rounds and changes nothing: traces, acceptance tables. Called after acceptance and
    before the tokens are committed; `output` has a row of logits a node that was verified."""

    def record(
        self,
        batch: ScheduleBatch,
        proposal: DraftProposal,
        output: LogitsOutput,
        result: VerifyResult,
    ) -> None: ...


@dataclass
class PrefillResult:
    """What a prefill forward decided, on the host. Entries are None where nothing was asked."""

    tokens: list[int | None]  # [B], the first token of each request that samples
    logprobs: list[TokenLogprob | None]  # [B], of those tokens
    prompt_logprobs: list[list[TokenLogprob | None]]  # [B], of the prompt tokens of this chunk
