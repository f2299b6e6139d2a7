"""Two processes learn what one does."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import threading
from pathlib import Path

import pytest
import torch

from specengine.core.errors import ConfigError
from specengine.draft.train.checkpoint import find_checkpoints, load_checkpoint
from specengine.draft.train.processes import (
    Processes,
    chosen_by_rules,
    let_gloo_rest,
    start_processes,
)
from specengine.draft.train.state import RunState
from tests.support.programs import program
from tests.train.training_runs import BigramTask, bigram_config, bigram_data, run_bigram
from tests.train.two_processes import SETTINGS, CalmTask, run_twice

ROOT = Path(__file__).parents[2]


def losses(output: Path) -> list[float]:
    lines = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines]


def places(rank: int, port: int) -> dict[str, str]:
    """What torchrun's environment says."""
    found = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
    return {**{name: str(one) for name, one in found.items()}, "MASTER_ADDR": "127.0.0.1"}


def second_process(port: int, data: Path, output: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **places(1, port), "OMP_NUM_THREADS": "1"}
    command = [*program("tests.train.two_processes"), str(data), str(output)]
    return subprocess.Popen(command, env=environment, cwd=ROOT)


def test_two_processes_learn_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of them is this one."""
    data = tmp_path / "data"
    dataset = bigram_data(data)
    torch.manual_seed(0)
    run_bigram(bigram_config(tmp_path / "one", *SETTINGS), dataset, CalmTask())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    other = second_process(port, data, tmp_path / "two")
    try:
        with monkeypatch.context() as patch:
            for name, value in places(0, port).items():
                patch.setenv(name, value)
            run_twice(data, tmp_path / "two")
        assert other.wait(120) == 0
    finally:
        other.kill()
        other.wait()
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    one, two = (
        load_checkpoint(find_checkpoints(tmp_path / name / "checkpoints")[-1])
        for name in ("one", "two")
    )
    assert (one.step, one.tokens) == (two.step, two.tokens)
    for name, value in one.module.items():
        assert torch.allclose(value, two.module[name], atol=1e-5), name
    exported = torch.load(tmp_path / "two" / "export" / "weights.pt")
    assert all(torch.equal(exported[name], value) for name, value in two.module.items())


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are not to be seen")
def test_the_last_threads_to_let_go_are_waited_for() -> None:
    """One that still had a tensor when the interpreter ended aborted a run that was done."""
    events: list[str] = []
    starts = threading.Event()

    def lets_go() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_gloo_runloop")
        starts.set()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000)  # without the interpreter's lock
        events.append("let go")

    thread = threading.Thread(target=lets_go)
    thread.start()
    starts.wait()
    let_gloo_rest()
    events.append("went on")
    thread.join()
    assert events == ["let go", "went on"]


def test_forwards_are_shared_equally(tmp_path: Path) -> None:
    three = Processes(0, 3, torch.device("cpu"))
    config = bigram_config(tmp_path / "run", "optimiser.accumulate=2")
    with pytest.raises(ConfigError, match="cannot be shared equally by 3 processes"):
        RunState(BigramTask(), bigram_data(tmp_path / "data"), config, three)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_where_there_is_none() -> None:
    with pytest.raises(ConfigError, match="PyTorch sees no CUDA device"):
        start_processes("cuda")


def test_code_for_a_gpu_is_compiled_without_timing_its_forms() -> None:
    from torch._inductor import config

    with chosen_by_rules(torch.device("cuda")):
        assert config.deterministic
    with chosen_by_rules(torch.device("cpu")):
        assert not config.deterministic
