"""A drafter that learns from what its engine answers, and takes its place there at once.

A round: the engine answers prompts with the drafter as it is; the drafter trains on the answers;
the engine takes the new weights in place, without a restart (Engine.update_weights). Before and
after it, the engine answers held-out prompts, whose accepted length says what the round was worth.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from specengine.core.errors import ConfigError
from specengine.core.sampling import SamplingParams
from specengine.draft.train.config import TrainConfig
from specengine.draft.train.data.dataset import Document, TokenDataset
from specengine.draft.train.data.writer import write_dataset
from specengine.draft.train.loop import Outcome, Trainer
from specengine.draft.train.processes import Processes
from specengine.draft.train.task import TrainTask
from specengine.engine.loop import Engine
from specengine.lab.probe import EngineProbe, ProbePrompt, accepted, probe_prompts, run_prompts

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RoundOutcome:
    """Accepted lengths of the running engine, on held-out prompts."""

    before: float
    after: float
    answer_tokens: int


class OnPolicyTrainer:
    """`run` may be called once."""

    def __init__(
        self,
        task: TrainTask,
        dataset: TokenDataset,
        held_out: TokenDataset,
        probe: EngineProbe,
        config: TrainConfig,
        processes: Processes,
    ) -> None:
        """dataset: whose prompts are answered. held_out: to evaluate on. probe: of its prompts.
        Raises ConfigError for what cannot be done."""
        if processes.count > 1:
            raise ConfigError("--on-policy trains in one process; start it without torchrun")
        if config.run.resume:
            raise ConfigError("--on-policy does not go on with a run: leave run.resume out")
        if not config.run.output:
            raise ConfigError("run.output is not set; name a directory for the run")
        run = config.run
        wanted = run.on_policy_prompts * run.on_policy_rounds
        self.asked = probe_prompts(dataset, wanted, run.on_policy_tokens)
        self.probe = replace(probe, others=self.asked)
        self.task, self.target, self.held_out = task, dataset.manifest.target, held_out
        self.config, self.processes = config, processes
        self.directory = Path(config.run.output)
        self.rounds: list[RoundOutcome] = []

    def run(self) -> Outcome:
        """Raises TrainingError, DataError or ConfigError."""
        run, outcome = self.config.run, None
        with self.probe.running(self._export(self.directory / "begin")) as engine:
            before = accepted(engine, self.probe.prompts)
            logger.info("on policy: accepted length %.3f before training", before)
            for number, prompts in enumerate(self._prompts(), start=1):
                answers = self._answer(engine, prompts, self.directory / f"round-{number}")
                outcome = self._train(answers, number)
                if outcome.export is None:
                    return outcome
                engine.update_weights(draft_model=str(outcome.export))
                after = accepted(engine, self.probe.prompts)
                tokens = int(answers.lengths.sum())
                self.rounds.append(RoundOutcome(before, after, tokens))
                logger.info(
                    "on policy: round %d of %d: accepted length %.3f, %.3f before, from %d tokens",
                    *(number, run.on_policy_rounds, after, before, tokens),
                )
                before = after
        assert outcome is not None
        assert outcome.export is not None
        export = self.directory / "export"
        shutil.rmtree(export, ignore_errors=True)
        shutil.copytree(outcome.export, export)
        lengths = [self.rounds[0].before, *(one.after for one in self.rounds)]
        measured = {f"accepted_length_{k}": value for k, value in enumerate(lengths)}
        return replace(outcome, export=export, probe=measured)

    def _export(self, directory: Path) -> Path:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        self.task.export(directory)
        return directory

    def _prompts(self) -> Iterator[Sequence[ProbePrompt]]:
        """The prompts of each round, others as long as there are others."""
        run = self.config.run
        count, found = run.on_policy_prompts, self.asked
        for number in range(run.on_policy_rounds):
            yield [found[(number * count + k) % len(found)] for k in range(min(count, len(found)))]

    def _answer(
        self, engine: Engine, prompts: Sequence[ProbePrompt], directory: Path
    ) -> TokenDataset:
        run = self.config.run
        seeds = range(len(self.rounds) * len(prompts), (len(self.rounds) + 1) * len(prompts))
        params = [
            SamplingParams(temperature=run.on_policy_temperature, max_tokens=one.max_tokens, seed=k)
            for one, k in zip(prompts, seeds, strict=True)
        ]
        answers = run_prompts(engine, prompts, params)
        documents = [_document(prompt, ids) for prompt, ids in zip(prompts, answers, strict=True)]
        shutil.rmtree(directory, ignore_errors=True)
        return write_dataset(directory / "data", documents, self.target)

    def _train(self, answers: TokenDataset, number: int) -> Outcome:
        config = self.config
        steps = max(1, config.schedule.max_steps // config.run.on_policy_rounds)
        minutes = config.run.max_minutes
        minutes = None if minutes is None else minutes / config.run.on_policy_rounds
        output = str(self.directory / f"round-{number}" / "run")
        one = replace(
            config,
            schedule=replace(config.schedule, max_steps=steps),
            run=replace(config.run, output=output, max_minutes=minutes, probe_every=0),
        )
        return Trainer(self.task, answers, one, self.processes, held_out=self.held_out).run()


def _document(prompt: ProbePrompt, answer: Sequence[int]) -> Document:
    tokens = np.array([*prompt.token_ids, *answer], dtype=np.uint32)
    loss = np.zeros(len(tokens), np.uint8)
    loss[len(prompt.token_ids) :] = 1
    return Document(tokens, loss)
