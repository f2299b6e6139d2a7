"""What serving accepts of a drafter that is being trained, measured in an engine."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from specengine.core.config import EngineConfig, SpecConfig
from specengine.core.errors import DataError, RequestError
from specengine.core.sampling import SamplingParams
from specengine.draft.train.data.dataset import Document, TokenDataset
from specengine.engine.build import build_engine
from specengine.engine.loop import Engine
from specengine.runner.loader.loaded_model import LoadedModel


@dataclass(frozen=True)
class ProbePrompt:
    token_ids: list[int]
    max_tokens: int  # of its answer


@dataclass(frozen=True)
class EngineProbe:
    """A draft.train.loop.Probe: answers prompts greedily with the drafter that was exported.

    loaded: the target, whose weights every measurement shares. others: prompts that the engine must
    have room for beside.
    """

    loaded: LoadedModel
    algorithm: str
    prompts: Sequence[ProbePrompt]
    num_steps: int
    others: Sequence[ProbePrompt] = ()

    def __call__(self, export: Path) -> dict[str, float]:
        """accepted_length: 1 + accepted / rounds, bonus token included, over all rounds.
        acceptance_0: of the rounds that drafted, the share whose first drafted token was
        accepted."""
        with self.running(export) as engine:
            run_prompts(engine, self.prompts, greedy(self.prompts))
            totals = engine.stats().spec
        first = totals.accepted_per_pos[0] if totals.accepted_per_pos else 0
        return {
            "accepted_length": totals.mean_acceptance_length,
            "acceptance_0": first / max(totals.num_drafts, 1),
        }

    @contextmanager
    def running(self, export: Path) -> Iterator[Engine]:
        """An engine that drafts with what was exported."""
        with _quiet():
            engine = build_engine(self._config(export), self.loaded)
        try:
            yield engine
        finally:
            engine.close()

    def _config(self, export: Path) -> EngineConfig:
        base = self.loaded.config
        each = (*self.prompts, *self.others)
        longest = max(len(one.token_ids) + one.max_tokens for one in each)
        context = min(longest + self.num_steps + 1, self.loaded.source.context_length)
        spec = SpecConfig(
            algorithm=self.algorithm,
            draft_model_path=str(export),
            num_steps=self.num_steps,
            adaptive=False,
        )
        slots = (context + self.num_steps + 1) * len(self.prompts)
        return replace(
            base,
            model=replace(base.model, context_length=context),
            memory=replace(base.memory, max_total_tokens=slots, mem_fraction_static=0.95),
            schedule=replace(base.schedule, max_running_requests=len(self.prompts)),
            graph=replace(base.graph, disable_cuda_graph=True, cuda_graph_bs=None),
            spec=spec,
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """What building an engine says is said once a measurement, which is too often."""
    logger = logging.getLogger("specengine")
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)


def greedy(prompts: Sequence[ProbePrompt]) -> list[SamplingParams]:
    return [SamplingParams(temperature=0, max_tokens=one.max_tokens) for one in prompts]


def run_prompts(
    engine: Engine, prompts: Sequence[ProbePrompt], params: Sequence[SamplingParams]
) -> list[list[int]]:
    """The tokens of each answer. Raises RequestError where the engine gives one up."""
    answers: list[list[int]] = [[] for _ in prompts]
    for index, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(index), prompt.token_ids, sampling, stream=False)
    while engine.has_work:
        for output in engine.step():
            reason = output.finish_reason
            if reason is not None and reason.kind == "error":
                raise RequestError(reason.message or "the engine gave a request of the probe up")
            answers[int(output.rid)] = output.token_ids
    return answers


def accepted(engine: Engine, prompts: Sequence[ProbePrompt]) -> float:
    """Accepted length of an engine that goes on, over these prompts alone, answered greedily and
    with nothing of them in its cache."""
    engine.flush_cache()
    totals = engine.scheduler.spec_totals
    rounds, tokens = totals.num_rounds, totals.num_accepted_tokens
    run_prompts(engine, prompts, greedy(prompts))
    return 1.0 + (totals.num_accepted_tokens - tokens) / max(totals.num_rounds - rounds, 1)


def probe_prompts(held_out: TokenDataset, count: int, max_tokens: int) -> list[ProbePrompt]:
    """What leads up to the first answer, of the first documents. The measured answer may be as long
    as that of the document, up to `max_tokens`: greedy text that goes on longer would repeat
    itself, and flatter the drafter. Raises DataError where no document has both."""
    found = [one for one in map(_prompt, held_out.documents) if one is not None][:count]
    if not found:
        raise DataError("no held-out document has an answer; raise data.held_out, or add documents")
    return [replace(one, max_tokens=min(one.max_tokens, max_tokens)) for one in found]


def _prompt(document: Document) -> ProbePrompt | None:
    edges = np.diff(document.loss.astype(np.int8), prepend=0, append=0)
    starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    if len(starts) == 0 or starts[0] == 0:
        return None
    return ProbePrompt(document.tokens[: starts[0]].tolist(), int(ends[0] - starts[0]))
