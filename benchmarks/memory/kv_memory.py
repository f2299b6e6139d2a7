"""KV memory on a GPU: bytes a token of target and drafter as planned and as allocated, and what
thousands of rounds leave allocated.

    python benchmarks/memory/kv_memory.py --rounds 5000
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import report

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.config import ModelConfig
from specengine.lab.throughput.random_draft import random_eagle3
from specengine.runner.loader.source import resolve_model
from specengine.runner.memory import plan

MORE = 100_000  # tokens by which the second engine's pool is larger
REQUESTS, NEW_TOKENS = 4, 400


@dataclass(frozen=True)
class Setting:
    name: str
    model: str
    spec: SpecConfig | None

    def llm(self, tokens: int, **flags: Any) -> LLM:
        kind = {"load_format": "dummy"} if self.model.endswith("-shape") else {}
        return LLM(self.model, self.spec, max_total_tokens=tokens, **kind, **flags)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5000)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device: a CPU does not count what memory was allocated")
    promises = Promises()
    rows = []
    for setting in settings():
        rows.append(row(setting, args.rounds, promises))
        print(rows[-1], flush=True)
    print(report.write("kv-memory", "kv-memory", "Planned and allocated", rows, NOTES))
    return 0 if all(one["holds"] == "yes" for one in rows) else 1


class Promises(logging.Handler):
    """Listens for what engines say of a token's KV when they start."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.bytes_per_token = 0
        logger = logging.getLogger(plan.__name__)
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        assert isinstance(record.args, tuple)
        self.bytes_per_token = int(record.args[1])  # type: ignore[call-overload]


def settings() -> Iterator[Setting]:
    tree: dict[str, Any] = {"num_steps": 3, "eagle_topk": 4, "num_draft_tokens": 16}
    for name in ("EAGLE3", "MTP", "STANDALONE"):
        yield Setting(f"tiny {name}", "tiny", SpecConfig(algorithm=name, num_steps=3))
    shape = "smollm2-shape"
    yield Setting("135M plain", shape, None)
    yield Setting("135M NGRAM", shape, SpecConfig(algorithm="NGRAM", num_draft_tokens=8))
    target = resolve_model(ModelConfig(model=shape, load_format="dummy")).hf_config
    with random_eagle3(target, 16384) as path:
        eagle3: dict[str, Any] = {"algorithm": "EAGLE3", "draft_model_path": str(path)}
        yield Setting("135M EAGLE3", shape, SpecConfig(**eagle3, num_steps=3))
        yield Setting("135M EAGLE3, trees", shape, SpecConfig(**eagle3, **tree))


def row(setting: Setting, rounds: int, promises: Promises) -> dict[str, Any]:
    taken = bytes_a_token(setting)
    promised = promises.bytes_per_token
    grown = growth(setting, rounds)
    share = taken / promised
    held = abs(share - 1) <= 0.03 and grown["allocated"] <= 1 << 20 and grown["reserved"] <= 0
    return {
        "engine": setting.name,
        "planned, B a token": promised,
        "allocated, B a token": round(taken, 1),
        "of planned": round(share, 4),
        "rounds": grown["rounds"],
        "allocated by them, B": grown["allocated"],
        "reserved by them, B": grown["reserved"],
        "slots lost": grown["slots"],
        "holds": "yes" if held and grown["slots"] == 0 else "NO",
    }


def bytes_a_token(setting: Setting) -> float:
    """What a pool takes a token more of which it has more. The first engine is thrown away: what a
    process makes once, like the workspaces of cuBLAS, belongs to it."""
    taken = []
    for tokens in (MORE, MORE, 2 * MORE):
        clear()
        before = torch.cuda.memory_allocated()
        llm = setting.llm(tokens, cuda_graph_bs=(1,))
        taken.append(torch.cuda.memory_allocated() - before)
        del llm
    clear()
    return (taken[2] - taken[1]) / MORE


def growth(setting: Setting, rounds: int) -> dict[str, int]:
    """What `rounds` more rounds left, behind a first answer."""
    llm = setting.llm(REQUESTS * 2 * NEW_TOKENS, cuda_graph_bs=(1, REQUESTS))
    scheduler, done = llm.engine.scheduler, 0
    free = scheduler.num_free_slots
    answer(llm)
    torch.cuda.synchronize()
    begun = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    while done < rounds:
        done += answer(llm)
    torch.cuda.synchronize()
    scheduler.check_invariant()
    found = {
        "rounds": done,
        "allocated": torch.cuda.memory_allocated() - begun[0],
        "reserved": torch.cuda.memory_reserved() - begun[1],
        "slots": free - scheduler.num_free_slots,
    }
    del llm
    clear()
    return found


def answer(llm: LLM) -> int:
    """One batch of prompts; returns how many rounds it took at least."""
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    prompts = [[5 + i, 6, 7, 8 + i] * 4 for i in range(REQUESTS)]
    outputs = llm.generate(prompts, params, progress=False)
    return max(one.spec.num_rounds for one in outputs)


def clear() -> None:
    gc.collect()
    torch.cuda.empty_cache()


NOTES = f"""\
Planned: what the memory plan reckons a slot of target and drafter together. Allocated: how much
more an engine holds whose pool has {MORE:,} more slots, page tables and graphs included where they
grow. Rounds: of one request, {REQUESTS} at a time, after a first answer of {NEW_TOKENS} tokens
each. Holds: within 3%, at most 1 MiB allocated by rounds, nothing reserved, no slot lost.
"""

if __name__ == "__main__":
    sys.exit(main())
