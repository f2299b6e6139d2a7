"""The round as one graph: drafts, verification, acceptance and the next round's inputs."""

from __future__ import annotations

import bisect
import logging
from collections import Counter
from time import perf_counter

import torch
from torch import Tensor

from specengine.core.batch import RowBatch, ScheduleBatch
from specengine.core.draft_choosing import DraftPicks
from specengine.core.interfaces import RowsOutput
from specengine.core.request import Req, TokenLogprob
from specengine.core.spec import RowDrafter, SleepyRowDrafter, VerifyResult
from specengine.core.transfer import sent
from specengine.engine.graph_ruled import RoundParts, RuledGraphs, Seen
from specengine.engine.grounds import find_ground, if_hesitant
from specengine.engine.node_logits import node_logits
from specengine.engine.round_form import Flight, Form, RoundGraph, Wish
from specengine.engine.round_seconds import seconds_of
from specengine.engine.row_choices import BEST, Choosing, RowChoices, rows_of
from specengine.engine.row_logprobs import RowLogprobs
from specengine.engine.row_masks import RowMasks
from specengine.engine.row_state import RowState
from specengine.engine.shared_ints import SharedInts
from specengine.kernels.accept_chain import RoundState, Simulated, accept_chain, begin_round
from specengine.runner.graph_counters import count_fallback
from specengine.runner.graph_guard import GraphGuard
from specengine.runner.graphs import capture, without_garbage_collection
from specengine.runner.worker import TpModelWorker

logger = logging.getLogger(__name__)


class GraphRound:
    """Draft, verify, accept, observe, without the host.

    The state of a request (its length, its last token, what the drafter keeps) lies on the device
    by its row of the page table. A replay takes the rows of a batch, and moves the state on; what
    was decided follows in an asynchronous copy. So the host may launch the next round of the same
    requests before it knows what came of this one, as long as each has slots for both.

    For chains. There is a graph for each batch size and each number of steps; none at all is plain
    decoding. The target's token at every node is the one that plain decoding chooses there, as in
    MatchVerifier; graphs of others than greedy rounds are captured later.
    """

    samples = True  # whether requests that sample fly
    masks_fly = True  # likewise, whom a grammar rules (graph_ruled.py)
    unguarded = ("captured", "guard")

    def __init__(
        self,
        worker: TpModelWorker,
        drafter: RowDrafter,
        steps: list[int],
        batch_sizes: list[int],
        padding: bool = True,
        simulated_length: float | None = None,
        may_sleep: bool = False,
    ) -> None:
        """padding: let a larger graph serve a batch. simulated_length: accepted length to force on
        every round, for measuring speed. may_sleep: there are plain rounds, too, that the drafter
        does not look at; for a core.spec.SleepyRowDrafter."""
        self.runner, self.drafter = worker.runner, drafter
        self.steps = sorted(set(steps))
        self.batch_sizes = sorted(set(batch_sizes))
        self.padding, self.may_sleep = padding, may_sleep
        self.simulated = Simulated.of(simulated_length)
        self.hesitant = if_hesitant(drafter)
        self.captured: dict[Form, RoundGraph] = {}
        self.guard: GraphGuard | None = None  # of all of them
        self.counters: Counter[str] = Counter()
        num_rows, largest, device = self.table.shape[0], self.batch_sizes[-1], self.runner.device
        self.state = RoundState.of(num_rows, largest, self.steps[-1], device)
        self.known = RowState(self.state, self.steps[-1])
        vocab_size = self.runner.model.vocab_size
        self.logprobs = RowLogprobs(largest * self.num_slots, vocab_size, device)
        self.masks = RowMasks(largest * self.num_slots, vocab_size, device)
        self.choices = RowChoices(num_rows, self.table.shape[1], vocab_size, device)
        self.ints = SharedInts(vocab_size)
        self.rows = torch.zeros(largest, dtype=torch.int64, device=device)
        self._flown: list[int] = []  # what `rows` holds
        self._missed: set[int] = set()  # rows of rounds that the drafter has not looked at
        self.landed_at = 0.0  # when the host had waited for the last round, and before it read it
        self._turn = 0  # state.turn, as the device will have it after the last launch

    @property
    def table(self) -> Tensor:
        return self.runner.pools.req_to_token_pool.req_to_token

    @property
    def num_nodes(self) -> int:
        """Of each request in a round: the most tokens that it gains."""
        return self.steps[-1] + 1

    @property
    def num_slots(self) -> int:
        """Likewise: the places past those that stand whose KV is written."""
        return self.num_nodes

    def capture(self) -> None:
        """Every form of greedy rounds, from large to small; and one that samples."""
        start, memory = perf_counter(), self.runner.graph_memory
        used_before = memory.used
        with without_garbage_collection():
            for bs in memory.affordable(self.batch_sizes[::-1], "round graphs"):
                for form in self.forms(bs, self.choices.greedy):
                    self._capture(form)
            self.batch_sizes = sorted({form.batch_size for form in self.captured})
            if self.samples and not memory.is_spent:
                form = Form(self.batch_sizes[0], self.steps[-1], self.choices.sampled)
                self.graph(form, logging.DEBUG)
        took, used = perf_counter() - start, (memory.used - used_before) / (1 << 30)
        what = f"{len(self.captured)} round graphs of {self.steps} drafts"
        logger.info("captured %s in %.1f s, %.2f GiB", what, took, used)

    def forms(self, batch_size: int, choosing: Choosing) -> list[Form]:
        forms = [Form(batch_size, steps, choosing) for steps in self.steps]
        return [*forms, Form(batch_size, 0, choosing, asleep=True)] if self.may_sleep else forms

    def _capture(self, form: Form) -> None:
        """Runs rounds of no request: nothing may be in the air."""
        rows_B = self.rows[: form.batch_size].zero_()
        self._flown = []
        if form.choosing.logprobs:
            self.logprobs.prepare()
        try:
            self.captured[form] = self._graph_of(rows_B, form)
        finally:
            self.state.turn.fill_(self._turn)  # the run before the capture has taken one
        self.counters["captures"] += 1
        if self.guard is None:
            self.guard = self.runner.guard_of(rounds=self)

    def drafter_of(self, form: Form) -> RowDrafter:
        return self.drafter

    def parts_of(self, rows_B: Tensor, form: Form) -> RoundParts:
        return RoundParts(self, rows_B, form)

    def _graph_of(self, rows_B: Tensor, form: Form) -> RoundGraph:
        pool, parts = self.runner.graph_memory.pool, self.parts_of(rows_B, form)
        if form.choosing.masks:
            self.masks.prepare()
            return RuledGraphs(parts, pool)
        return capture(parts.run, pool)[0]

    def graph(self, form: Form, level: int = logging.INFO) -> RoundGraph:
        """level: of what the log says of a capture, before which nothing may be in the air."""
        if form not in self.captured:
            start = perf_counter()
            with without_garbage_collection(), self.runner.graph_memory.measured():
                self._capture(form)
            logger.log(level, "captured a round of %s in %.2f s", form, perf_counter() - start)
        return self.captured[form]

    def smaller_trees(self, batch_size: int) -> dict[int, list[int]]:
        """Nodes that trees may be cut to, root included, by num_steps: their rounds have graphs."""
        return {}

    def seconds_of(
        self, batch_size: int, num_steps: int, num_nodes: int | None = None, text: int = 0
    ) -> float:
        """Of a captured round, on requests of so many tokens: round_seconds."""
        asleep = self.may_sleep and num_steps == 0
        self._flown = []
        form = Form(batch_size, num_steps, self.choices.greedy, asleep, num_nodes)
        return seconds_of(self, form, text)

    def run(self, rows_B: Tensor, num_steps: int, choosing: Choosing = BEST) -> None:
        """One round of the requests in these rows of the page table."""
        self.parts_of(rows_B, Form(len(rows_B), num_steps, choosing)).run()

    def begin(self, rows_B: Tensor) -> RowBatch:
        """The requests as the round before has left them; it is this round's turn from here on."""
        return RowBatch(rows_B, *begin_round(self.state, rows_B))

    def picks(self, rows: RowBatch, form: Form) -> DraftPicks | None:
        """How chains are drafted; None: of the best tokens."""
        return self.choices.edited_best(rows) if form.choosing.edits else None

    def choose(self, seen: Seen, rows: RowBatch, choosing: Choosing) -> RowsOutput:
        """The target's tokens, as requests want them chosen."""
        hidden_TH, features = seen.hidden_TH, seen.features()
        if choosing in (BEST, self.choices.greedy):
            return RowsOutput(self.runner.model.head.best(hidden_TH), hidden_TH, features)
        logits = node_logits(self, seen, rows, choosing)
        tokens_T = self.choices.tokens(logits.edited_TV, rows, seen.batch)
        if logits.raw_TV is not None:
            self.logprobs.take(logits.raw_TV, tokens_T)
        return RowsOutput(tokens_T, hidden_TH, features)

    def accept(self, rows: RowBatch, chosen_BN: Tensor, drafts_BK: Tensor) -> Tensor:
        """Moves the requests on, and tells the host -> accepted drafts, int64 [B]."""
        given = rows.rows_B, chosen_BN, drafts_BK, self.table.shape[1], self.simulated
        return accept_chain(self.state, *given)

    def can_run(self, batch: ScheduleBatch) -> bool:
        """Whether the batch is of the kind that the graphs were made for."""
        if (ground := find_ground(self, batch)) is not None:
            count_fallback(self.counters, "round", ground)
        return ground is None

    def has_graphs(self, reqs: list[Req]) -> bool:
        """Or memory for them."""
        forms = self.forms(self._size(len(reqs)), self.choices.choosing_of(reqs))
        needed = (one for one in forms if one.num_nodes is None)
        return not self.runner.graph_memory.is_spent or all(one in self.captured for one in needed)

    def has_slots(self, req: Req, count: int) -> bool:
        """Whether `count` tokens past those that stand have slots, or lie past the context."""
        return req.reserved_len >= min(req.kv_len + count, self.table.shape[1])

    def launch(self, reqs: list[Req], wish: Wish) -> Flight:
        """Fly requests whose state the host knows: every round of theirs has landed."""
        form = self._form(reqs, wish)
        if not self.known.is_known(reqs) or form.choosing.edits:
            self.choices.write(reqs, self.known.tell(reqs), form.choosing)
        flight = self._fly(reqs, wish, form)
        self.send_masks(flight)
        return flight

    def follow(self, reqs: list[Req], wish: Wish) -> Flight | None:
        """Fly requests of the flight before, whatever comes of it. When that is committed, and
        before anything else runs, `send_masks` must follow."""
        form = self._form(reqs, wish)
        fits = self.padding or form.batch_size == len(reqs)
        return self._fly(reqs, wish, form) if fits and form in self.captured else None

    def read_anew(self, reqs: list[Req]) -> None:
        """The drafter reads their prompts; what it missed of others still counts."""
        if rows := self._missed.intersection(rows_of(reqs)):
            self._missed -= rows
            self._flown = []  # the same rows may be missed anew

    def wake(self) -> None:
        """Before the drafter looks again, in a round of any kind."""
        if self._missed:
            assert isinstance(self.drafter, SleepyRowDrafter)
            rows = sent(torch.tensor([*self._missed]), self.rows.device)
            self.drafter.miss_rows(rows, self.state.lens[rows])
            self._missed.clear()

    def _size(self, batch_size: int) -> int:
        return self.batch_sizes[bisect.bisect_left(self.batch_sizes, batch_size)]

    def _form(self, reqs: list[Req], wish: Wish) -> Form:
        return Form(
            batch_size=self._size(len(reqs)),
            num_steps=self.steps[bisect.bisect_left(self.steps, max(wish.num_drafted))],
            choosing=self.choices.choosing_of(reqs),
            asleep=wish.asleep and self.may_sleep,
        )

    def _fly(self, reqs: list[Req], wish: Wish, form: Form) -> Flight:
        graph = self.graph(form)
        rows = rows_of(reqs) + [0] * (form.batch_size - len(reqs))
        if not form.asleep:
            self.wake()
        elif rows != self._flown or not self._missed:
            self._missed.update(rows)
        if rows != self._flown:
            self.rows[: form.batch_size] = sent(torch.tensor(rows), self.rows.device)
            self._flown = rows
        if self.guard is not None:
            self.guard.check()
        graph.replay()
        self.counters["replays"] += 1
        self._turn = 1 - self._turn
        self.known.fly(reqs)
        outcome = self.state.outcomes[self._turn, : len(reqs), : 2 * form.num_steps + 3]
        landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        given = reqs, wish.num_drafted, outcome, landed, form, self._turn
        flight = Flight(*given, wish.drafted_nodes, {}, wish.of_text)
        if not form.choosing.masks:
            self._end(flight)
        return flight

    def send_masks(self, flight: Flight) -> None:
        """Where grammars rule a request of a round: what they allow, and the rest of the round."""
        graph = self.captured[flight.form]
        if isinstance(graph, RuledGraphs):
            flight.left_depths.update(graph.finish(flight.reqs))
            self._end(flight)

    def _end(self, flight: Flight) -> None:
        """All of a round is launched."""
        if flight.form.choosing.logprobs:
            self.logprobs.send(flight.turn)
        flight.landed.record()

    def has_landed(self, flight: Flight) -> bool:
        """Of one whose masks were sent: whether `land` would not wait."""
        return bool(flight.landed.query())  # type: ignore[no-untyped-call]

    def land(self, flight: Flight) -> VerifyResult:
        """Wait for a round, and read what it decided."""
        flight.landed.synchronize()
        self.landed_at = perf_counter()
        rows = self.ints.lists_of(flight.outcome[:, : flight.form.num_steps + 2])
        num_accepted = [row[0] for row in rows]
        tokens = [row[1 : row[0] + 2] for row in rows]
        self.choices.edits.note(flight.reqs, tokens)
        # The padding of a short draft is a draft too, where it happens to be right.
        num_drafted = [*map(max, self.num_drafts(flight, flight.num_drafted), num_accepted)]
        logprobs, is_lossy = self._logprobs(flight, tokens), self.simulated is not None
        return VerifyResult(tokens, num_accepted, num_drafted, None, logprobs, is_lossy)

    def num_drafts(self, flight: Flight, levels: list[int]) -> list[int]:
        """Of a round in which each request drafted so many levels."""
        return flight.left(levels, levels)

    def _logprobs(self, flight: Flight, tokens: list[list[int]]) -> list[list[TokenLogprob]] | None:
        if not flight.form.choosing.logprobs:
            return None
        return self.logprobs.read(flight.turn, flight.reqs, flight.form.num_steps + 1, tokens)
