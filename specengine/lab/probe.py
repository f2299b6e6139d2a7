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

    loaded: the target, whose weights every measurement shares.
    """

    loaded: LoadedModel
    algorithm: str
    prompts: Sequence[ProbePrompt]
    num_steps: int

    def __call__(self, export: Path) -> dict[str, float]:
        """accepted_length: 1 + accepted / rounds, bonus token included, over all rounds.
        acceptance_0: of the rounds that drafted, the share whose first drafted token stood."""
        with _quiet():
            engine = build_engine(self._config(export), self.loaded)
        for index, prompt in enumerate(self.prompts):
            sampling = SamplingParams(temperature=0, max_tokens=prompt.max_tokens)
            engine.add_request(f"probe-{index}", prompt.token_ids, sampling)
        _run(engine)
        totals = engine.stats().spec
        first = totals.accepted_per_pos[0] if totals.accepted_per_pos else 0
        return {
            "accepted_length": totals.mean_acceptance_length,
            "acceptance_0": first / max(totals.num_drafts, 1),
        }

    def _config(self, export: Path) -> EngineConfig:
        base = self.loaded.config
        longest = max(len(one.token_ids) + one.max_tokens for one in self.prompts)
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


def _run(engine: Engine) -> None:
    while engine.has_work:
        for output in engine.step():
            reason = output.finish_reason
            if reason is not None and reason.kind == "error":
                raise RequestError(reason.message or "the engine gave a request of the probe up")


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
