"""How many tokens a second get from an engine process to clients over HTTP, and what each costs.

    python benchmarks/serving/http_path.py --streams 8,64,256 --workers 1

The engine has no model: it emits tokens at a pace, by default as fast as it can. Front ends,
sockets, tokenizer and supervisor are the real ones. The figures that carry over to another machine
are microseconds of processor time a token, in the engine's process (without the pace) and in the
front ends, and a client's of an event. The clients are those of `specengine bench serve`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import IO, Any

from specengine.lab.serving.fleet import run_clients
from specengine.lab.serving.records import Ask, ClientJob, ClientReport

ROOT = Path(__file__).resolve().parents[2]
TICKS = os.sysconf("SC_CLK_TCK")
PACE = "SPECENGINE_SCRIPTED_PACE"  # step,request,tokens,spins: seconds


def main() -> None:
    if sys.argv[1:2] == ["--as-engine"]:
        sys.exit(engine_process())
    if sys.argv[1:2] == ["--as-server"]:
        sys.exit(server_process(json.loads(sys.argv[2])))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--streams", default="8,64,256")
    parser.add_argument("--workers", type=int, default=1, help="front ends")
    parser.add_argument("--clients", type=int, default=1, help="client processes")
    parser.add_argument("--tokens", type=int, default=2000, help="of each stream")
    parser.add_argument(
        "--pace",
        default="0,0,1,0",
        help="of a step: seconds, seconds a request, tokens a request, whether it spins",
    )
    parser.add_argument("--interval", type=float, default=0.002, help="--stream-interval")
    parser.add_argument("--chat", action="store_true", help="chat completions, not text")
    args = parser.parse_args()
    options = {"workers": args.workers, "interval": args.interval}
    command = [sys.executable, __file__, "--as-server", json.dumps(options)]
    server = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=os.environ | {PACE: args.pace}
    )
    try:
        port = wait_until_ready(server)
        print(
            "| streams | tok/s | events/s | engine us/tok | front us/tok | client us/event | "
            "engine % | front % | busiest client % |"
        )
        print("|---|---|---|---|---|---|---|---|---|")
        for streams in map(int, args.streams.split(",")):
            measure(args, server.pid, port, streams)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


def measure(args: Any, pid: int, port: int, streams: int) -> None:
    engine, fronts = children(pid)
    ask(args, port, streams, 50)  # to warm up
    before = [cpu(engine), sum(map(cpu, fronts))]
    reports = ask(args, port, streams, args.tokens)
    seconds = max(one.seconds for one in reports)
    used = [cpu(engine) - before[0], sum(map(cpu, fronts)) - before[1]]
    made, events = streams * args.tokens, sum(one.num_events for one in reports)
    engine_us, front_us = (1e6 * one / made for one in used)
    shares = [100 * one / seconds for one in (*used, max(one.cpu for one in reports))]
    client_us = 1e6 * sum(one.cpu for one in reports) / events
    print(
        f"| {streams} | {made / seconds:,.0f} | {events / seconds:,.0f} | {engine_us:.2f} | "
        f"{front_us:.2f} | {client_us:.2f} | {shares[0]:.0f} | {shares[1]:.0f} | {shares[2]:.0f} |",
        flush=True,
    )


def ask(args: Any, port: int, streams: int, tokens: int) -> list[ClientReport]:
    """Streams of so many tokens each, all at once."""
    bodies = [body_of(args.chat, number, tokens) for number in range(streams)]
    shares = [bodies[number :: args.clients] for number in range(args.clients)]
    path = "/v1/chat/completions" if args.chat else "/v1/completions"
    jobs = [
        ClientJob(
            url=f"http://127.0.0.1:{port}",
            path=path,
            headers=b"Content-Type: application/json\r\n",
            asks=[Ask(number, body) for number, body in enumerate(share)],
            concurrency=len(share),
            is_paced=False,
            timeout=600.0,
        )
        for share in shares
    ]
    reports = run_clients(jobs, lambda *_: None)
    failed = [one for report in reports for one in report.outcomes if one.error]
    assert not failed, failed[0]
    return reports


def body_of(chat: bool, number: int, tokens: int) -> bytes:
    body: dict[str, Any] = {"model": "scripted", "max_tokens": tokens, "stream": True}
    if chat:
        body["messages"] = [{"role": "user", "content": "a"}]
    else:
        body["prompt"] = [number % 200 + 1, 2, 3]
    return json.dumps(body).encode()


def wait_until_ready(server: subprocess.Popen[str]) -> int:
    assert server.stderr is not None
    port = 0
    for line in server.stderr:
        found = re.search(r"listening on http://127\.0\.0\.1:(\d+)", line)
        port = int(found[1]) if found else port
        if "ready: " in line:
            break
    Thread(target=copy_log, args=(server.stderr,), daemon=True).start()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with socket.create_connection(("127.0.0.1", port)) as one:
            one.sendall(b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            if one.recv(4096).split()[1] == b"200":
                return port
        time.sleep(0.1)
    raise SystemExit("the server does not become ready")


def copy_log(log: IO[str]) -> None:
    for line in log:
        print(line, end="", file=sys.stderr)


def children(pid: int) -> tuple[int, list[int]]:
    """The engine, and the front ends."""
    found = [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    engine = [one for one in found if "--as-engine" in Path(f"/proc/{one}/cmdline").read_text()]
    return engine[0], [one for one in found if one not in engine]


def cpu(pid: int) -> float:
    """Seconds of processor time."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def server_process(options: dict[str, Any]) -> int:
    from specengine.cli.logs import set_up_logging
    from specengine.core.config_sources import config_from_flags
    from specengine.server.processes.supervisor import Programs, supervise

    set_up_logging("warning")
    config = config_from_flags({"model": "tiny"}, None)
    server = replace(
        config.server, port=0, stream_interval=options["interval"], log_level="warning"
    )
    import logging

    logging.getLogger("specengine.server.processes.supervisor").setLevel("INFO")
    programs = Programs(engine=[sys.executable, __file__, "--as-engine"])
    supervise(replace(config, server=server), options["workers"], programs)
    return 0


def engine_process() -> int:
    from specengine.engine.proof.scripted_engine import Pace, ScriptedEngine
    from specengine.runner.loader.tokenizer import byte_tokenizer
    from specengine.server.processes.channel import Channel, StartEngine
    from specengine.server.processes.engine_process import run_engine

    channel = Channel.of_descriptor(int(sys.argv[-1]))
    received = channel.receive()
    assert received is not None
    assert isinstance(received.message, StartEngine)
    step, request, tokens, spins = map(float, os.environ[PACE].split(","))
    pace = Pace(step, request, int(tokens), bool(spins))

    def build(config: Any) -> Any:
        return ScriptedEngine(byte_tokenizer(256), 256, pace, config)

    return run_engine(channel, received.message, build)


if __name__ == "__main__":
    main()
