"""Processes of jobs: environment, log, and the end of all that they started; the archive."""

from __future__ import annotations

import os
import signal
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.jobs import archive
from benchmarks.jobs.plan import Job
from benchmarks.jobs.processes import LOG, LocalProcess, Machine, processes_with
from benchmarks.jobs.schedule import Placed

PYTHON = {"python": sys.executable}
# Starts a process in a session of its own, says its number, and stays.
LEAVES_ONE = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE,
                         start_new_session=True)
print(child.pid, flush=True)
if sys.argv[1] == "stay":
    child.wait()
"""


def start(tmp_path: Path, code: str, *arguments: str, **more: object) -> LocalProcess:
    (tmp_path / "code.py").write_text(code)
    command = " ".join(["{python}", str(tmp_path / "code.py"), *arguments])
    job = Job("job", command, 5, 10, **more)  # type: ignore[arg-type]
    return Machine(tmp_path, tmp_path / "work", [], PYTHON).launch(Placed(job, ("3",), 5))


def log(tmp_path: Path) -> str:
    return (tmp_path / "work/jobs/job" / LOG).read_text()


def test_job_sees_its_card_and_no_thread_count_but_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    code = "import os\nfor name in ('OMP_NUM_THREADS', 'CUDA_VISIBLE_DEVICES', 'NCCL_NVLS_ENABLE'):"
    code += "\n    print(name, os.environ.get(name))\n"
    process = start(tmp_path, code)
    assert process._process.wait() == 0
    assert log(tmp_path).splitlines()[1:] == [
        "OMP_NUM_THREADS None",
        "CUDA_VISIBLE_DEVICES 3",
        "NCCL_NVLS_ENABLE 0",
    ]
    process = start(tmp_path, code, env={"OMP_NUM_THREADS": "2"})
    process._process.wait()
    assert "OMP_NUM_THREADS 2" in log(tmp_path)
    assert process.last_line() == "NCCL_NVLS_ENABLE 0"


def test_output_folder_is_the_jobs_own(tmp_path: Path) -> None:
    process = start(tmp_path, "import sys, pathlib; pathlib.Path(sys.argv[1]).touch()", "{out}/x")
    assert process._process.wait() == 0
    assert (tmp_path / "work/jobs/job/x").exists()


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="Linux tells of processes")
@pytest.mark.parametrize("ending", ["stay", "go"])
def test_kill_ends_processes_in_other_sessions(tmp_path: Path, ending: str) -> None:
    process = start(tmp_path, LEAVES_ONE, ending)
    if ending == "go":
        process._process.wait()
    while len(log(tmp_path).split("\n")) < 3:
        os.sched_yield()
    child = int(process.last_line())
    assert child in processes_with("BENCHMARK_JOB", str(tmp_path / "work/jobs/job"))
    process.kill()
    assert process.poll() == (-9 if ending == "stay" else 0)
    while any(processes_with("BENCHMARK_JOB", str(tmp_path / "work/jobs/job"))):
        os.sched_yield()


@pytest.fixture
def in_the_background() -> Iterator[None]:
    """As a shell starts what stands before an &."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("in_the_background")
def test_interrupt_lets_a_command_clean_up(tmp_path: Path) -> None:
    code = "try:\n    print('runs', flush=True)\n"
    # By turns: a signal that comes just before a wait without an end does not end it.
    code += "    import time\n    while True: time.sleep(0.05)\n"
    code += "except KeyboardInterrupt:\n    print('cleaned up')\n"
    process = start(tmp_path, code)
    while "runs" not in log(tmp_path):
        os.sched_yield()
    process.interrupt()
    assert process._process.wait(60) == 0
    assert process.last_line() == "cleaned up"


def test_archive_has_all_files_and_of_large_ones_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "MOST_BYTES", 10)
    folder = tmp_path / "jobs"
    (folder / "a").mkdir(parents=True)
    (folder / "a/small").write_text("0123456789")
    (folder / "a/large").write_text("0123456789abc")
    (folder / "link").symlink_to("a")
    target = tmp_path / "results.tar.xz"
    for _ in range(2):
        archive.pack(folder, target)
    with tarfile.open(target) as found:
        texts = {one.name: found.extractfile(one).read() for one in found}  # type: ignore[union-attr]
    assert texts == {"a/small": b"0123456789", "a/large.end": b"3456789abc"}
    assert [*tmp_path.glob(".*partial")] == []


def test_large_archive_is_cut_into_parts_that_join(tmp_path: Path) -> None:
    whole = tmp_path / "x.tar.xz"
    whole.write_bytes(bytes(range(25)))
    assert archive.parts_of(whole, 25) == [whole]
    parts = archive.parts_of(whole, 10)
    assert [one.name for one in parts] == ["x.tar.xz.0", "x.tar.xz.1", "x.tar.xz.2"]
    assert b"".join(one.read_bytes() for one in parts) == bytes(range(25))
    assert not whole.exists()
