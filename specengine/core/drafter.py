"""The one interface of drafters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor

if TYPE_CHECKING:
    from specengine.core.batch import ScheduleBatch
    from specengine.core.draft_context import DraftContext
    from specengine.core.draft_picks import DraftEdits, DraftPicks, TreeDraws
    from specengine.core.interfaces import LogitsOutput, RowsOutput
    from specengine.core.request import Req
    from specengine.core.rows import RowBatch
    from specengine.core.spec import DraftProposal, PrefillResult, VerifyResult
    from specengine.kernels.tree.types import DraftTree, TreeLimits

DraftsOn = Literal["host", "lookup", "device"]


class Drafter(ABC):
    """Proposes tokens. A drafter implements `from_context` and `draft`, and sets `max_nodes`;
    everything else has a default.

    The engine calls `begin` after each prefill forward (a chunk at a time), `draft` before and
    `observe` after each verification, and `release` when a request leaves (finished, aborted or
    retracted). `begin` and `observe` run before the new tokens are committed to the requests;
    `output` is that of the target's forward, its hidden states and features a row a token of the
    batch that ran: of each request num_drafted + 1, for grammars may have cut what was proposed.
    Where drafters are combined, a round may skip `draft`, or verify what another drafter proposed:
    `observe` follows all the same.

    Capability fields say what else a drafter can do. The engine reads these fields, never the
    class. The methods of a capability are called only where its field says so.

    drafts_on: where it drafts, and so where its rounds may run.
        "host": the host drafts between two forwards, and observes every round.
        "lookup": the host drafts from the text of requests alone, and `observe` may be left out.
            The rest of the round runs on the device.
        "device": the whole round runs on the device, drafting included: `draft_rows` or
            `draft_tree_rows`, and `observe_rows`. These three and `sync_accepted` are captured in
            a CUDA graph: they may not wait for the device, nor branch on values that lie there.
            They take over from `draft` and `observe`, on the same state.
    """

    # Of a drafter with models of its own: loads them, draft.loaded.DraftTarget -> LoadedDraft.
    # Their runners are in the context.
    load_draft: ClassVar[Callable[..., Any] | None] = None
    # Options under which it is proved: a set for each shape (chain, tree) that it can draft. Those
    # of a drafter with models are the same for all.
    proof_options: ClassVar[Sequence[Mapping[str, Any]]] = ({},)
    can_be_hybrid: bool = True  # --speculative-hybrid-suffix may be used with it
    drafts_trees: ClassVar[bool] = True  # of one with models: --speculative-eagle-topk above 1
    takes_token_map: ClassVar[bool] = False  # --speculative-token-map
    draft_vocab_size: int | None = None  # tokens that its model can say; None where it has none

    needs_hidden: bool = False  # reads the target's hidden states
    kv_lookahead: int = 0  # tokens past a slot's own that its KV was computed from
    proposes_tree: bool = False  # else chains
    emits_probs: bool = False  # drafts are sampled, and proposals carry draft_probs
    # The most nodes a proposal can have, root included; at most context.spec.max_nodes.
    max_nodes: int = 1

    drafts_on: DraftsOn = "host"
    can_pause: bool = False  # "device": rounds may go by that it does not observe; see mark_stale
    begins_async: bool = False  # begin_async may take the place of begin
    drafts_ahead: bool = False  # "lookup": draft_ahead
    predicts_shape: bool = False  # predict_shape may give a shape
    # "device": on the host, too, a draft may be one graph of `draft_rows` or `draft_tree_rows`. It
    # has the fields `runner`, `loops` and `device_rounds` of draft.worker.DraftWorker.
    has_draft_loops: bool = False
    draft_slots: int = 0  # "device": KV slots past the kept ones that drafting writes
    topk: int = 1  # "device": children of a node of its trees
    may_be_unready: bool = False  # "device": is_ready may be False
    # A "lookup" drafter whose drafts take the place of `model`'s, where there are two sources.
    lookup: Drafter | None = None

    @classmethod
    def from_context(cls, context: DraftContext) -> Drafter:
        """Raises ConfigError where it cannot draft as asked."""
        raise NotImplementedError(f"{cls.__name__} is registered, and has no from_context")

    @abstractmethod
    def draft(self, batch: ScheduleBatch) -> DraftProposal: ...

    def begin(self, batch: ScheduleBatch, output: LogitsOutput, result: PrefillResult) -> None:
        """Take in a chunk of prompts. With --enable-mixed-chunk the batch also has running
        requests, which are not among `batch.prompt_reqs`: each runs its last token and gains one.
        `observe` is not called for them."""

    def observe(self, batch: ScheduleBatch, output: LogitsOutput, result: VerifyResult) -> None:
        """Take in what a round decided."""

    def release(self, req: Req) -> None:
        """Forget a request; it may come back."""

    def begin_async(self, batch: ScheduleBatch, output: LogitsOutput, tokens_S: Tensor) -> None:
        """In place of `begin`; may not wait for the device. tokens_S: int64 [S] on the device, the
        first tokens of the S requests that sample, in their order."""
        raise NotImplementedError

    def captures(self) -> Iterator[Callable[[], object]]:
        """Graphs of the drafter's own that are not captured yet, one a call. They are captured
        while there is no work; no round may be in flight."""
        return iter(())

    def precompile_calls(self) -> Iterator[Callable[[], object]]:
        """Under kernels.precompile they compile what `captures` records, one call a kind of graph:
        a kernel that is first needed in a capture takes a second, in which no request is served."""
        return iter(())

    def predict_shape(self, batch: ScheduleBatch) -> list[int] | None:
        """The nodes of each request's next draft, root included; None where that depends on what is
        drafted."""
        return None

    @property
    def model_drafter(self) -> Drafter:
        """The drafter beside `lookup`; where there is none, this one."""
        return self

    # "lookup"

    def index_ahead(self, req: Req, most: int) -> None:
        """Take in at most so many tokens of what was committed since, which `draft` would take in
        anyway: it drafts the same, and has less to do. Does nothing for a request that was not
        begun, or has been released."""

    def draft_ahead(
        self, reqs: Sequence[Req], emitted: Sequence[list[int]], max_nodes: Sequence[int]
    ) -> DraftProposal:
        """The drafts of the round after one whose tokens are not committed yet. emitted: these
        tokens; a request that gets fewer of them in the end has ended, or is released. max_nodes:
        of each request, root included; at least 1."""
        raise NotImplementedError

    def may_match(self, reqs: Sequence[Req], num_new: int) -> bool:
        """Whether a request might have a draft once it has at most so many tokens more. Asked of a
        drafter that is used together with a model."""
        return True

    # "device"

    @property
    def max_steps(self) -> int:
        """How deep it drafts on the device, in levels."""
        return self.max_nodes - 1

    def num_tree_nodes(self, num_steps: int) -> int:
        """Nodes of a tree so deep, root included. Of one that proposes trees."""
        return self.max_nodes

    def is_ready(self, req: Req) -> bool:
        """Whether it has seen enough of a request for rounds on the device, as the host knows the
        request. Once true, it stays so."""
        return True

    def draft_rows(self, rows: RowBatch, num_steps: int, picks: DraftPicks | None = None) -> Tensor:
        """int64 [B, num_steps], a chain after each root. picks: how tokens are chosen where they
        are not the best ones. Of one that proposes trees, for rounds of no steps alone."""
        assert num_steps == 0, "a drafter on the device implements draft_rows"
        return rows.roots_B.new_empty(len(rows.roots_B), 0)

    def draft_tree_rows(
        self,
        rows: RowBatch,
        num_steps: int,
        edits: DraftEdits | None = None,
        num_nodes: int | None = None,
        limits: TreeLimits | None = None,
        draws: TreeDraws | None = None,
    ) -> DraftTree:
        """A tree a root. num_steps: at least 1, and no node lies deeper. num_nodes: root included,
        where there are to be fewer than there could be: the first, and best, of those. limits: of
        each request; nodes that they leave out, or for which no token was left, are their own
        parents, and the others are those that `draft` would draft. draws: draws the tokens, of one
        that emits_probs."""
        raise NotImplementedError

    def observe_rows(
        self, rows: RowBatch, output: RowsOutput, tokens_BN: Tensor, accepted_B: Tensor
    ) -> None:
        """`output` has a row a node. tokens_BN: int64 [B, num_steps + 1], the target's token at
        each node of a chain, or of the accepted path; accepted_B[b] + 1 of them were emitted."""

    def sync_accepted(self, rows: RowBatch, tokens_BN: Tensor) -> None:
        """Called before `observe_rows` in a round in which lookup may have drafted, for some
        requests or for all: runs the emitted tokens that `observe_rows` will not, since this
        drafter has not drafted them. May be called without draft_rows. tokens_BN: as there."""

    def mark_stale(self, rows: Tensor, lens: Tensor) -> None:
        """Before a paused drafter resumes: of the requests in these R rows of the page table, int64
        [R], it has not observed all that lies before lens, int64 [R]. Until then it drafts nothing.
        A request that begins anew is seen whole, whatever its row held before."""
        raise NotImplementedError
