"""The base of drafters that run a model: what a round drafts, level by level."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain

import torch
from torch import Tensor

from specengine.core.batch import ForwardMode, ModelWorkerBatch, ScheduleBatch
from specengine.core.draft_context import DraftContext
from specengine.core.draft_picks import DraftPicks
from specengine.core.interfaces import LogitsOutput
from specengine.core.request import Req
from specengine.core.spec import DraftProposal
from specengine.core.transfer import int64
from specengine.core.tree import Tree
from specengine.draft.chain import batch_roots, chain_proposal, draft_chain
from specengine.draft.choice import DraftChoice
from specengine.draft.loop_graphs import DraftLoops, ModelDrafter, NoDraftLoops
from specengine.draft.tree import draft_tree, tree_sizes
from specengine.runner.forward_graphs.prepared import PreparedForward
from specengine.runner.model_runner import ModelRunner
from specengine.runner.worker import TpModelWorker


class DraftWorker(TpModelWorker, ModelDrafter):
    """Drafts num_steps levels deep: the first from what `start` gives, each further one by a
    forward of the draft model over the level above. A drafted token's row goes to the slot at its
    place in the request's row of the page table, which is the target's own; the KV there is the
    draft's. What lies past the accepted tokens is overwritten by later rounds.

    Requests that draft less deep than others ride along as padding does, on row 0 of the page
    table, so that every forward of a round has the same shape.

    It has one runner, or one a level (the last serves the levels that follow).
    """

    has_draft_loops = True
    predicts_shape = True
    first_place = 0  # of the first drafted row, counted from the root's position

    def __init__(self, context: DraftContext) -> None:
        spec = context.spec
        self.runners: Sequence[ModelRunner] = context.runners
        super().__init__(self.runners[0])
        assert spec.num_steps is not None, "the engine resolves it"
        self.num_steps = spec.num_steps
        self.topk = spec.eagle_topk
        self.max_nodes = spec.max_nodes
        self.proposes_tree = spec.eagle_topk > 1
        self.emits_probs = spec.draft_sampling
        self.is_static = spec.static_tree
        # Both are set by engine.forward_graphs_build.add_draft_loops before there are requests, in
        # engines with graphs and where `has_draft_loops` is True. device_rounds: whether rounds may
        # run on the device alone; False under --trace.
        self.device_rounds = False
        self.loops: DraftLoops | NoDraftLoops | None = None
        self.target_ids: Tensor | None = getattr(self.runner.model, "target_ids", None)
        self._node_limit = context.node_limit

    @classmethod
    def from_context(cls, context: DraftContext) -> DraftWorker:
        return cls(context)

    @property
    def draft_vocab_size(self) -> int:  # type: ignore[override]
        return self.runner.model.vocab_size

    @property
    def begins_async(self) -> bool:  # type: ignore[override]
        """A plan that the host makes may not be touched before the device has read it."""
        backend, modes = self.runner.attn_backend, (ForwardMode.EXTEND, ForwardMode.DRAFT_EXTEND)
        return not any(backend.for_mode(mode).limits.plans_on_host for mode in modes)

    @abstractmethod
    def start(self, batch: ScheduleBatch) -> LogitsOutput:
        """One row a request: logits of the token after the root, and, where the model continues
        its own states, the state that they came from (`hidden`)."""

    @property
    def max_steps(self) -> int:
        return self.num_steps if self.proposes_tree else min(self.num_steps, self.max_nodes - 1)

    @torch.inference_mode()
    def draft(self, batch: ScheduleBatch) -> DraftProposal:
        """Tensors are on the device."""
        levels = [self.levels(req) for req in batch.reqs]
        if not any(levels):
            roots = batch_roots(batch, self.runner.device)
            return chain_proposal(roots, [1] * batch.batch_size, [])
        proposal = None if self.loops is None else self.loops.draft(batch, levels)
        if proposal is not None:
            return proposal
        choice = DraftChoice(
            batch.sampling, self.target_ids, draws=self.emits_probs, by_rank=self.is_static
        )
        grow = draft_tree if self.proposes_tree else draft_chain
        return grow(self, batch, levels, choice)

    def captures(self) -> Iterator[Callable[[], object]]:
        """Captures of forwards in which the drafter reads prompts."""
        for graphs in filter(None, (runner.ragged_graphs for runner in self.runners)):
            for key in graphs.sizes.prefill_keys():
                if key not in graphs.cache.captured:
                    yield partial(graphs.prepare, key, self._states)

    def precompile_calls(self) -> Iterator[Callable[[], object]]:
        for runner in self.runners:
            graphs = runner.ragged_graphs
            if graphs is not None and runner.attn_backend.limits.precompiles:
                for key in graphs.sizes.prefill_keys():
                    yield partial(graphs.precompile, key, self._states)

    @property
    def _states(self) -> Tensor | None:
        """As wide as what it reads beside tokens."""
        return getattr(self, "states", None)

    def predict_shape(self, batch: ScheduleBatch) -> list[int] | None:
        """None for sampled trees, some of whose nodes may turn out not to exist."""
        levels = [self.levels(req) for req in batch.reqs]
        if not self.proposes_tree:
            return [1 + depth for depth in levels]
        if self.emits_probs:
            return None
        most = map(self.nodes, batch.reqs)
        return [min(pair) for pair in zip(tree_sizes(levels, self.topk), most, strict=True)]

    def next_tokens(self, states_TH: Tensor, picks: DraftPicks | None, level: int = 0) -> Tensor:
        """int64 [T], what a round on the device drafts after these states, a row a request, as the
        target numbers tokens."""
        head = self.runner_of(level).model.head
        if picks is None:
            return head.best(states_TH)
        return picks.take(head.logits(states_TH), self.target_ids)

    def nodes(self, req: Req) -> int:
        """The most nodes that a request can use in this round, root included."""
        return min(self.max_nodes, self._node_limit(req))

    def levels(self, req: Req) -> int:
        """How deep a request drafts in this round: as far as its nodes and slots reach."""
        room = req.reserved_len - req.kv_len - self.first_place
        return max(0, min(self.num_steps, self.nodes(req) - 1, room // self.topk + 1))

    def plan_level(
        self, batch: ScheduleBatch, levels: list[int], level: int, tree: Tree | None = None
    ) -> PreparedForward:
        """The forward over the tokens of one level, prepared ahead of them: positions, slots and
        lengths do not depend on tokens. Level 1 is the root's children. `tree` may be filled in
        between planning and running."""
        past = (level - 1) * self.topk
        runs = [depth > level for depth in levels]
        pairs = zip(batch.prefix_lens, runs, strict=True)
        return self.runner_of(level).prepare(
            ModelWorkerBatch(
                forward_mode=ForwardMode.DECODE if tree is None else ForwardMode.DRAFT_EXTEND,
                input_ids=torch.zeros(batch.batch_size * self.topk, dtype=torch.int64),
                req_pool_indices=[
                    req.row if run else 0 for req, run in zip(batch.reqs, runs, strict=True)
                ],
                prefix_lens=[past + (root + self.first_place if run else 0) for root, run in pairs],
                extend_lens=[self.topk] * batch.batch_size,
                logits_rows=None,
                sampling=None,
                tree=tree,
            )
        )

    def run_level(
        self, level: int, step: PreparedForward, tokens_T: Tensor, states_TH: Tensor | None
    ) -> LogitsOutput:
        """The output may be overwritten when the next level runs."""
        return step.run(tokens_T, states_TH)

    def runner_of(self, level: int) -> ModelRunner:
        return self.runners[min(level, len(self.runners) - 1)]

    def plan_extend(
        self,
        reqs: Sequence[Req],
        starts: list[int],
        tokens: list[list[int]],
        with_logits: bool,
        layer: int = 0,
    ) -> PreparedForward:
        """The forward over tokens[i] of each request, none empty, at positions starts[i] and on.
        with_logits: of the last row of each. layer: which of the runners."""
        counts = [len(run) for run in tokens]
        last_rows = [end - 1 for end in accumulate(counts)]
        return self.runner_of(layer).prepare(
            ModelWorkerBatch(
                forward_mode=ForwardMode.DRAFT_EXTEND if max(counts) > 1 else ForwardMode.DECODE,
                input_ids=int64([*chain.from_iterable(tokens)]),
                req_pool_indices=[req.row for req in reqs],
                prefix_lens=starts,
                extend_lens=counts,
                logits_rows=last_rows if with_logits else [],
                sampling=None,
            )
        )
