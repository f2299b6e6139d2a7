"""What serving from a process of its own costs the engine's thread between two rounds.

    OMP_NUM_THREADS=1 python benchmarks/step/served_steps.py

The engine runs rounds as on a GPU, with results drawn beforehand (drafting_rounds.py); its process
is the real one: it looks for messages, collects what each stream gained, and sends it to a front
end, here a process that throws it away. In turns with it the same engine without all that. "each
step" sends a message a step, where a server sends one in --stream-interval. No GPU.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import msgspec
import zmq

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))
import report
from drafting_rounds import KINDS, engine
from host_steps import PROMPT, SAMPLING

from specengine import LLM
from specengine.engine.garbage import frozen_objects
from specengine.engine.serving.host import EngineHost
from specengine.engine.serving.messages import Generate, Hello
from specengine.server.processes.alive import Alive
from specengine.server.processes.channel import StartEngine
from specengine.server.processes.engine_process import EngineProcess

NAME = b"front"


class NoSupervisor:
    def send(self, message: object) -> None: ...


class Served:
    """An engine in its process, with one front end."""

    def __init__(self, llm: LLM, folder: Path, interval: float) -> None:
        self.engine = llm.engine
        endpoint = f"ipc://{folder}/engine"
        config = llm.engine.parts.config
        start = StartEngine(config, endpoint, f"{folder}/alive", f"{folder}/tokenizer")
        self.process = EngineProcess(NoSupervisor(), start)  # type: ignore[arg-type]
        wake, has_message = self.process._wake, self.process._has_message
        self.host = EngineHost(self.engine, wake, has_message, interval=interval)
        self.process._host, self.alive = self.host, Alive(start.alive)
        self.process._router.bind(endpoint)
        command = [sys.executable, __file__, "--as-front-end", endpoint]
        self.front_end = subprocess.Popen(command)
        while not self.host._fronts:
            self.turn(0.05)

    def turn(self, seconds: float = 0.0) -> None:
        self.host.turn()
        self.alive.beat()
        self.process._receive(self.host, seconds)

    def batch(self, prompts: list[list[int]], name: str) -> list[float]:
        """Seconds of each step."""
        for stream, prompt in enumerate(prompts):
            asked = Generate(f"{name}.{stream}", stream, prompt, SAMPLING, True)
            self.host.receive(NAME, asked)
        return self._times(self.turn)

    def alone(self, prompts: list[list[int]], name: str) -> list[float]:
        for number, prompt in enumerate(prompts):
            self.engine.add_request(f"{name}.{number}", prompt, SAMPLING, True)
        return self._times(self.engine.advance)

    def _times(self, step: Any) -> list[float]:
        times = []
        while self.engine.has_work:
            start = perf_counter()
            step()
            times.append(perf_counter() - start)
        return times

    def close(self) -> None:
        self.front_end.kill()
        self.front_end.wait()
        self.process._router.close(0)


@contextmanager
def served(requests: int, kind: str, interval: float) -> Iterator[Served]:
    with tempfile.TemporaryDirectory() as folder:
        one = Served(engine(kind, requests), Path(folder), interval)
        try:
            yield one
        finally:
            one.close()


def measure(requests: int, kind: str, interval: float, repeats: int) -> tuple[float, float]:
    """us of a usual step, the best of so many batches: alone, served."""
    draw = random.Random(0)
    with served(requests, kind, interval) as one:
        vocab = one.engine.parts.vocab_size
        best = [float("inf")] * 2
        for number in range(repeats + 1):  # the first warms up
            if number == 1:
                best = [float("inf")] * 2
            with frozen_objects():
                for place, run in enumerate((one.alone, one.batch)):
                    prompts = [
                        [draw.randrange(2, vocab) for _ in range(PROMPT)] for _ in range(requests)
                    ]
                    usual = 1e6 * median(run(prompts, f"{number}.{place}"))
                    best[place] = min(best[place], usual)
    return best[0], best[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--repeats", type=int, default=8)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for requests in args.requests:
        for kind in KINDS[:2]:
            alone, often = measure(requests, kind, 0.0, args.repeats)
            again, usual = measure(requests, kind, 0.002, args.repeats)
            found = {
                "alone us": min(alone, again),
                "served adds us": usual - again,
                "each step adds us": often - alone,
            }
            rows.append({"requests": requests, "drafts": kind, **found})
            print(rows[-1], flush=True)
    notes = (
        f"Medians over the steps of a batch, the best of {args.repeats} batches of each, in turns."
    )
    title = "Serving, between two rounds"
    print(report.write("host-time", "served-steps", title, rows, notes))


def front_end(endpoint: str) -> None:
    socket = zmq.Context().socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, NAME)
    socket.connect(endpoint)
    socket.send(msgspec.msgpack.encode(Hello()))
    while True:
        socket.recv()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-front-end"]:
        front_end(sys.argv[2])
    else:
        main()
