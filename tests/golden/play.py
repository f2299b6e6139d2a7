"""Plays a case, and compares what came of it with what was recorded."""

from __future__ import annotations

import gzip
import json
import math
import platform
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from specengine import LLM
from specengine.core.config_sources import config_from_flags
from specengine.engine.build import build_engine
from tests.golden.cases import Kind, requests
from tests.golden.device_rounds import counters, on_the_device
from tests.golden.models import FLAGS, Models

FILE = Path(__file__).with_name("traces.json.gz")
PLACES = ("host", "device")
CLOSE = 1e-4  # between logprobs of two machines


@contextmanager
def engine_of(kind: Kind, place: str, models: Models) -> Iterator[LLM]:
    """Raises HostRoundsError where no round of the kind runs on the device."""
    draft = None if kind.draft is None else models.path(kind.draft)
    flags = {"model": models.path(kind.target), **FLAGS}
    config = config_from_flags(flags, kind.spec(draft))
    llm = LLM.of(build_engine(config, models.loaded(kind.target)))
    with on_the_device(llm) if place == "device" else nullcontext():
        yield llm


def play(llm: LLM, place: str, feature: str, seed: int, backwards: bool = False) -> dict[str, Any]:
    """A batch of requests. Of each choice: tokens; rounds, a pair of drafts that stood and drafts
    each; why it ended; and the logprobs that it asked for. backwards: the order of requests."""
    before = counters(llm) if place == "device" else (0, {})
    found: dict[str, dict[str, Any]] = {}
    every = [*enumerate(requests(feature, seed))]
    for number, (prompt, params) in reversed(every) if backwards else every:
        llm.engine.add_request(str(number), llm.tokenizer(prompt)["input_ids"], params)
    seen: dict[str, tuple[int, int, int]] = {}
    while llm.engine.has_work:
        for output in llm.engine.step():
            name = f"{output.rid}#{output.index}"
            one = found.setdefault(name, {"rounds": []})
            now = output.spec.num_rounds, output.spec.num_accepted, output.spec.num_draft_tokens
            last = seen.get(name, (0, 0, 0))
            assert now[0] - last[0] in (0, 1), "more than one round a step"
            if now[0] > last[0]:
                one["rounds"].append([now[1] - last[1], now[2] - last[2]])
            seen[name] = now
            if (reason := output.finish_reason) is not None:
                one |= {"tokens": [*output.token_ids], "finish": [reason.kind, reason.matched]}
                one["text"] = output.text
                one["logprobs"] = [_flat(row) for row in output.all_logprobs]
                one["prompt_logprobs"] = [_flat(row) for row in output.prompt_logprobs]
    llm.engine.scheduler.check_invariant()
    result: dict[str, Any] = {"seed": seed, "choices": dict(sorted(found.items()))}
    if place == "device":
        replays, reasons = counters(llm)
        result["on_device"] = replays > before[0]  # how often depends on the batch before
        fell = {name: count - before[1].get(name, 0) for name, count in reasons.items()}
        result["fallbacks"] = {name: count for name, count in fell.items() if count}
    return result


def _flat(row: Any) -> list[Any] | None:
    """Token, logprob, then pairs of those that were best."""
    return None if row is None else [row.token, row.logprob, *(x for one in row.top for x in one)]


def differences(recorded: Any, found: Any, is_same_machine: bool, where: str = "") -> list[str]:
    """Where two results differ. Reasons of fallbacks are words, of which the count alone is
    compared. is_same_machine: logprobs are equal bit for bit; elsewhere within CLOSE."""
    if where.endswith("/fallbacks"):
        recorded, found = sum(recorded.values()), sum(found.values())
    if isinstance(recorded, dict) and isinstance(found, dict) and recorded.keys() == found.keys():
        pairs = [(name, recorded[name], found[name]) for name in recorded]
    elif isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        pairs = [(str(i), *pair) for i, pair in enumerate(zip(recorded, found, strict=True))]
    else:
        are_close = isinstance(recorded, float) and isinstance(found, float) and not is_same_machine
        same = math.isclose(recorded, found, abs_tol=CLOSE) if are_close else recorded == found
        return [] if same else [f"{where}: recorded {recorded!r}, found {found!r}"]
    every = (differences(*pair, is_same_machine, f"{where}/{name}") for name, *pair in pairs)
    return [one for some in every for one in some]


def fingerprint() -> dict[str, Any]:
    """What may change the last bits of a logprob."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if platform.system() == "Linux" else []
    names = ("vendor_id", "cpu family", "model", "model name", "stepping")
    found = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    facts = {name.strip(): value.strip() for name, value in found.items()}
    return {
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "processor": [facts.get(name, "") for name in names],
        "threads": torch.get_num_threads(),
    }


def load() -> dict[str, Any]:
    with gzip.open(FILE, "rt", encoding="utf-8") as file:
        traces: dict[str, Any] = json.load(file)
    return traces


def save(traces: dict[str, Any]) -> None:
    text = json.dumps(traces, separators=(",", ":"), ensure_ascii=False)
    FILE.write_bytes(gzip.compress(text.encode(), mtime=0))
