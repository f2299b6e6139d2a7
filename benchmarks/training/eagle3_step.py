"""How fast EAGLE-3 training goes, and where its time goes: teacher, unrolled forward and loss,
backward, on random documents. The first steps compile and are timed apart.

    python benchmarks/training/eagle3_step.py MODEL --batch-tokens 32768 task.draft_vocab_size=12288

Arguments with `=` are those of `specengine train eagle3`, section task. MODEL is any that can be
served; its weights may be random (--dummy).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from specengine.core.config_sources import config_from_flags
from specengine.draft.train.config import OptimiserConfig, load_config
from specengine.draft.train.data.dataset import Document, TokenDataset
from specengine.draft.train.data.manifest import TargetIdentity
from specengine.draft.train.data.packing import PackedBatch, PackedBatches
from specengine.draft.train.data.writer import write_dataset
from specengine.draft.train.eagle3_task import Eagle3Config, Eagle3Task, make_eagle3_task
from specengine.draft.train.optimiser import make_optimisers
from specengine.engine.build import load
from specengine.engine.phases import Phases
from specengine.runner.loader.loaded_model import LoadedModel


class Times:
    """Seconds by part, with the device waited for at the end of each."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - start


def random_dataset(folder: Path, loaded: LoadedModel, num_tokens: int) -> TokenDataset:
    """Documents of 64 to 1,024 tokens, the first quarter of each a prompt."""
    vocab_size, longest = loaded.model.vocab_size, min(1024, loaded.source.context_length)
    rng = np.random.default_rng(0)
    documents, total = [], 0
    while total < num_tokens:
        length = int(rng.integers(64, longest + 1))
        tokens = (vocab_size * rng.random(length) ** 3).astype(np.uint32)
        documents.append(Document(tokens, (np.arange(length) >= length // 4).astype(np.uint8)))
        total += length
    target = TargetIdentity(
        name="random", weights="", tokenizer="", chat_template="", vocab_size=vocab_size
    )
    return write_dataset(folder, documents, target)


def time_step(
    task: Eagle3Task, batch: PackedBatch, optimisers: list[torch.optim.Optimizer], times: Times
) -> None:
    device = task.teacher.device
    with times.part("teacher, once more"):
        task.teacher.forward(batch)
    autocast = torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda")
    with times.part("teacher, layers, head and loss"), autocast:
        out = task.loss(batch)
    with times.part("backward"):
        out.loss.backward()  # type: ignore[no-untyped-call]
    with times.part("optimiser"):
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("settings", nargs="*", help="task.key=value")
    parser.add_argument("--dummy", action="store_true", help="random weights")
    parser.add_argument("--batch-tokens", type=int, default=32768)
    parser.add_argument("--optimiser", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_intermixed_args()
    flags = {"model": args.model, **({"load_format": "dummy"} if args.dummy else {})}
    loaded = load(config_from_flags(flags), Phases())
    config = load_config(Eagle3Config, None, args.settings).task
    assert isinstance(config, Eagle3Config)
    with tempfile.TemporaryDirectory() as folder:
        needed = args.batch_tokens * (args.steps + 4)
        dataset = random_dataset(Path(folder), loaded, needed)
        task = make_eagle3_task(loaded, dataset, config)
        task.module.to(loaded.device)
        optimisers = make_optimisers(task.module, OptimiserConfig(name=args.optimiser))
        batches = (one.to(loaded.device) for one in PackedBatches(dataset, args.batch_tokens, 0))
        times = Times(loaded.device)
        for step in range(3):
            start = perf_counter()
            time_step(task, next(batches), optimisers, times)
            print(f"step {step + 1}, compiling: {perf_counter() - start:.1f} s", flush=True)
        times, tokens = Times(loaded.device), 0
        for _ in range(args.steps):
            batch = next(batches)
            time_step(task, batch, optimisers, times)
            tokens += batch.num_tokens
    show(times, tokens, args.steps)


def show(times: Times, tokens: int, steps: int) -> None:
    seconds = dict(times.seconds)
    again = seconds.pop("teacher, once more")
    total = sum(seconds.values())
    print(f"{tokens / total:,.0f} tokens/s; {1000 * total / steps:.1f} ms a step, of which")
    for name, spent in seconds.items():
        print(f"  {name}: {1000 * spent / steps:.1f} ms")
    print(f"  (the teacher alone: {1000 * again / steps:.1f} ms)")
    if times.device.type == "cuda":
        print(f"  peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
