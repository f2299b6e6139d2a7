"""Requests through the real engine, held against plain decoding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, takewhile

from specengine.core.request import Req
from specengine.core.sampling import SamplingParams
from specengine.core.sampling_batch import SamplingBatch
from specengine.engine.loop import Engine
from specengine.engine.proof.check import Check
from specengine.engine.proof.joint import LogitProbe
from specengine.engine.proof.subjects import CHUNKED, FRESH, LENGTH, PREFIX_HIT, RETRACTED, State
from specengine.layers.logits import RowMap, edit_logits

MIN_P = 1e-6
MAX_MUTANT_P = 1e-9
# Two best logits nearer than this may change places where a batch of another form rounds otherwise.
TIES = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.25}
# Share of the requests of a run that must have met what their state is about. Short prompts
# are not found in a cache of pages.
_MET = {FRESH: 1.0, PREFIX_HIT: 0.8, CHUNKED: 0.3, RETRACTED: 0.05}


def looks(first: int, most: int) -> Iterator[int]:
    """Numbers of requests after which a mutant is looked at. A step is `first`, or a quarter of
    what was seen where that is more. At each look a mutant that changes nothing may be noticed by
    chance, with MAX_MUTANT_P at most: looks are few, 19 up to 100 times `first`."""
    count = 0
    while count < most:
        count = min(count + max(first, count // 4), most)
        yield count


@dataclass(frozen=True)
class Ask:
    prompt: list[int]
    params: SamplingParams


@dataclass(frozen=True)
class Run:
    """What came of some requests, and how many of them met what meanwhile."""

    outputs: list[list[int]]
    num_accepted: int  # drafted tokens that were accepted
    met: Counter[str]

    def check(self, subject: str, state: State) -> Check:
        """That the run shows what it is meant to show."""
        met, total = self.met[state.kind], len(self.outputs)
        note = f"{met} of {total} requests {state.kind}; {self.num_accepted} drafts accepted"
        share = met / total if self.num_accepted else 0.0
        return Check("ran as meant", subject, share, ">=", _MET[state.kind], note)


def complete(engine: Engine, asks: Sequence[Ask], state: State) -> Run:
    """All at once, by an engine that is idle."""
    accepted = engine.stats().spec.num_accepted_tokens
    for index, ask in enumerate(asks):
        engine.add_request(str(index), ask.prompt, ask.params)
    reqs = list(engine.scheduler.queues.by_rid.values())
    chunked, retracted = set[Req](), set[Req]()
    outputs: dict[str, list[int]] = {}
    for step in count():
        if not engine.has_work:
            break
        state.provoke(engine, step)
        retracted.update(filter(_is_retracted_early, engine.scheduler.queues.waiting))
        outputs |= {output.rid: output.token_ids for output in engine.step()}
        chunked.update(engine.scheduler.queues.prefilling)
    engine.scheduler.check_invariant()
    return Run(
        outputs=[outputs[str(index)] for index in range(len(asks))],
        num_accepted=engine.stats().spec.num_accepted_tokens - accepted,
        met=_met(reqs, chunked, retracted),
    )


def _is_retracted_early(req: Req) -> bool:
    return req.num_retractions > 0 and 0 < len(req.output_ids) < LENGTH


def _met(reqs: Iterable[Req], chunked: set[Req], retracted: set[Req]) -> Counter[str]:
    met = Counter[str]()
    for req in reqs:
        facts = {
            PREFIX_HIT: req.prefix_hit_len > 0,
            CHUNKED: req in chunked,
            RETRACTED: req in retracted,
            FRESH: not (req.prefix_hit_len or req in chunked or req.num_retractions),
        }
        met.update(kind for kind, holds in facts.items() if holds)
    return met


@dataclass(frozen=True)
class Divergences:
    """Greedy outputs that are not those of plain decoding."""

    wrong: int  # the target was sure of its token
    tied: int  # the two best logits were as good as equal
    widest: float  # margin between the two best logits where outputs part; 0 where none do

    def check(self, subject: str) -> Check:
        note = f"widest margin {self.widest:.2g}, {self.tied} at near ties" if self.widest else ""
        return Check("greedy identity", subject, float(self.wrong), "<=", 0.0, note)


def divergences(
    probe: LogitProbe,
    asks: Sequence[Ask],
    outputs: Sequence[list[int]],
    expected: Sequence[list[int]],
    tie: float,
) -> Divergences:
    """tie: the margin up to which outputs may part."""
    margins = []
    for ask, ours, theirs in zip(asks, outputs, expected, strict=True):
        if ours != theirs:
            pairs = zip(ours, theirs, strict=False)
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            margins.append(_margin(probe, ask, theirs[:same]))
    wrong = sum(margin > tie for margin in margins)
    return Divergences(wrong, len(margins) - wrong, max(margins, default=0.0))


def _margin(probe: LogitProbe, ask: Ask, output: list[int]) -> float:
    """Between the two best logits after a text, as greedy decoding compares them."""
    logits_1V = probe.logits([ask.prompt + output])
    req = Req("r", ask.prompt, ask.params, output_ids=output)
    sampling = SamplingBatch.from_reqs([req], logits_1V.shape[1], logits_1V.device)
    best, second = edit_logits(logits_1V, sampling, RowMap())[0].topk(2).values.tolist()
    return float(best - second)
