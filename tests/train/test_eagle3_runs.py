"""EAGLE-3 in the training loop: exact resume, and parameters shared out over processes."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specengine.draft.train.config import TrainConfig, load_config
from specengine.draft.train.data.dataset import TokenDataset
from specengine.draft.train.eagle3_task import Eagle3Config, make_eagle3_task
from specengine.draft.train.loop import Trainer
from specengine.draft.train.processes import start_processes
from tests.train.data_sets import random_dataset
from tests.train.draft_training import load_target

ROOT = Path(__file__).parents[2]


def config(output: Path, *overrides: str) -> TrainConfig:
    settings = [
        f"run.output={output}",
        "task.draft_vocab_size=100",
        "task.num_steps=2",
        "task.chain_steps=2",
        "task.dtype=float32",
        "data.batch_tokens=128",
        "data.held_out=0.2",
        "optimiser.accumulate=2",
        "schedule.max_steps=4",
        "schedule.warmup_steps=1",
        "run.device=cpu",
        "run.save_every=2",
    ]
    return load_config(Eagle3Config, None, [*settings, *overrides])


def run(target: Path, data: Path, settings: TrainConfig) -> dict[str, float]:
    """As specengine.lab.training does it, without a probe."""
    processes = start_processes("cpu")
    dataset = TokenDataset(data)
    torch.manual_seed(settings.run.seed)
    documents, _ = dataset.split(settings.data.held_out, settings.data.seed)
    assert isinstance(settings.task, Eagle3Config)
    task = make_eagle3_task(load_target(target), documents, settings.task)
    held_out: dict[str, float] = Trainer(task, dataset, settings, processes).run().held_out
    processes.close()
    return held_out


def weights(output: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(output / "export" / "model.safetensors")
    return tensors


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    random_dataset(folder, [20, 30, 25, 15] * 15)
    return folder


def test_a_resumed_run_ends_with_the_same_bits(
    small_models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    target = small_models["llama"]
    held_out = run(target, data, config(tmp_path / "straight"))
    assert {"loss", "accepted_length", "acceptance_1", "missed_1"} <= set(held_out)
    halves = tmp_path / "halves"
    shutil.copytree(tmp_path / "straight", halves)
    shutil.rmtree(halves / "export")
    (halves / "checkpoints" / "step-00000004.pt").unlink()
    run(target, data, config(halves, "run.resume=true"))
    straight, resumed = weights(tmp_path / "straight"), weights(halves)
    assert set(straight) == set(resumed)
    assert all(torch.equal(one, resumed[name]) for name, one in straight.items())


def start(rank: int, port: int, target: Path, data: Path, output: Path) -> subprocess.Popen[bytes]:
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
    environment = {
        **os.environ,
        **{name: str(value) for name, value in places.items()},
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tests.train.test_eagle3_runs"]
    arguments = [str(path) for path in (target, data, output)]
    return subprocess.Popen([*command, *arguments], env=environment, cwd=ROOT)


@pytest.mark.slow
def test_two_processes_learn_what_one_does(
    small_models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    target = small_models["llama"]
    run(target, data, config(tmp_path / "one"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    both = [start(rank, port, target, data, tmp_path / "two") for rank in range(2)]
    try:
        assert [process.wait(120) for process in both] == [0, 0]
    finally:
        for process in both:
            process.kill()
            process.wait()
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    for name, value in one.items():
        assert torch.allclose(value.float(), two[name].float(), atol=1e-4), name


if __name__ == "__main__":
    folders = [Path(path) for path in sys.argv[1:]]
    run(folders[0], folders[1], config(folders[2]))
