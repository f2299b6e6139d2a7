"""Long prompts beside streams that decode with drafts: how much longer does a token take, and how
long does a prompt wait? Whole prompts, chunks, mixed batches and split prefill (--enable-pdmux).

    python benchmarks/serving/beside_rounds.py llama-3.1-8b-shape --random-draft 32000

Chunks and mixed batches are of 1,024 tokens. Split prompts take turns with rounds, as by default;
chosen: turns or a share of the SMs beside rounds, by the policy; or shares alone, or always the
share that is named. Each way has an engine of its own: prompts alone, streams alone, then both. A
stream is one request after another. TPOT is of a request, (end - first token) / (tokens - 1); a gap
is the time between two outputs of a request.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import report

from specengine.core.config import EngineConfig, ModelConfig, SpecConfig
from specengine.core.config_sources import config_from_flags
from specengine.core.sampling import SamplingParams
from specengine.engine.build import build_engine, load
from specengine.engine.loop import Engine
from specengine.engine.phases import Phases
from specengine.lab.environment import environment
from specengine.lab.throughput.random_draft import write_random_eagle3
from specengine.runner.loader.source import resolve_model
from specengine.scheduler.split_policy import SplitPrefillPolicy

WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks": {"chunked_prefill_size": 1024},
    "mixed": {"chunked_prefill_size": 1024, "enable_mixed_chunk": True},
    "split": {"enable_pdmux": True},
    "chosen": {"enable_pdmux": True, "pdmux_sm_shares": (0.5, 0.76, 1.0)},
    "shares": {"enable_pdmux": True, "pdmux_sm_shares": (0.5, 0.76)},
    "half": {"enable_pdmux": True, "pdmux_sm_shares": (0.5,)},
    "two-thirds": {"enable_pdmux": True, "pdmux_sm_shares": (0.65,)},
    "three-quarters": {"enable_pdmux": True, "pdmux_sm_shares": (0.76,)},
}
STREAM_TOKENS, PROMPT_OUTPUT = 32, 8


@dataclass
class Seen:
    """Of one request: when it was due, and when it had how many tokens."""

    due: float
    times: list[float] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def tpot(self) -> float:
        return (self.times[-1] - self.times[0]) / max(self.num_tokens - 1, 1)


@dataclass
class Traffic:
    engine: Engine
    streams: int
    prompt_tokens: int
    new_tokens: int
    draw: random.Random = field(default_factory=lambda: random.Random(0))
    count: int = 0

    def prompt(self, length: int) -> list[int]:
        most = self.engine.parts.vocab_size
        return [self.draw.randrange(10, most) for _ in range(length)]

    def add(self, kind: str, due: float, known: dict[str, Seen]) -> None:
        is_stream = kind == "stream"
        length = STREAM_TOKENS if is_stream else self.prompt_tokens
        count = self.new_tokens if is_stream else PROMPT_OUTPUT
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        self.count += 1
        rid = f"{kind} {self.count}"
        self.engine.add_request(rid, self.prompt(length), params)
        known[rid] = Seen(due)

    def run(self, seconds: float, every: float | None, streams: int) -> list[dict[str, Seen]]:
        """Finished streams and prompts. Those that had not ended are not counted."""
        known, done = dict[str, Seen](), dict[str, Seen]()
        start = perf_counter()
        for _ in range(streams):
            self.add("stream", start, known)
        num_prompts = 0
        while (now := perf_counter()) < start + seconds or not streams:
            due = start + 0.5 + num_prompts * (every or 0.0)
            if every is not None and due <= now and due < start + seconds:
                self.add("prompt", due, known)
                num_prompts += 1
            if not streams and now >= start + seconds and not self.engine.has_work:
                break
            self._step(known, done, streams > 0)
        for rid in list(known):
            self.engine.abort(rid)
        while self.engine.has_work or self.engine.scheduler.has_work:
            self.engine.step()
        with suppress(AttributeError):
            while self.engine.pipeline is not None and self.engine.pipeline.has_in_flight:
                self.engine.step()
        return [{k: v for k, v in done.items() if k.startswith(kind)} for kind in ("str", "pro")]

    def _step(self, known: dict[str, Seen], done: dict[str, Seen], renews: bool) -> None:
        outputs = self.engine.step()
        now = perf_counter()
        for one in outputs:
            seen = known.get(one.rid)
            if seen is None:
                continue
            seen.times.append(now)
            seen.num_tokens = len(one.token_ids)
            if one.finish_reason is not None:
                done[one.rid] = known.pop(one.rid)
                if renews and one.rid.startswith("stream"):
                    self.add("stream", now, known)


def quantile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)] if ordered else float("nan")


def gaps(seen: dict[str, Seen]) -> list[float]:
    return [b - a for one in seen.values() for a, b in zip(one.times, one.times[1:], strict=False)]


def measure(name: str, engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds, and ratios."""
    traffic = Traffic(engine, args.streams, args.prompt_tokens, args.new_tokens)
    for streams in (0, args.streams):  # kernels of both are compiled, graphs captured
        traffic.run(1.0, 0.3, streams)
    _, alone = traffic.run(1.8, 0.6, 0)
    streams, _ = traffic.run(args.seconds / 2, None, args.streams)
    beside, prompts = traffic.run(args.seconds, args.every, args.streams)
    tpots = [[one.tpot for one in found.values()] for found in (streams, beside)]
    ttfts = [[one.times[0] - one.due for one in found.values()] for found in (alone, prompts)]
    stats = engine.stats()
    row: dict[str, Any] = {"way": name}
    row["TPOT p99 alone"], row["beside"] = (1000 * quantile(one, 0.99) for one in tpots)
    row["ratio"] = row["beside"] / row["TPOT p99 alone"]
    row["TPOT p50 beside"] = 1000 * quantile(tpots[1], 0.5)
    row["gap p99 alone"] = 1000 * quantile(gaps(streams), 0.99)
    row["gap p99 beside"] = 1000 * quantile(gaps(beside), 0.99)
    row["TTFT p50 alone"], row["TTFT p50 beside"] = (1000 * quantile(one, 0.5) for one in ttfts)
    row["TTFT p99 beside"] = 1000 * quantile(ttfts[1], 0.99)
    row["requests"] = len(tpots[1])
    row["prompts"] = len(ttfts[1])
    row["accepted length"] = stats.spec.mean_acceptance_length
    details = None if stats.split is None else vars(stats.split)
    lanes = None if engine.device_rounds is None else vars(engine.device_rounds.lanes)
    policy = None if engine.split is None else measured(engine.split.policy)
    print(
        json.dumps({**row, "split": details, "lanes": lanes, "policy": policy}, default=str),
        flush=True,
    )
    return row


def measured(policy: SplitPrefillPolicy) -> dict[str, Any]:
    """Of the policy: all but the rounds that it remembers one by one."""
    found = {key: value for key, value in vars(policy).items() if key != "_lately"}
    found["together, in times of turns"] = {s: policy.both_together(s) for s in policy.shares}
    return found


def config_of(args: argparse.Namespace, folder: Path) -> EngineConfig:
    spec = SpecConfig()
    if args.random_draft:
        target = resolve_model(ModelConfig(model=args.model, load_format="dummy"))
        write_random_eagle3(folder, target.hf_config, args.random_draft)
        spec = SpecConfig(
            algorithm="EAGLE3", draft_model_path=str(folder), num_steps=3, adaptive=False,
            simulate_accept_length=args.accept_length,
        )  # fmt: skip
    context = args.prompt_tokens + 256
    flags: dict[str, Any] = {
        "model": args.model,
        "context_length": context,
        "max_total_tokens": 5 * context + args.streams * (args.new_tokens + 200),
        "max_running_requests": args.streams + 8,
        "cuda_graph_bs": (1, args.streams, args.streams + 8),
        "disable_radix_cache": True,
    }
    if args.model.endswith("-shape"):
        flags["load_format"] = "dummy"
    return config_from_flags(flags, spec)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="llama-3.1-8b-shape")
    parser.add_argument("--random-draft", type=int, metavar="VOCABULARY")
    parser.add_argument("--accept-length", type=float, default=2.5)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=8000)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between prompts")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--ways", nargs="+", default=list(WAYS)[:4], choices=WAYS)
    parser.add_argument("--out", type=Path, help="write the rows here instead of filing them")
    parser.add_argument("--file", type=Path, help="file such rows, and measure nothing")
    args = parser.parse_args()
    if args.file is not None:
        found = json.loads(args.file.read_text())
        print(report.write(TOPIC, TABLE, TITLE, found["rows"], NOTES, found["facts"]))
        return
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms %(message)s")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(args, Path(folder))
        loaded = load(config, Phases())
        for name in args.ways:
            rows += run_way(name, config, loaded, args)
            if args.out is not None:
                args.out.write_text(json.dumps({"facts": environment(), "rows": rows}, indent=1))
    if args.out is None:
        print(report.write(TOPIC, TABLE, TITLE, rows, NOTES))


def run_way(name: str, config: EngineConfig, loaded: Any, args: argparse.Namespace) -> list[Any]:
    """No row where it fails: what others measured is kept."""
    own = WAYS[name]
    split = {key: value for key, value in own.items() if "pdmux" in key}
    schedule = {key: value for key, value in own.items() if key not in split}
    changed = replace(
        config,
        schedule=replace(config.schedule, **schedule),
        split=replace(config.split, **split),
    )
    engine = None
    try:
        engine = build_engine(changed, loaded, Phases())
        return [measure(name, engine, args)]
    except Exception:
        logging.exception("%s failed", name)
        return []
    finally:
        del engine
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


TOPIC, TABLE = "long-prompts", "beside-rounds"
TITLE = "Split prompts beside streams that decode with drafts"
NOTES = """Milliseconds. TPOT: of a request, from its first token to its last; a gap: between two
outputs of a request. Alone: the same engine without the other kind of request."""

if __name__ == "__main__":
    main()
