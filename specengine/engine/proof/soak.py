"""Many requests of every sort, some of them aborted: nothing may be left behind, and the others say
what they say without speculation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from specengine.core.drafter import Drafter
from specengine.core.errors import InvariantError
from specengine.core.request import Req
from specengine.engine.loop import Engine
from specengine.engine.outputs import RequestOutput
from specengine.engine.proof.check import Check
from specengine.engine.proof.subjects import State
from specengine.engine.proof.workload import Visit, Workload

_MOST_AT_ONCE = 24
_INVARIANT_EVERY = 8  # steps
Choice = tuple[str, int]  # of a request


@dataclass
class Soak:
    """What came of it. Outputs are those of choices that were not aborted."""

    outputs: dict[Choice, list[int]] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    num_aborted: int = 0  # requests, in the middle of whatever they were at
    num_retractions: int = 0
    num_cached_tokens: int = 0
    num_accepted: int = 0
    miscounted: list[Choice] = field(default_factory=list)
    lost_slots: int = 0  # KV slots, of target and draft alike, that are lost in the end
    lost_rows: int = 0  # of the page table
    remembered: int = 0  # requests that the drafter still knows

    def checks(self, subject: str, plain: Soak | None = None) -> Iterator[Check]:
        """plain: the same requests without speculation, some of which were aborted at another
        token."""
        note = (
            f"{len(self.outputs)} outputs, {self.num_aborted} aborted, {self.num_retractions} "
            f"retractions, {self.num_cached_tokens} cached tokens, {self.num_accepted} accepted"
        )
        met = min(self.num_aborted, self.num_retractions, self.num_cached_tokens)
        yield Check("soak: ran as meant", subject, float(met), ">=", 1.0, note)
        lost = {"slots": self.lost_slots, "rows": self.lost_rows, "states": self.remembered}
        note = ", ".join(f"{count} {name}" for name, count in lost.items())
        yield Check("soak: lost memory", subject, float(sum(lost.values())), "<=", 0.0, note)
        yield Check("soak: miscounted", subject, float(len(self.miscounted)), "<=", 0.0)
        if plain is not None:
            same = self.outputs.keys() & plain.outputs.keys()
            other = sum(self.outputs[one] != plain.outputs[one] for one in same)
            # A uniform may fall between two roundings of one probability.
            share, note = other / max(1, len(same)), f"{other} of {len(same)} outputs"
            yield Check("soak: output changed", subject, share, "<=", 0.005, note)


def soak(engine: Engine, workload: Workload, num_requests: int, state: State) -> Soak:
    """Requests come as others go, by an engine that is idle. Raises InvariantError where memory is
    not accounted for."""
    return _Run(engine, workload, num_requests, state).done


class _Run:
    def __init__(self, engine: Engine, workload: Workload, num_requests: int, state: State) -> None:
        self.engine = engine
        self.done = Soak()
        self.alive: dict[str, tuple[Visit, int]] = {}  # and the step it came at
        allocator, rows = engine.scheduler.ledger.allocator, engine.scheduler.ledger.rows
        free = allocator.available, rows.num_free
        visits = iter(workload.visit(index) for index in range(num_requests))
        step = 0
        while self._let_in(visits, step) or engine.has_work:
            self._abort(step)
            state.provoke(engine, step)
            for output in engine.step():
                self._take(output)
            if step % _INVARIANT_EVERY == 0:
                engine.scheduler.check_invariant()
            step += 1
        self._count()
        engine.scheduler.check_invariant()
        engine.scheduler.ledger.evict_all()
        self.done.remembered = _remembered(engine.drafter)
        self.done.lost_slots = free[0] - allocator.available
        self.done.lost_rows = free[1] - rows.num_free

    def _let_in(self, visits: Iterator[Visit], step: int) -> bool:
        """Whether a request came."""
        came = False
        while len(self.alive) < _MOST_AT_ONCE and (visit := next(visits, None)) is not None:
            self.engine.add_request(visit.rid, visit.prompt, visit.params)
            self.alive[visit.rid] = visit, step
            came = True
        return came

    def _abort(self, step: int) -> None:
        for visit, came in list(self.alive.values()):
            if visit.abort_after is not None and step - came >= visit.abort_after:
                self.engine.abort(visit.rid)
                del self.alive[visit.rid]
                self.done.num_aborted += 1
                for choice in [one for one in self.done.outputs if one[0] == visit.rid]:
                    del self.done.outputs[choice]

    def _take(self, output: RequestOutput) -> None:
        if output.finish_reason is None:
            return
        choice = (output.rid, output.index)
        self.done.outputs[choice] = output.token_ids
        self.done.reasons[output.finish_reason.kind] += 1
        spec, emitted = output.spec, len(output.token_ids)
        rounds = 1 + spec.num_rounds if emitted else 0  # the prefill is one
        by_place = sum(number * rounds for number, rounds in enumerate(spec.histogram))
        if emitted != rounds + spec.num_accepted or by_place != spec.num_accepted:
            self.done.miscounted.append(choice)
        visit, _ = self.alive[output.rid]
        have = sum((output.rid, index) in self.done.outputs for index in range(visit.params.n))
        if have == visit.params.n:
            del self.alive[output.rid]

    def _count(self) -> None:
        """Count this run, of an engine that had done nothing before."""
        stats = self.engine.stats()
        self.done.num_retractions = stats.num_retractions
        self.done.num_cached_tokens = stats.num_cached_tokens
        self.done.num_accepted = stats.spec.num_accepted_tokens
        if sum(stats.spec.accepted_per_pos) != stats.spec.num_accepted_tokens:
            raise InvariantError(
                f"{stats.spec.accepted_per_pos} by position and {stats.spec.num_accepted_tokens} "
                "accepted in all"
            )


def _remembered(drafter: Drafter) -> int:
    """Requests that a drafter, or one that it combines, keeps something of."""
    count = 0
    for value in vars(drafter).values():
        if isinstance(value, dict):
            count += sum(isinstance(key, Req) for key in value)
        elif hasattr(value, "observe"):
            count += _remembered(value)
    return count
