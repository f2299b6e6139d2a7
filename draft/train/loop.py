"""The training loop: batches in, steps taken, and beside them evaluation, probes, checkpoints."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from specengine.core.errors import TrainingError
from specengine.draft.train.config import TrainConfig
from specengine.draft.train.data.dataset import TokenDataset
from specengine.draft.train.data.packing import PackedBatches
from specengine.draft.train.evaluation import evaluate, take_batches
from specengine.draft.train.optimiser import lr_factor, make_optimisers, set_lr, trainable
from specengine.draft.train.processes import Processes, chosen_by_rules
from specengine.draft.train.progress import Place, Progress, progress_of
from specengine.draft.train.run_log import RunLog
from specengine.draft.train.state import RunState
from specengine.draft.train.stopping import StopRequest, stop_on_signals
from specengine.draft.train.task import TaskLoss, TrainTask

logger = logging.getLogger(__name__)

# Measures what was exported to a directory, such as the accepted length in a real engine.
Probe = Callable[[Path], Mapping[str, float]]


@dataclass(frozen=True)
class Outcome:
    step: int
    stopped_by: int  # the signal that ended the run early, 0 for none; then nothing was exported
    export: Path | None
    held_out: dict[str, float]
    probe: dict[str, float]


@dataclass
class Window:
    """What was learned since the last line of the log, as sums."""

    values: dict[str, float] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)

    def add(self, values: Mapping[str, float], counts: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.values[name] = self.values.get(name, 0.0) + value
            self.counts[name] = self.counts.get(name, 0.0) + counts[name]

    def take(self) -> dict[str, float]:
        means = {name: value / max(self.counts[name], 1.0) for name, value in self.values.items()}
        self.values, self.counts = {}, {}
        return means


class Trainer:
    """One run of a task over a data set. `run` may be called once."""

    def __init__(
        self,
        task: TrainTask,
        dataset: TokenDataset,
        config: TrainConfig,
        processes: Processes,
        probe: Probe | None = None,
        held_out: TokenDataset | None = None,
    ) -> None:
        """Goes on from the last checkpoint where run.resume says so. held_out: to evaluate on; else
        a share of the data set is, and is not trained on. Raises ConfigError where the
        output directory or the numbers do not fit, DataError, or TrainingError."""
        self.task, self.config, self.processes, self.probe = task, config, processes, probe
        self.state = RunState(task, dataset, config, processes)
        train = dataset
        if held_out is None:
            train, held_out = dataset.split(config.data.held_out, config.data.seed)
        self.held_out = take_batches(held_out, config.data.batch_tokens, config.run.eval_batches)
        self.batches = PackedBatches(
            train, config.data.batch_tokens, config.data.seed, processes.rank, processes.count
        )
        processes.place(task.module)
        self.optimisers = make_optimisers(task.module, config.optimiser)
        self.state.begin(self.optimisers, self.batches)
        self.window = Window()
        self.last_values: dict[str, dict[str, float]] = {}
        self.last_step: dict[str, int] = {}
        self.step_tokens = 0  # of this process
        self.session_tokens, self.session_start = 0, monotonic()

    def run(self) -> Outcome:
        """Until the schedule or the wall time is used up, or a signal comes. Raises TrainingError
        where the loss is no number any more, or a checkpoint cannot be written."""
        self.session_start = monotonic()
        first = self.processes.is_first
        rules, shown = chosen_by_rules(self.processes.device), progress_of(self.task.name, first)
        with rules, stop_on_signals() as request, shown as progress:
            log = RunLog(self.state.directory, self.state.step) if first else None
            try:
                stopped_by = self._loop(request, progress, log)
                export = None if stopped_by else self._finish(progress, log)
            finally:
                if log is not None:
                    log.close()
        held_out, probed = (self.last_values.get(kind, {}) for kind in ("held_out", "probe"))
        return Outcome(self.state.step, stopped_by, export, held_out, probed)

    def _loop(self, request: StopRequest, progress: Progress, log: RunLog | None) -> int:
        """The signal that ended it, or 0."""
        run, state = self.config.run, self.state
        if state.step == 0:
            self._evaluate(progress, log)
        while True:
            share, signum = self._share_done(request)
            if share >= 1.0 or signum:
                state.save(self._seconds())
                return signum
            lr = self.config.optimiser.lr * lr_factor(self.config.schedule, state.step, share)
            numbers = {"lr": lr, "grad_norm": self._step(lr)}
            place = self._place(share)
            progress.update(place)
            if state.step % run.log_every == 0 or state.step == 1:
                numbers |= {"epoch": self.batches.epoch, "tokens": state.tokens}
                self._record("train", self.window.take() | numbers, progress, log)
            if state.step % run.eval_every == 0:
                self._evaluate(progress, log)
            if run.probe_every and state.step % run.probe_every == 0:
                self._probe(state.export("probe"), progress, log)
            if state.step % run.save_every == 0:
                state.save(self._seconds())

    def _finish(self, progress: Progress, log: RunLog | None) -> Path:
        if self.last_step.get("held_out") != self.state.step:
            self._evaluate(progress, log)
        export = self.state.export("export")
        self._probe(export, progress, log)
        return export

    def _step(self, lr: float) -> float:
        """One step of the optimisers -> the norm of the gradient before it was clipped."""
        set_lr(self.optimisers, lr)
        outs = [self._forward_backward() for _ in range(self.state.forwards)]
        values, counts = self._total(outs)
        self._check_finite(values["loss"], "loss")
        scale = self.processes.count / max(counts["loss"], 1.0)  # sharded gradients are averages
        parameters = [one for _, one in trainable(self.task.module)]
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        limit = self.config.optimiser.max_grad_norm
        norm: Tensor = torch.nn.utils.clip_grad_norm_(parameters, limit)
        grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        self._check_finite(grad_norm, "gradient's norm")
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.state.step += 1
        self.window.add(values, counts)
        return grad_norm

    def _forward_backward(self) -> TaskLoss:
        batch = next(self.batches).to(self.processes.device)
        with self._autocast():
            out = self.task.loss(batch)
        (out.loss * out.count).backward()  # type: ignore[no-untyped-call]
        self.step_tokens += batch.num_tokens
        return out

    def _total(self, outs: list[TaskLoss]) -> tuple[dict[str, float], dict[str, float]]:
        """Sums and counts of the loss and of the metrics, over forwards and processes. Counts the
        tokens of the step on the way: the device is waited for once."""
        names = ["loss", *outs[0].metrics, "tokens"]
        device = self.processes.device
        total = torch.zeros(2, len(names), dtype=torch.float64, device=device)
        total[:, -1] += self.step_tokens
        for out in outs:
            total[0, :-1] += torch.stack([out.loss.detach() * out.count, *out.metrics.values()])
            total[1, :-1] += torch.stack([out.count, *out.counts.values()])
        (*values, tokens), (*counts, _) = self.processes.sum(total).tolist()
        self.state.tokens += int(tokens)
        self.session_tokens += int(tokens)
        self.step_tokens = 0
        return dict(zip(names, values, strict=False)), dict(zip(names, counts, strict=False))

    def _check_finite(self, value: float, what: str) -> None:
        if math.isfinite(value):
            return
        last = self.state.last_saved
        advice = f"{last} is whole: go on with run.resume=true and" if last else "Start again with"
        raise TrainingError(
            f"the {what} is {value} at step {self.state.step + 1}. {advice} a lower optimiser.lr, "
            "or a longer schedule.warmup_steps"
        )

    def _autocast(self) -> Any:
        on_gpu = self.processes.device.type == "cuda"
        return torch.autocast("cuda", torch.bfloat16) if on_gpu else nullcontext()

    def _evaluate(self, progress: Progress, log: RunLog | None) -> None:
        with self._autocast():
            values = evaluate(self.task, self.held_out, self.processes)
        self._record("held_out", values, progress, log)

    def _probe(self, export: Path, progress: Progress, log: RunLog | None) -> None:
        if self.probe is not None and self.processes.is_first:
            with torch.random.fork_rng(self.processes.random_devices):
                values = dict(self.probe(export))
            self._record("probe", values, progress, log)
        self.processes.wait()

    def _record(
        self, kind: str, values: dict[str, float], progress: Progress, log: RunLog | None
    ) -> None:
        self.last_values[kind], self.last_step[kind] = values, self.state.step
        progress.show(self._place(self._share_of(self._seconds())), kind, values)
        if log is not None:
            log.write(self.state.step, kind, values | {"seconds": self._seconds()})

    def _share_done(self, request: StopRequest) -> tuple[float, int]:
        """The share of the run that is done, and the signal that asked for its end; the same in
        every process."""
        seconds, signum = self.processes.most(self._seconds(), float(request.signum))
        return self._share_of(seconds), int(signum)

    def _share_of(self, seconds: float) -> float:
        by_steps = self.state.step / self.config.schedule.max_steps
        minutes = self.config.run.max_minutes
        return min(1.0, by_steps if minutes is None else max(by_steps, seconds / 60 / minutes))

    def _seconds(self) -> float:
        """Wall time of the run, over all sessions."""
        return self.state.seconds_before + monotonic() - self.session_start

    def _place(self, share: float) -> Place:
        session = max(monotonic() - self.session_start, 1e-9)
        return Place(
            step=self.state.step,
            max_steps=self.config.schedule.max_steps,
            share=share,
            seconds_left=self._seconds() * (1 - share) / max(share, 1e-9),
            tokens_per_second=self.session_tokens / session,
        )
