"""The process of a job: its environment, its log, and the end of all that it started."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.jobs.plan import filled
from benchmarks.jobs.schedule import Placed

LOG = "log.txt"
_JOB = "BENCHMARK_JOB"  # by which the processes of a job are found, in whatever session
_GOES = 10  # seconds until a killed process has gone
_TAIL = 4096  # bytes of a log that its last line is looked for in


@dataclass(frozen=True)
class Machine:
    """tree: the checkout, where jobs run. folder: of the jobs' own folders and of what they share.
    sites: folders of packages that are not installed. values: of placeholders."""

    tree: Path
    folder: Path
    sites: Sequence[Path]
    values: Mapping[str, str]

    def launch(self, placed: Placed) -> LocalProcess:
        """Raises OSError where the command cannot be run."""
        job = placed.job
        out = self.folder / "jobs" / job.name
        out.mkdir(parents=True, exist_ok=True)
        words = shlex.split(filled(job.command, {**self.values, "out": str(out)}))
        environment = self.environment(placed, out)
        return LocalProcess(words, self.tree, environment, out / LOG)

    def environment(self, placed: Placed, out: Path) -> dict[str, str]:
        """As this process's, but for what lies below; a job's own `env` comes last."""
        given = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        paths = [self.tree, *self.sites, *filter(None, [given.get("PYTHONPATH")])]
        return {
            **given,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "PYTHONUNBUFFERED": "1",
            "CUDA_VISIBLE_DEVICES": ",".join(placed.cards),
            "NCCL_NVLS_ENABLE": "0",
            "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
            "TRITON_CACHE_DIR": str(self.folder / "cache/triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "cache/inductor"),
            "HF_HUB_OFFLINE": "1",
            "BENCHMARK_TABLES": str(out / "tables"),
            _JOB: str(out),
            **placed.job.env,
        }


class LocalProcess:
    """A command with its log, in a process group of its own."""

    def __init__(
        self, words: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path
    ) -> None:
        self._log, self._job = log, environment[_JOB]
        with log.open("wb") as file:
            file.write(f"$ {shlex.join(words)}\n".encode())
            file.flush()
            self._process = subprocess.Popen(
                words,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_hear_interrupts,
            )

    def poll(self) -> int | None:
        return self._process.poll()

    def interrupt(self) -> None:
        """The command itself alone, which ends what it started."""
        self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        for pid in [*processes_with(_JOB, self._job)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # a driver may keep it
            self._process.wait(_GOES)

    def last_line(self) -> str:
        with self._log.open("rb") as file:
            file.seek(max(0, self._log.stat().st_size - _TAIL))
            lines = file.read().decode(errors="replace").split("\n")
        return next((one.strip()[:160] for one in reversed(lines) if one.strip()), "")


def _hear_interrupts() -> None:
    """What a shell starts in the background ignores them, and so would all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def processes_with(name: str, value: str) -> Iterator[int]:
    """Those whose environment has this variable with this value, as Linux tells of them."""
    line = f"{name}={value}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if line in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)
        except OSError:  # it has ended, or is another user's
            continue
