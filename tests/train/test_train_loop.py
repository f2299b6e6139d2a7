"""The training loop: exact resume, what stands after failures, how runs end."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from itertools import count
from pathlib import Path

import pytest
import torch

from specengine.core.errors import ConfigError, TrainingError
from specengine.draft.train import loop
from specengine.draft.train.checkpoint import find_checkpoints, load_checkpoint
from specengine.draft.train.data.dataset import TokenDataset
from tests.train.training_runs import BigramTask, bigram_config, bigram_data, run_bigram


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    return bigram_data(tmp_path_factory.mktemp("data"))


def names(output: Path) -> list[str]:
    return [path.stem for path in find_checkpoints(output / "checkpoints")]


def records(output: Path) -> list[dict[str, float | str]]:
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]


class Interrupt:
    """A probe that sends this process a signal at its nth call."""

    def __init__(self, signum: int) -> None:
        self.signum = signum

    def __call__(self, export: Path) -> dict[str, float]:
        assert (export / "weights.pt").is_file()
        os.kill(os.getpid(), self.signum)
        return {"accepted_length": 1.0}


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_a_resumed_run_ends_with_the_same_bits(
    tmp_path: Path, dataset: TokenDataset, optimiser: str
) -> None:
    name = f"optimiser.name={optimiser}"
    straight = bigram_config(tmp_path / "straight", name)
    run_bigram(straight, dataset)
    halves = tmp_path / "halves"
    stopping = bigram_config(halves, name, "run.probe_every=6")
    outcome = run_bigram(stopping, dataset, probe=Interrupt(signal.SIGTERM))
    assert (outcome.step, outcome.stopped_by) == (6, signal.SIGTERM)
    assert outcome.export is None
    torch.rand(7)  # another random stream than the one that goes on
    run_bigram(bigram_config(halves, name, "run.resume=true"), dataset)

    ends = [
        load_checkpoint(tmp_path / run / "checkpoints" / "step-00000012.pt")
        for run in ("straight", "halves")
    ]
    assert "frozen" not in ends[0].module
    for key, value in ends[0].module.items():
        assert torch.equal(value, ends[1].module[key]), key
    assert ends[0].data == ends[1].data
    assert ends[0].tokens == ends[1].tokens
    exported = [
        torch.load(tmp_path / run / "export" / "weights.pt") for run in ("straight", "halves")
    ]
    assert all(torch.equal(exported[0][key], exported[1][key]) for key in exported[0])


def test_the_log_goes_on_where_the_run_does(tmp_path: Path, dataset: TokenDataset) -> None:
    output = tmp_path / "run"
    run_bigram(bigram_config(output, "schedule.max_steps=8"), dataset)
    (output / "checkpoints" / "step-00000008.pt").unlink()  # as if it had been killed before
    with (output / "log.jsonl").open("a") as file:
        file.write('{"step": 9')
    run_bigram(bigram_config(output, "schedule.max_steps=8", "run.resume=true"), dataset)
    steps = [(one["kind"], one["step"]) for one in records(output)]
    assert steps == sorted(steps, key=lambda pair: pair[1])
    assert len(set(steps)) == len(steps)
    assert {("train", 2), ("train", 8), ("held_out", 4), ("held_out", 8)} <= set(steps)
    assert all(key in records(output)[1] for key in ("loss", "accuracy", "lr", "grad_norm"))


def test_accumulated_forwards_weigh_by_what_they_learn_from(
    tmp_path: Path, dataset: TokenDataset
) -> None:
    outcome = run_bigram(bigram_config(tmp_path / "run", "optimiser.accumulate=3"), dataset)
    assert outcome.held_out["loss"] < 5.85  # ln 320 is 5.77; random tokens cannot be learned
    kept = load_checkpoint(find_checkpoints(tmp_path / "run" / "checkpoints")[-1])
    assert kept.tokens > 12 * 3 * 90


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path, dataset: TokenDataset) -> None:
    run_bigram(bigram_config(tmp_path / "run", "run.save_every=3", "run.keep=2"), dataset)
    assert names(tmp_path / "run") == ["step-00000009", "step-00000012"]


def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path, dataset: TokenDataset) -> None:
    calls = iter([1.0] * 7 + [float("nan")] * 20)
    task = BigramTask(lambda: next(calls))
    config = bigram_config(tmp_path / "run", "run.eval_every=100")
    with pytest.raises(TrainingError, match=r"loss is nan at step 8.*step-00000004"):
        run_bigram(config, dataset, task)
    assert names(tmp_path / "run") == ["step-00000004"]
    good = load_checkpoint(find_checkpoints(tmp_path / "run" / "checkpoints")[0])
    assert all(value.isfinite().all() for value in good.module.values())


def test_a_full_disk_leaves_the_checkpoints_before(
    tmp_path: Path, dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.fsync, []

    def fsync(handle: int) -> None:
        calls.append(handle)
        if len(calls) > 2:  # the second checkpoint: each one syncs its file and its directory
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(TrainingError, match=r"cannot write .*step-00000008.*No space left"):
        run_bigram(bigram_config(tmp_path / "run"), dataset)
    assert os.listdir(tmp_path / "run" / "checkpoints") == ["step-00000004.pt"]
    assert load_checkpoint(find_checkpoints(tmp_path / "run" / "checkpoints")[0]).step == 4


def test_killed_amid_a_checkpoint(
    tmp_path: Path, dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is on the disk when the second checkpoint is written but not yet synced is what a kill
    would leave: nothing of this process has a hand in it afterwards."""
    run, left, real, calls = tmp_path / "run", tmp_path / "left", os.fsync, count(1)

    def sync(handle: int) -> None:
        if next(calls) == 3:
            shutil.copytree(run, left)
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", sync)
        run_bigram(bigram_config(run), dataset)
    assert (left / "checkpoints" / "step-00000008.pt.part").exists()
    assert names(left) == ["step-00000004"]
    assert run_bigram(bigram_config(left, "run.resume=true"), dataset).step == 12


def test_a_damaged_checkpoint_is_named(tmp_path: Path, dataset: TokenDataset) -> None:
    output = tmp_path / "run"
    run_bigram(bigram_config(output), dataset)
    last = find_checkpoints(output / "checkpoints")[-1]
    last.write_bytes(last.read_bytes()[:100])
    with pytest.raises(TrainingError, match=r"step-00000012\.pt cannot be read"):
        run_bigram(bigram_config(output, "run.resume=true"), dataset)


def test_a_run_is_not_written_over(tmp_path: Path, dataset: TokenDataset) -> None:
    run_bigram(bigram_config(tmp_path / "run"), dataset)
    with pytest.raises(ConfigError, match=r"holds a run already.*run.resume=true"):
        run_bigram(bigram_config(tmp_path / "run"), dataset)


def test_a_run_goes_on_with_the_same_data_and_task_alone(
    tmp_path: Path, dataset: TokenDataset
) -> None:
    run_bigram(bigram_config(tmp_path / "run"), dataset)
    other = bigram_config(tmp_path / "run", "run.resume=true", "data.held_out=0.3")
    with pytest.raises(ConfigError, match=r"data\.held_out was 0\.2 and is 0\.3"):
        run_bigram(other, dataset)


def test_wall_time_ends_a_run(
    tmp_path: Path, dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = count()  # at a clock that goes on by 10 ms with each of them
    monkeypatch.setattr(loop, "monotonic", lambda: next(looks) * 0.01)
    config = bigram_config(
        tmp_path / "run", "schedule.max_steps=1000000", "run.max_minutes=0.005", "run.log_every=1"
    )
    outcome = run_bigram(config, dataset)
    assert 3 < outcome.step < 30
    assert outcome.export is not None
    rates = [float(one["lr"]) for one in records(tmp_path / "run") if one["kind"] == "train"]
    assert rates[-1] < 0.002 < max(rates)  # fallen with the clock


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.output=", "run.output is not set"),
        ("data.batch_tokens=10", "no document was held out"),
        ("data.held_out=0.0001", "no document was held out"),
    ],
)
def test_what_cannot_be_run(
    tmp_path: Path, dataset: TokenDataset, override: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_bigram(bigram_config(tmp_path / "run", override), dataset)
