"""Requests through the real engine, held against plain decoding."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import takewhile

from specengine.core.request import Req
from specengine.core.sampling import SamplingParams
from specengine.core.sampling_batch import SamplingBatch
from specengine.engine.loop import Engine
from specengine.engine.proof.check import Check
from specengine.engine.proof.joint import Continuations, LogitProbe, Text
from specengine.engine.proof.subjects import PREFIX_HIT, RETRACTED, State
from specengine.layers.logits import RowMap, edit_logits

MIN_P = 1e-5
MAX_MUTANT_P = 1e-9
# Two best logits nearer than this may change places where a batch of another form rounds otherwise.
TIES = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.25}


@dataclass(frozen=True)
class Run:
    """What came of some requests, and what the engine went through meanwhile."""

    outputs: list[list[int]]
    num_accepted: int
    num_cached: int
    num_retractions: int

    def check(self, subject: str, state: State) -> Check:
        """That the run shows what it is meant to show."""
        counts = {"drafts accepted": self.num_accepted}
        if state.kind == PREFIX_HIT:
            counts["prompt tokens found in the cache"] = self.num_cached
        if state.kind == RETRACTED:
            counts["retractions"] = self.num_retractions
        note = ", ".join(f"{count} {name}" for name, count in counts.items())
        return Check("ran as meant", subject, float(min(counts.values())), ">=", 1.0, note)


def complete(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> Run:
    """All at once."""
    before = engine.stats()
    accepted = before.spec.num_accepted_tokens
    for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(index), prompt, one)
    outputs: dict[str, list[int]] = {}
    while engine.has_work:
        outputs |= {output.rid: output.token_ids for output in engine.step()}
    after = engine.stats()
    return Run(
        outputs=[outputs[str(index)] for index in range(len(prompts))],
        num_accepted=after.spec.num_accepted_tokens - accepted,
        num_cached=after.num_cached_tokens - before.num_cached_tokens,
        num_retractions=after.num_retractions - before.num_retractions,
    )


def sample(
    engine: Engine,
    texts: Continuations,
    params: SamplingParams,
    num_requests: int,
    first_seed: int = 0,
) -> Run:
    """Requests that differ in their seeds."""
    seeds = range(first_seed, first_seed + num_requests)
    seeded = [replace(params, seed=seed) for seed in seeds]
    return complete(engine, [texts.prompt] * num_requests, seeded)


def histogram(run: Run, texts: Continuations) -> Counter[Text]:
    """Of the first tokens of the outputs."""
    return Counter(tuple(output[: texts.length]) for output in run.outputs)


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
    prompts: list[list[int]],
    params: SamplingParams,
    outputs: list[list[int]],
    expected: list[list[int]],
    tie: float,
) -> Divergences:
    """tie: the margin up to which outputs may part."""
    margins = []
    for prompt, ours, theirs in zip(prompts, outputs, expected, strict=True):
        if ours != theirs:
            pairs = zip(ours, theirs, strict=False)
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            margins.append(_margin(probe, prompt, theirs[:same], params))
    wrong = sum(margin > tie for margin in margins)
    return Divergences(wrong, len(margins) - wrong, max(margins, default=0.0))


def _margin(
    probe: LogitProbe, prompt: list[int], output: list[int], params: SamplingParams
) -> float:
    """Between the two best logits after a text, as greedy decoding compares them."""
    logits_1V = probe.logits([prompt + output])
    req = Req("r", prompt, params, output_ids=output)
    sampling = SamplingBatch.from_reqs([req], logits_1V.shape[1], logits_1V.device)
    best, second = edit_logits(logits_1V, sampling, RowMap())[0].topk(2).values.tolist()
    return float(best - second)
