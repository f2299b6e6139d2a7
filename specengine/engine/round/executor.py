"""Launches the rounds of an engine, and reads what they decided."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from time import perf_counter

import torch
from torch import Tensor

from specengine.core.batch import ScheduleBatch
from specengine.core.platform import Graph
from specengine.core.request import Req, TokenLogprob
from specengine.core.spec import VerifyResult
from specengine.core.transfer import sent
from specengine.engine.round.grammar_round import GrammarRound
from specengine.engine.round.host_view import HostView
from specengine.engine.round.key import Agreement, InFlightRound, RoundKey, RoundPlan
from specengine.engine.round.kinds import round_keys
from specengine.engine.round.lanes import RoundLanes
from specengine.engine.round.round import BoundRound, Round
from specengine.engine.round.sampling import SamplingFeatures, rows_of
from specengine.engine.round.shared_ints import SharedInts
from specengine.engine.round.source import round_slots
from specengine.engine.round.stale import StaleRows
from specengine.runner import fallbacks
from specengine.runner.forward_graphs.keys import at_least, why_no_size
from specengine.runner.graph_cache import Captured, GraphCache
from specengine.runner.graph_guard import GraphGuard

_MANY = 128  # tokens of a batch's whole trees, from which on smaller ones are worth a graph


class RoundExecutor:
    """Launches rounds and collects them. Requests keep their state on the device, so that the next
    round of the same requests may be launched before this one's result is known, as long as each
    request has KV slots for both.

    There is a graph for each RoundKey. Those of greedy requests are captured at start, those of
    requests that sample while the engine is idle (engine/background_capture.py), and what is left
    when it is first needed. Rounds of no steps are plain decoding.
    """

    unguarded = ("guard", "captured")  # runner/graph_guard.py

    def __init__(
        self,
        round: Round,
        steps: list[int],
        batch_sizes: list[int],
        padding: bool = True,
        may_pause: bool = False,
        tree_sizes: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        """steps: numbers of steps that rounds may have. padding: let a larger graph serve a batch.
        may_pause: there are also plain rounds that the drafter does not observe. tree_sizes: by
        num_steps, nodes to cut trees to."""
        self.round, self.runner, self.source = round, round.runner, round.source
        self.steps = sorted(set(steps))
        self.batch_sizes = sorted(set(batch_sizes))
        self.padding, self.may_pause = padding, may_pause
        self.tree_sizes = tree_sizes or {}
        # Rounds keep their buffers themselves: with a graph is only the rest of its round, if any.
        memory, guard_of = self.runner.graph_memory, self._guard_of
        self.cache = GraphCache[RoundKey, GrammarRound | None]("round", memory, guard_of)
        self.counters, self.captured = self.cache.counters, self.cache.captured
        self.guard: GraphGuard | None = None  # of all graphs, from the first capture
        # Set before captures, where prompts run beside rounds: split_build.use_lanes gives streams.
        self.lanes = RoundLanes()
        # Set after the captures at start, where ranks share experts: sharing.share_rounds.
        self.agreement: Agreement | None = None
        # Replaced, to run rounds without graphs, and to time or delay them (tests, benchmarks).
        self.record, self.new_event = self.cache.record_parts, self.runner.platform.new_event
        self.state, self.sampling = round.commit.state, round.sampling
        self.host_view = HostView(self.state, self.steps[-1])
        self.ints = SharedInts(self.runner.model.vocab_size)
        size, device = self.batch_sizes[-1], self.runner.device
        self.rows = torch.zeros(size, dtype=torch.int64, device=device)
        self.round_slots = round_slots(self.source)
        self.most_tokens = self.steps[-1] + 1  # that a request gains in a round
        self.max_len, self.is_lossy = round.commit.max_len, round.is_lossy
        self.collected_at = 0.0  # when the host had waited for the last round, before it read it
        self._rows: list[int] = []  # what `rows` holds
        self._stale = StaleRows(self.source, self.state.lens)
        self._turn = 0  # state.turn, as the device will have it after the last launch

    @property
    def table(self) -> Tensor:
        return self.runner.page_table

    def capture(self) -> None:
        """Every key of greedy rounds, from large to small; and one of requests that sample."""
        greedy, sizes = self.sampling.greedy, self.batch_sizes[::-1]
        done = self.cache.capture_at_start(sizes, lambda bs: self.keys(bs, greedy), self._make)
        self.batch_sizes = sorted(done)
        if not self.runner.graph_memory.is_spent:
            key = RoundKey(self.batch_sizes[0], self.steps[-1], self.sampling.sampled)
            self.graph(key, logging.DEBUG)

    def keys(self, batch_size: int, features: SamplingFeatures) -> list[RoundKey]:
        """Keys of all rounds of one batch size."""
        sizes, variants = self.smaller_trees(batch_size), self.source.variants(self.steps)
        return round_keys(batch_size, features, self.steps, sizes, self.may_pause, variants)

    def plain_key(self, batch_size: int, num_steps: int, num_nodes: int | None = None) -> RoundKey:
        """The key of greedy requests, paused where rounds without steps may be."""
        paused = self.may_pause and num_steps == 0
        return RoundKey(batch_size, num_steps, self.sampling.greedy, paused, num_nodes)

    def smaller_trees(self, batch_size: int) -> dict[int, list[int]]:
        """Nodes that trees may be cut to, root included, by num_steps: only where nodes cost."""
        return {
            steps: list(found)
            for steps, found in self.tree_sizes.items()
            if batch_size * self.source.num_nodes(steps) >= _MANY
        }

    def bind(self, key: RoundKey) -> BoundRound:
        """A round of the rows that are launched."""
        return BoundRound(self.round, self.rows[: key.batch_size], key)

    def clear_rows(self) -> None:
        """Rounds are of no request until the next launch."""
        self.rows.zero_()
        self._rows = []

    def _guard_of(self, _: GrammarRound | None) -> GraphGuard | None:
        if self.guard is None:
            self.guard = self.runner.guard_of(rounds=self)
        return self.guard

    def _make(self, key: RoundKey) -> tuple[Graph, GrammarRound | None]:
        """Runs rounds of no request: none may be in flight."""
        self.clear_rows()
        self.round.prepare(key.sampling)
        try:
            with self.lanes.capturing(key):
                return self._prepare(self.bind(key))
        finally:
            self.state.turn.fill_(self._turn)  # the run before the capture has taken one

    def _prepare(self, bound: BoundRound) -> tuple[Graph, GrammarRound | None]:
        """The graph, and what finishes its round, where that waits for token masks."""
        if not bound.key.sampling.masks:
            return self.record([bound.run])[0], None
        graphs = self.record([bound.draft, bound.verify, bound.accept])
        constrained = GrammarRound(bound, graphs, self.new_event())
        return constrained, constrained

    def graph(self, key: RoundKey, level: int = logging.INFO) -> Captured[GrammarRound | None]:
        """level: of what the log says of a capture, before which no round may be in flight."""
        return self.cache.get(key, self._make, level)

    def whole_graphs(self) -> dict[RoundKey, Graph]:
        """Those whose rounds do not wait for token masks amid them."""
        return {key: one.graph for key, one in self.captured.items() if one.buffers is None}

    def can_run(self, batch: ScheduleBatch) -> bool:
        """Whether a batch may run on the device. Counts the reason why not."""
        if (reason := self.fallback_reason(batch)) is not None:
            self.cache.count_fallback(reason)
        return reason is None

    def fallback_reason(self, batch: ScheduleBatch) -> str | None:
        reason = why_no_size(self.batch_sizes, self.padding, batch.batch_size)
        if reason is not None:
            return reason
        if not self.sampling.fits(batch.reqs):
            return fallbacks.NO_EDIT_TABLE
        if self.source.may_be_unready and not all(map(self.source.is_ready, batch.reqs)):
            return fallbacks.DRAFTER_NOT_READY
        if not all(self.has_slots(req, self.round_slots) for req in batch.reqs):
            return fallbacks.NEARLY_FULL
        keys = self.keys(self._size(batch.batch_size), self.sampling.features_of(batch.reqs))
        needed = (one for one in keys if one.num_nodes is None)
        return None if self.cache.has_memory_for(*needed) else fallbacks.MEMORY_SPENT

    def has_slots(self, req: Req, count: int) -> bool:
        """Whether `count` tokens past the kept ones have slots. Of chains they may lie past the
        context; nodes of trees may not."""
        wanted = req.kv_len + count
        return req.reserved_len >= (wanted if self.source.is_tree else min(wanted, self.max_len))

    def launch(self, reqs: list[Req], plan: RoundPlan) -> InFlightRound:
        """A round of requests whose state the host knows: all their rounds are collected. Where the
        device may have another, the host sends it."""
        key = self.lanes.key_of(self._key(reqs, plan), self.captured)
        if self.agreement is not None:
            agreed = self.agreement.agree(key, reqs, plan, in_flight=False)
            assert agreed is not None, "nothing is in flight"
            key, plan = agreed
        if not self.host_view.is_known(reqs):
            self.sampling.write(reqs, self.host_view.write(reqs), key.sampling)
        in_flight = self._launch(reqs, plan, key)
        self.send_masks(in_flight)
        return in_flight

    def follow(self, reqs: list[Req], plan: RoundPlan) -> InFlightRound | None:
        """A round of requests of the round before, whatever that decides: the device alone knows
        their state, and the host sends none. None without a graph or slots. When that one is
        committed, and before anything else runs, call `send_masks`."""
        count, drafts = self.most_tokens + self.round_slots, self.steps[0] or any(plan.levels)
        # steps[0] > 0: there are no plain rounds, so this one drafts whatever the plan.
        may_draft = drafts or self.agreement is not None
        if self.source.is_tree and may_draft and not all(self.has_slots(r, count) for r in reqs):
            return None
        key = self.lanes.key_of(self._key(reqs, plan), self.captured)
        if self.agreement is not None:
            agreed = self.agreement.agree(key, reqs, plan, in_flight=True)
            if agreed is None:
                return None
            key, plan = agreed
        fits = self.padding or key.batch_size == len(reqs)
        return self._launch(reqs, plan, key) if fits and key in self.captured else None

    def launch_idle(self, key: RoundKey) -> None:
        """A round of no request, beside ranks that have some (shared.py)."""
        self._launch([], RoundPlan([]), key)

    def begin(self, reqs: list[Req]) -> None:
        """The drafter reads prompts of these requests anew; others it has still missed."""
        if self._stale.forget(rows_of(reqs)):
            self._rows = []  # the same rows may be missed anew

    def resume(self) -> None:
        """Before the drafter observes again, in a round of any kind."""
        self._stale.tell()

    def _size(self, batch_size: int) -> int:
        return at_least(self.batch_sizes, batch_size)

    def _key(self, reqs: list[Req], plan: RoundPlan) -> RoundKey:
        """Its num_nodes is None, the whole tree, where the smaller tree of the plan has no key, or
        its graph is neither captured nor affordable."""
        key = RoundKey(
            batch_size=self._size(len(reqs)),
            num_steps=at_least(self.steps, max(plan.levels)),
            sampling=self.sampling.features_of(reqs),
            paused=plan.paused and self.may_pause,
        )
        if plan.num_nodes is None:
            return self.source.key_of(key, plan)
        if plan.num_nodes not in self.smaller_trees(key.batch_size).get(key.num_steps, ()):
            return key
        smaller = key._replace(num_nodes=plan.num_nodes)
        return smaller if self.cache.has_memory_for(smaller) else key

    def _launch(self, reqs: list[Req], plan: RoundPlan, key: RoundKey) -> InFlightRound:
        self.round.send_counts(plan.levels, key)
        graph = self.graph(key)
        rows = rows_of(reqs) + [0] * (key.batch_size - len(reqs))
        if not key.paused:
            self.resume()
        elif rows != self._rows or not self._stale:
            self._stale.add(rows)
        if rows != self._rows:
            self.rows[: key.batch_size] = sent(torch.tensor(rows), self.rows.device)
            self._rows = rows
        self.lanes.run(key, lambda: self.cache.replay(graph))
        self._turn = 1 - self._turn
        self.host_view.note_launch(reqs)
        outcome = self.state.outcomes[self._turn, : len(reqs), : 2 * key.num_steps + 3]
        in_flight = InFlightRound(reqs, plan, outcome, self.new_event(), key, self._turn, {})
        if not key.sampling.masks:
            self._end(in_flight)
        return in_flight

    def send_masks(self, in_flight: InFlightRound) -> None:
        """Where grammars constrain a request of a round: token masks, and the rest of the round."""
        constrained = self.captured[in_flight.key].buffers
        if constrained is not None:
            in_flight.kept_depths.update(constrained.finish(in_flight.reqs))
            self._end(in_flight)

    def _end(self, in_flight: InFlightRound) -> None:
        """All of a round is launched."""
        if in_flight.key.sampling.logprobs:
            self.round.logprobs.send(in_flight.turn)
        in_flight.done.record()

    def is_done(self, in_flight: InFlightRound) -> bool:
        """Whether `collect` would not wait. Of a round whose masks were sent."""
        return in_flight.done.query()

    def collect(self, in_flight: InFlightRound) -> VerifyResult:
        """Wait for a round, and read what it decided."""
        in_flight.done.synchronize()
        self.collected_at = perf_counter()
        steps = in_flight.key.num_steps
        rows = self.ints.lists_of(in_flight.outcome[:, : steps + 2])
        num_accepted = [row[0] for row in rows]
        tokens = [row[1 : row[0] + 2] for row in rows]
        self.sampling.edits.note(in_flight.reqs, tokens)
        # The padding of a short draft is a draft too, where it happens to be right.
        num_drafted = [*map(max, self.num_drafts(in_flight, in_flight.plan.levels), num_accepted)]
        logprobs: list[list[TokenLogprob]] | None = None
        if in_flight.key.sampling.logprobs:
            logprobs = self.round.logprobs.read(in_flight.turn, in_flight.reqs, steps + 1, tokens)
        result = VerifyResult(tokens, num_accepted, num_drafted, None, logprobs, self.is_lossy)
        if self.tree_sizes and steps:
            # Nodes are in order of rank: a node's number is its rank.
            paths = in_flight.outcome[:, steps + 2 : -1].tolist()
            result.path_ranks = [row[:n] for row, n in zip(paths, num_accepted, strict=True)]
        return result

    def num_drafts(self, in_flight: InFlightRound, levels: list[int]) -> list[int]:
        """Drafts of each request in a round in which it drafted so many levels."""
        if not self.source.is_tree:
            return in_flight.kept(levels, levels)
        if self.round.rule_of(in_flight.key) is not None:  # as many as the rule saw
            counts: list[int] = in_flight.outcome[:, -1].tolist()
            return counts
        return in_flight.kept(self.source.num_drafted(in_flight, levels), levels)
