"""The scheduler's time a round, while the prefix cache has room and once it has filled all memory.

    OMP_NUM_THREADS=1 python benchmarks/step/full_cache.py

Rounds of plain decoding as the engine runs them on a GPU: the next one gets its slots before the
last has been committed. Each request has a prompt of 30 tokens and 256 new ones. No model, no GPU.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import report

from specengine.core.request import Req
from specengine.core.sampling import SamplingParams
from specengine.core.spec import PrefillResult, VerifyResult
from specengine.memory.allocator import TokenToKVPoolAllocator
from specengine.memory.radix_cache import RadixCache
from specengine.memory.req_to_token import ReqToTokenPool
from specengine.scheduler.ledger import KVLedger
from specengine.scheduler.policy import SchedulePolicy
from specengine.scheduler.scheduler import Scheduler

PROMPT, NEW, CONTEXT, VOCAB = 30, 256, 2048, 32000
CPU = torch.device("cpu")


def scheduler_of(requests: int, slots: int) -> Scheduler:
    rows = ReqToTokenPool(requests, CONTEXT, CPU)
    ledger = KVLedger(rows, TokenToKVPoolAllocator(slots + 1, 1), RadixCache(1))
    policy = SchedulePolicy(
        context_len=CONTEXT,
        max_running_requests=requests,
        chunked_prefill_size=-1,
        max_nodes=1,
    )
    return Scheduler(policy, ledger, VOCAB, CPU, lambda _: None)  # type: ignore[arg-type, return-value]


def microseconds(scheduler: Scheduler, requests: int, draw: random.Random) -> float:
    """A request and round, of one batch from its prefill to its end."""
    sampling = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    for number in range(requests):
        prompt = [draw.randrange(VOCAB) for _ in range(PROMPT)]
        scheduler.add(Req(f"{draw.random()}.{number}", prompt, sampling, frozenset()))
    batch = scheduler.schedule()
    assert batch is not None
    tokens: list[int | None] = [draw.randrange(VOCAB) for _ in batch.reqs]
    scheduler.commit_prefill(
        batch, PrefillResult(tokens, [None] * requests, [[] for _ in batch.reqs])
    )
    batch = scheduler.schedule()
    assert batch is not None
    took = rounds = 0.0
    reqs = batch.reqs
    while reqs:
        new = [[draw.randrange(VOCAB)] for _ in reqs]
        result = VerifyResult(new, [0] * len(reqs), [0] * len(reqs), kv_keep=None)
        start = perf_counter()
        following = scheduler.follow(reqs, 2)
        scheduler.commit_round(reqs, result)
        scheduler.take_changed()
        took += perf_counter() - start
        rounds += len(reqs)
        if not following and scheduler.has_work:
            batch = scheduler.schedule()
            following = [] if batch is None else batch.reqs
        reqs = [req for req in following if not req.is_finished]
    return took / rounds * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--slots", type=int, nargs="+", default=[300_000, 800_000])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for requests in args.requests:
        for slots in args.slots:
            scheduler, draw = scheduler_of(requests, slots), random.Random(0)
            room = [microseconds(scheduler, requests, draw) for _ in range(args.repeats)]
            while scheduler.ledger.allocator.available > requests * (PROMPT + NEW):
                microseconds(scheduler, requests, draw)
            full = [microseconds(scheduler, requests, draw) for _ in range(args.repeats)]
            row = {"requests": requests, "slots": slots}
            row |= {"room us": statistics.median(room), "full us": statistics.median(full)}
            rows.append(row)
            print(row, flush=True)
    print(report.write("full-cache", "The scheduler beside a cache that fills all memory", rows))


if __name__ == "__main__":
    main()
