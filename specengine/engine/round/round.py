"""One round of speculation on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specengine.core.batch import ForwardBatch
from specengine.core.interfaces import LogitsOutput, RowsOutput
from specengine.core.interruption import interruption_point
from specengine.core.request import Req
from specengine.core.rows import RowBatch
from specengine.core.sharing import evenly
from specengine.engine.draft_nodes import HostTree
from specengine.engine.grammar.drafts import kept_nodes
from specengine.engine.grammar.masks import Flags
from specengine.engine.round.draws import (
    ChainDraws,
    EditedBest,
    LookupWeights,
    SampledTreeDraws,
    TreeKeys,
)
from specengine.engine.round.edits import ChainEdits, NodeEdits, RootEdits
from specengine.engine.round.key import KeptDepths, RoundKey
from specengine.engine.round.layouts import Chain, Commit, Layout, Room, kept_depths
from specengine.engine.round.logprobs import DeviceLogprobs
from specengine.engine.round.masks import TokenMasks
from specengine.engine.round.rules import Judged, Rule
from specengine.engine.round.sampling import PLAIN, SamplingFeatures, SamplingState
from specengine.engine.round.source import DraftOptions, Drafts, Source, round_slots
from specengine.kernels.accept.accept_chain import begin_round
from specengine.kernels.accept.types import AcceptedPaths
from specengine.kernels.tree.types import TreeLimits
from specengine.runner.context import joined_features
from specengine.runner.model_runner import ModelRunner
from specengine.runner.row_batches import keep_states


@dataclass(frozen=True)
class TargetOutput:
    """The target's states at every node."""

    batch: ForwardBatch
    hidden_TH: Tensor


class Round:
    """Draft, verify, accept and observe, on device tensors alone (host.py is the same round on the
    host).

    The state of a request (its length, its last token, what the drafter keeps) lies on the device
    by its row of the page table. A round reads the rows of a batch and writes their new state. What
    it decided goes to the host in `commit.state.outcomes`.

    A round combines three choices: `source` says where drafts come from, `rule` which of them are
    accepted, and `sampling` what requests ask for. `layout`, how drafts are laid out, follows from
    the source. Without a rule, and in batches that do not need it, drafts are matched: those
    are accepted that equal the token that plain decoding chooses there. A round without drafts is a
    chain of the root alone.
    """

    def __init__(
        self,
        runner: ModelRunner,
        commit: Commit,
        source: Source,
        layout: Layout,
        rule: Rule | None,
        sampling: SamplingState,
    ) -> None:
        """runner: of the target. sampling: of this round alone, made for the same rule."""
        self.runner = runner
        self.commit = commit
        self.source = source
        self.layout = layout
        self.rule = rule
        self.sampling = sampling
        batch_size = commit.state.outcomes.shape[1]
        most_rows, device = batch_size * round_slots(source), runner.device
        vocab_size = runner.model.vocab_size
        is_simulated = commit.simulated is not None
        self.is_lossy = is_simulated or (rule is not None and rule.is_lossy)
        self._plain = Chain([0], batch_size, device) if source.is_tree else layout
        self.logprobs = DeviceLogprobs(most_rows, vocab_size, device)
        self.masks = TokenMasks(most_rows, vocab_size, device)
        # Made before any capture: made in one, it would be nodes of the graph.
        self._tree_keys: TreeKeys | None = None
        if rule is not None and source.emits_probs and source.model_is_tree:
            shape = batch_size, source.tree_topk, source.model_steps
            self._tree_keys = TreeKeys.of(*shape, device)

    def prepare(self, features: SamplingFeatures) -> None:
        """Before a graph is captured: tables that are made in a capture are the graph's own."""
        if features.logprobs:
            self.logprobs.prepare()
        if features.masks:
            self.masks.prepare()
        if features.edits:
            self.sampling.edits.prepare()

    def draft(self, rows_B: Tensor, key: RoundKey) -> Drafts:
        """rows_B: int64, of the page table. The requests are as the round before has left them, and
        from here on it is this round's turn."""
        rows = RowBatch(rows_B, *begin_round(self.commit.state, rows_B))
        drafts = self.source.draft(key, rows, self.draft_options(rows, key))
        if not key.sampling.masks:
            return drafts
        return replace(drafts, host_copy=self.layout_of(key).host_copy(drafts))

    def verify(self, drafts: Drafts, key: RoundKey) -> TargetOutput:
        """The target's forward over all nodes."""
        batch = self.layout_of(key).verify_batch(self.runner, drafts)
        if key.paused:
            batch.feature_layers = ()
        return TargetOutput(batch, self.runner.forward_extend(batch))

    def accept(self, drafts: Drafts, output: TargetOutput, key: RoundKey) -> None:
        """Decide which drafts are accepted, move the requests on, and let the drafter observe."""
        layout, rows = self.layout_of(key), drafts.rows
        path, raw_TV = self.decide(drafts, output, key)
        hidden_TH, features_TF = output.hidden_TH, joined_features(output.batch)
        if path.rows_T is not None:
            hidden_TH = hidden_TH.index_select(0, path.rows_T)
            features_TF = None if features_TF is None else features_TF.index_select(0, path.rows_T)
            raw_TV = None if raw_TV is None else raw_TV.index_select(0, path.rows_T)
        tokens_T = path.tokens_BW.flatten()
        if raw_TV is not None:
            self.logprobs.take(raw_TV, tokens_T)
        self.sampling.count(rows, path.tokens_BW, path.accepted_B, key.sampling)
        layout.keep_kv(self.runner, rows, path)
        keep_states(output.batch, path.accepted_B, path.nodes_BW)
        if not key.paused:
            observed = RowsOutput(hidden_TH, features_TF)
            self.source.observe(key, rows, observed, path.tokens_BW, path.accepted_B)

    def decide(
        self, drafts: Drafts, output: TargetOutput, key: RoundKey
    ) -> tuple[AcceptedPaths, Tensor | None]:
        """The accepted path, and raw logits of all nodes where a request asks for logprobs."""
        layout, sampling = self.layout_of(key), self.sampling
        rule = self.rule_of(key)
        if rule is None and key.sampling in (PLAIN, sampling.greedy):
            best_T = self.runner.sample(output.hidden_TH)
            return layout.match(self.commit, drafts, best_T, key.num_steps), None
        if rule is not None and key.sampling.masks:
            drafts = layout.constrained(drafts)
        edited_TV, raw_TV = self.node_logits(drafts.rows, output, key)
        if rule is None:
            draws = sampling.draws(drafts.rows, output.batch)
            chosen_T = self.runner.sample(LogitsOutput(edited_TV), draws)
            path = layout.match(self.commit, drafts, chosen_T, key.num_steps)
        else:
            found = rule.decide(self._judged(drafts, edited_TV, output, key), sampling)
            path = layout.commit(self.commit, drafts, found, key.num_steps)
        return path, raw_TV

    def layout_of(self, key: RoundKey) -> Layout:
        return self.layout if key.num_steps else self._plain

    def rule_of(self, key: RoundKey) -> Rule | None:
        """None: matching."""
        return self.rule if key.sampling.stochastic and key.num_steps else None

    def node_logits(
        self, rows: RowBatch, output: TargetOutput, key: RoundKey
    ) -> tuple[Tensor, Tensor | None]:
        """float32 [T, V] with edits and token masks, which may be written over; and without, where
        a request asks for logprobs."""
        logits_TV = self.runner.model.head.logits(output.hidden_TH)
        raw_TV = logits_TV.clone() if key.sampling.logprobs else None
        if key.sampling.masks:
            logits_TV = self.masks.apply(logits_TV)
        if key.sampling.edits:
            self.sampling.edits.apply(logits_TV, rows, output.batch)
        return logits_TV, raw_TV

    def _judged(
        self, drafts: Drafts, logits_TV: Tensor, output: TargetOutput, key: RoundKey
    ) -> Judged:
        counts_are_sent = self.source.counts_are_sent(key)
        nodes = self.layout.nodes(drafts, self._room(drafts.rows), key, counts_are_sent)
        rows, batch, sample = drafts.rows, output.batch, self.runner.sample
        return Judged(logits_TV, rows, batch, nodes, sample, drafts.tree, drafts.weights)

    def _room(self, rows: RowBatch) -> Room:
        ends_B = self.sampling.ends.index_select(0, rows.rows_B)
        return Room(ends_B, self.commit.state.max_accepted.index_select(0, rows.rows_B))

    def draft_options(self, rows: RowBatch, key: RoundKey) -> DraftOptions:
        """How drafts are chosen, where they are not simply the best tokens."""
        if not key.num_steps:
            return DraftOptions()
        if self.rule_of(key) is None:
            return self._matched_options(rows, key)
        if not self.source.is_tree:
            return self._sampled_chains(rows, key)
        return self._judged_trees(rows, key)

    def _matched_options(self, rows: RowBatch, key: RoundKey) -> DraftOptions:
        if self.source.is_tree and key.sampling.edits:
            return DraftOptions(edits=RootEdits(self.sampling.edits.tables, rows))
        return self._matched_chains(rows, key)

    def _matched_chains(self, rows: RowBatch, key: RoundKey) -> DraftOptions:
        if not key.sampling.edits:
            return DraftOptions()
        edits = ChainEdits(self.sampling.edits.tables, rows)
        return DraftOptions(picks=EditedBest(edits, self.sampling.vocab_size))

    def _sampled_chains(self, rows: RowBatch, key: RoundKey) -> DraftOptions:
        """The chains that a stochastic rule verifies: those that the host would draft."""
        if not (self.source.emits_probs and key.sampling.samples):
            return self._matched_chains(rows, key)
        rule, table, vocab_size = self.rule, self.sampling.table, self.sampling.vocab_size
        assert rule is not None
        edits = ChainEdits(self.sampling.edits.tables, rows) if key.sampling.edits else None
        count, keeps = self.source.drawn_nodes(key), rule.needs_draft_probs
        draws = ChainDraws(rows, table, count, vocab_size, keeps, edits)
        return DraftOptions(picks=draws, weights=draws if keeps else None)

    def _judged_trees(self, rows: RowBatch, key: RoundKey) -> DraftOptions:
        """The trees that a stochastic rule verifies: of no more nodes than requests may still emit
        tokens, and cut to the depth that they allow. Trees are never cut to their best nodes here:
        a seed's text would follow from the clock."""
        sampling, rule, table = self.sampling, self.rule, self.sampling.table
        assert rule is not None
        keeps, vocab_size = self.source.emits_probs and rule.needs_draft_probs, sampling.vocab_size
        if not self.source.model_depth(key):
            return DraftOptions(lookup_weights=LookupWeights(vocab_size) if keeps else None)
        limits = self._limits(rows)
        if not self.source.model_is_tree:
            return replace(self._sampled_chains(rows, key), limits=limits)
        edits = NodeEdits(sampling.edits.tables, rows) if key.sampling.edits else None
        if self._tree_keys is None:
            return DraftOptions(edits=edits, limits=limits)
        draws = SampledTreeDraws(rows, table, self._tree_keys, vocab_size, rule.needs_draft_probs)
        weights = draws if keeps else None
        return DraftOptions(edits=edits, limits=limits, draws=draws, weights=weights)

    def _limits(self, rows: RowBatch) -> TreeLimits:
        """The limits of nodes (DraftWorker.nodes) and of depth (SpecControl, cut_to_depth) that
        the host applies. A request that has ended may still be in a round, and drafts nothing."""
        room = self._room(rows)
        left_B = (room.ends_B - rows.lens_B - 1).clamp(min=1)
        return TreeLimits(self.source.tree_topk, left_B, room.limits_B)

    def send_counts(self, num_drafted: list[int], key: RoundKey) -> None:
        """Send how many drafts the host has made to a stochastic rule."""
        if self.rule_of(key) is not None and self.source.counts_are_sent(key):
            self.layout.send_counts(num_drafted)

    def send_masks(self, reqs: list[Req], trees: list[HostTree], key: RoundKey) -> KeptDepths:
        """Token masks to the device, and which drafts a rule may see. trees: what was drafted."""
        legal_BN = self.masks.send(reqs, trees)
        if self.rule_of(key) is None:
            return kept_depths(reqs, trees, legal_BN)
        return self.layout.send_kept(reqs, trees, self._kept(legal_BN, reqs, trees))

    def _kept(self, legal_BN: Flags, reqs: list[Req], trees: list[HostTree]) -> Flags:
        """Which nodes a rule sees: of sampled drafts also the first that a grammar forbids."""
        were_drawn = [self.source.emits_probs and not req.sampling.is_greedy for req in reqs]
        return kept_nodes(legal_BN, trees, were_drawn)


class BoundRound:
    """A round of certain rows: its steps without arguments, as captures and replays want them. Each
    step leaves behind what the next one reads."""

    def __init__(self, round: Round, rows_B: Tensor, key: RoundKey) -> None:
        """rows_B: int64, of the page table."""
        self.round = round
        self.rows_B = rows_B
        self.key = key
        self.drafts: Drafts
        self.output: TargetOutput

    @torch.inference_mode()
    def run(self) -> None:
        self.draft()
        self.verify()
        self.accept()

    @torch.inference_mode()
    def draft(self) -> None:
        with evenly(self.round.runner.sharers):
            self.drafts = self.round.draft(self.rows_B, self.key)

    @torch.inference_mode()
    def verify(self) -> None:
        with evenly(self.round.runner.sharers):
            self.output = self.round.verify(self.drafts, self.key)

    @torch.inference_mode()
    def accept(self) -> None:
        interruption_point()  # `verify` has them in its forward; one more before the accept kernels
        with evenly(self.round.runner.sharers):
            self.round.accept(self.drafts, self.output, self.key)

    def host_copy(self) -> Tensor:
        """int64, what the host must know of the drafts to make token masks."""
        assert self.drafts.host_copy is not None
        return self.drafts.host_copy

    def send_masks(self, reqs: list[Req], host_copy: Tensor) -> KeptDepths:
        """host_copy: on the host."""
        layout = self.round.layout_of(self.key)
        trees = layout.host_trees(host_copy, reqs, self.key.num_steps)
        return self.round.send_masks(reqs, trees, self.key)
