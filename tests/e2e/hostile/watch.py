"""What a server of several processes holds (memory, pages, queues), and which probes it answers."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.support.processes import ROOT, Served
from tests.support.waiting import until

KEY = "operator"  # --admin-api-key
SLOWEST = 0.5  # seconds a probe may take
GROWTH = 1.10  # memory after, by memory before
SETTLING = 90.0  # seconds in which all must be given back
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_usage_ratio")


@dataclass(frozen=True)
class Holdings:
    """MiB of resident memory by process, and what is in use. Grammar trials are not counted: they
    are ended and begun at any time, and each has a limit of its own."""

    memory: dict[str, float]
    in_use: dict[str, float]
    pids: tuple[int, ...]
    descriptors: int  # open files and connections of all of them

    @property
    def total(self) -> float:
        return sum(self.memory.values())


def hold(served: Served) -> Holdings:
    """As it stands now; waits until no request runs."""
    until(lambda: not any(in_use(served).values()), SETTLING)
    pids = {"supervisor": served.process.pid, "engine": served.engine}
    pids |= {f"front end {number}": pid for number, pid in enumerate(sorted(served.front_ends()))}
    memory = {name: resident(pid) for name, pid in pids.items()}
    descriptors = sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids.values())
    return Holdings(memory, in_use(served), tuple(pids.values()), descriptors)


def settled(served: Served, before: Holdings, seconds: float = 30) -> Holdings:
    """What is held once memory has been given back, or after that time."""
    deadline = time.monotonic() + seconds
    while (now := hold(served)).total > before.total * GROWTH and time.monotonic() < deadline:
        time.sleep(1)
    return now


def touch_all_memory(served: Served) -> None:
    """Write every KV slot once: until then the system has given most of that memory in name
    alone."""
    slots, length = int(served.metric("kv_slots")), 1500
    for number in range(slots // length + 2):
        prompt = [number % 50 + 5, *range(5, length + 4)]
        assert served.complete(prompt=prompt, max_tokens=1).status_code == 200


def used_slots(served: Served) -> int:
    """KV slots that are not free; the prefix cache is empty."""
    state = operator_state(served)
    assert state["num_slots"] > 0
    return int(state["num_slots"] - state["num_free_slots"])


def slots_amid_stream(served: Served) -> int:
    """KV slots in use while a request is decoded: with none, `used_slots` cannot tell a leak."""
    with served.stream(max_tokens=500) as events:
        next(events)
        return used_slots(served)


def in_use(served: Served) -> dict[str, float]:
    text = served.get("/metrics").text
    return {name: served.metric(name, text) for name in GAUGES}


def flush(served: Served) -> None:
    """Empty the prefix cache."""
    headers = {"Authorization": f"Bearer {KEY}"}
    assert httpx.post(f"{served.url}/flush_cache", headers=headers, timeout=60).status_code == 200


def operator_state(served: Served) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {KEY}"}
    answer = httpx.get(f"{served.url}/server_info", headers=headers, timeout=60)
    state: dict[str, Any] = answer.json()["state"]
    return state


def resident(pid: int) -> float:
    """MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (found,) = [line for line in lines if line.startswith("VmRSS")]
    return int(found.split()[1]) / 1024


@dataclass
class Probes:
    """Seconds that each probe took, its status, and the seconds meanwhile in which the processes
    on its way (its own, the supervisor, front ends, the engine) were ready to run and had no core:
    summed, so that more may be taken off than it waited for them."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def slow(self) -> list[dict[str, Any]]:
        return [one for one in self.rows if one["seconds"] - one["starved"] > SLOWEST]

    @property
    def num_over(self) -> int:
        return sum(one["seconds"] > SLOWEST for one in self.rows)

    @property
    def failed(self) -> list[dict[str, Any]]:
        return [one for one in self.rows if one["status"] != 200]

    def percentile(self, share: float) -> float:
        ordered = sorted(one["seconds"] for one in self.rows)
        return float(ordered[min(int(share * len(ordered)), len(ordered) - 1)])


@contextmanager
def probing(served: Served) -> Iterator[Probes]:
    """A request every 50 ms, from a process of its own. Filled in at the end."""
    probes = Probes()
    pids = [str(pid) for pid in (served.process.pid, served.engine, *served.front_ends())]
    command = [sys.executable, "-m", "tests.e2e.hostile.probe", served.url, *pids]
    with (
        tempfile.TemporaryFile("w+") as rows,  # a pipe would be full after a while
        subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=rows) as process,
    ):
        try:
            yield probes
        finally:
            process.communicate()
            rows.seek(0)
            probes.rows += map(json.loads, rows)


def pressure() -> float:
    """Seconds since start in which something on this machine waited for a core."""
    line = Path("/proc/pressure/cpu").read_text().splitlines()[0]
    return int(line.rpartition("total=")[2]) / 1e6


@dataclass
class Load:
    """How busy the machine was, with whatever processes."""

    began: float = field(default_factory=time.monotonic)
    waited: float = field(default_factory=pressure)

    def share(self) -> float:
        """The share of the time since in which something waited for a core."""
        return (pressure() - self.waited) / (time.monotonic() - self.began)
