"""What a second of many streams goes to on a GPU: prompts, rounds, waiting; and what the card would
need for the same bytes and operations.

    python benchmarks/serving/streams_by_kernel.py llama-3.1-8b-shape --streams 8 64
    python benchmarks/serving/streams_by_kernel.py llama-3.1-8b-shape --random-draft 32000
    python benchmarks/serving/streams_by_kernel.py llama-3.1-8b-shape --mixed 1024 512 256

In one process, without HTTP: a stream is one request after another, three each, prompts of token
ids that all differ. --mixed: also batches of prompts of so many tokens that take decoding requests
along (--enable-mixed-chunk). A profiler looks at one request of each stream, in a run of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import report

from specengine import LLM
from specengine.core.config import SpecConfig
from specengine.core.sampling import SamplingParams
from specengine.engine.loop import Engine
from specengine.lab.card import measure_card
from specengine.lab.step.timeline import Span, read_trace
from specengine.lab.throughput.random_draft import write_random_eagle3
from specengine.runner.loader.builtin import BUILTIN_MODELS

TURNS = 3  # requests of a stream
ROUND = "_begin_round_kernel"  # the first kernel of each round
PROMPT = "flash"  # in the name of a kernel that only prompts have
NOTES = """
tok/s: without a profiler. The other columns are of one request of each stream, seen by a profiler:
milliseconds of the card in prompts, in rounds, and with nothing to do, of one second; milliseconds
of a round, and the tokens a second of prompts while they run. Idle: no kernel for 5 us or more.
"""


@dataclass(frozen=True)
class Shares:
    """Seconds of a trace. round: the median of those without prompts behind them."""

    span: float
    idle: float
    prompts: float
    num_rounds: int
    round: float


def shares_of(kernels: Sequence[Span]) -> Shares:
    """Kernels in the order of their starts, in microseconds. Between the starts of two rounds lies
    a round, or a round and prompts; what lies before the first is prompts."""
    starts = [one.start for one in kernels if one.name == ROUND]
    idle, end = 0.0, kernels[0].start
    for one in kernels:
        idle += one.start - end if one.start - end >= 5.0 else 0.0
        end = max(end, one.end)
    firsts = [one.start for one in kernels if PROMPT in one.name]
    with_prompts, alone = list[float](), list[float]()
    lead = starts[0] - kernels[0].start if any(one < starts[0] for one in firsts) else 0.0
    for begin, following in pairwise(starts):
        has_prompt = any(begin <= one < following for one in firsts)
        (with_prompts if has_prompt else alone).append(following - begin)
    usual = median(alone)
    beside = lead + sum(one - usual for one in with_prompts)
    return Shares(
        (end - kernels[0].start) / 1e6, idle / 1e6, beside / 1e6, len(starts), usual / 1e6
    )


class Streams:
    """An engine with one request after another in each stream."""

    def __init__(self, engine: Engine, prompt: int, out: int) -> None:
        self.engine, self.prompt, self.out = engine, prompt, out
        self.draw, self.count = random.Random(0), 0

    def settle(self) -> None:
        """Whatever an idle server would capture is captured."""
        while self.engine.use_idle_moment():
            pass

    def add(self, prompt_ids: list[int]) -> None:
        params = SamplingParams(max_tokens=self.out, temperature=0.0, ignore_eos=True)
        self.count += 1
        self.engine.add_request(f"stream {self.count}", prompt_ids, params)

    def run(self, streams: int, turns: int, trace: Path | None = None) -> float:
        """Seconds until all have ended. trace: of their second requests."""
        most = min(self.engine.parts.vocab_size, 32_000)
        prompts = [
            [self.draw.randrange(10, most) for _ in range(self.prompt)]
            for _ in range(streams * turns)
        ]
        start, ended = perf_counter(), 0
        for _ in range(streams):
            self.add(prompts.pop())
        seen = None
        while self.engine.has_work:
            for one in self.engine.step():
                if one.finish_reason is None:
                    continue
                ended += 1
                if prompts:
                    self.add(prompts.pop())
            if trace is not None and seen is None and ended >= streams:
                seen = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
                seen.start()
            elif trace is not None and seen is not None and ended >= 2 * streams:
                torch.cuda.synchronize()
                seen.stop()
                seen.export_chrome_trace(str(trace))
                trace = None
        return perf_counter() - start


@contextmanager
def draft_of(model: str, vocab: int | None) -> Iterator[SpecConfig | None]:
    if vocab is None:
        yield None
        return
    from transformers import AutoConfig

    with tempfile.TemporaryDirectory() as folder:
        config: Any = AutoConfig.for_model(**BUILTIN_MODELS[model].config)
        write_random_eagle3(Path(folder), config, vocab)
        forced: dict[str, Any] = {"num_steps": 3, "simulate_accept_length": 2.5}
        yield SpecConfig(algorithm="EAGLE3", draft_model_path=folder, **forced)


def rows_of(args: argparse.Namespace, mixed: int | None) -> Iterator[dict[str, Any]]:
    flags: dict[str, Any] = {"load_format": "dummy", "disable_radix_cache": True}
    if mixed is not None:
        flags |= {"enable_mixed_chunk": True, "chunked_prefill_size": mixed}
    flags["context_length"] = args.prompt_len + args.new_tokens + 64
    with draft_of(args.model, args.random_draft) as spec:
        engine = LLM(args.model, spec, **flags).engine
    streams = Streams(engine, args.prompt_len, args.new_tokens)
    streams.settle()
    drafts = "plain" if spec is None else "EAGLE-3"
    way = drafts if mixed is None else f"{drafts}, mixed batches of {mixed} prompt tokens"
    for count in args.streams:
        streams.run(count, 1)
        streams.settle()
        took = streams.run(count, TURNS)
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder, "trace.json")
            streams.run(count, TURNS, trace)
            found = shares_of(read_trace(trace).kernels)
        rounds = found.span - found.idle - found.prompts
        read = count * args.prompt_len
        yield {
            "streams": f"{count}, {way}",
            "tok/s": TURNS * count * args.new_tokens / took,
            "prompts, ms a second": 1000 * found.prompts / found.span,
            "rounds, ms a second": 1000 * rounds / found.span,
            "idle, ms a second": 1000 * found.idle / found.span,
            "a round, ms": 1000 * found.round,
            "prompt tok/s while they run": read / found.prompts,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("--random-draft", type=int, metavar="VOCAB")
    parser.add_argument("--streams", type=int, nargs="+", default=[64])
    parser.add_argument("--mixed", type=int, nargs="*", default=[], metavar="TOKENS")
    parser.add_argument("--prompt-len", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=256)
    args = parser.parse_args()
    rows = []
    for mixed in [None, *args.mixed]:
        for row in rows_of(args, mixed):
            print(json.dumps(row), flush=True)
            rows.append(row)
        gc.collect()  # the engine's memory goes back before the next one plans its own
        torch.cuda.empty_cache()
    card = measure_card(torch.device("cuda"), torch.bfloat16)
    limits = f"copy {card.copy / 1e12:.2f} TB/s, product {card.matmul / 1e12:.0f} Tflop/s"
    title = "What a second of streams goes to, without HTTP"
    print(report.write("peers", "streams-by-kernel", title, rows, f"{NOTES}\n\n{limits}."))


if __name__ == "__main__":
    main()
