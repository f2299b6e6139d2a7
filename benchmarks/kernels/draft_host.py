"""What a drafter without a model costs the host: one call of draft(), indexing of the tokens
committed since included.

    OMP_NUM_THREADS=1 python benchmarks/kernels/draft_host.py

The text is random, with passages copied from earlier on; each round commits two tokens of it.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import report

from specengine.core.batch import ScheduleBatch
from specengine.core.config import SpecConfig
from specengine.core.forward_mode import ForwardMode
from specengine.core.request import Req
from specengine.core.sampling import SamplingParams
from specengine.core.sampling_batch import SamplingBatch
from specengine.core.spec import Drafter
from specengine.draft.ngram.drafter import NgramDrafter
from specengine.draft.suffix.drafter import SuffixDrafter

PROMPT, VOCAB, COMMITTED, NODES = 500, 5000, 2, 8


def text(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    tokens = [int(draw.paretovariate(0.6)) % VOCAB for _ in range(50)]
    while len(tokens) < length:
        if draw.random() < 0.1:
            start = draw.randrange(len(tokens) - 5)
            tokens += tokens[start : start + draw.randrange(5, 30)]
        else:
            tokens.append(int(draw.paretovariate(0.6)) % VOCAB)
    return tokens[:length]


def decode_batch(reqs: list[Req]) -> ScheduleBatch:
    return ScheduleBatch(
        reqs=reqs,
        forward_mode=ForwardMode.DECODE,
        input_ids=[req.last_token for req in reqs],
        prefix_lens=[req.seq_len - 1 for req in reqs],
        extend_lens=[1] * len(reqs),
        samples=[True] * len(reqs),
        sampling=SamplingBatch.from_reqs(reqs, VOCAB, torch.device("cpu")),
    )


def measure(make: Callable[[], Drafter], batch_size: int, rounds: int) -> dict[str, float]:
    drafter = make()
    texts = [text(PROMPT + 1 + rounds * COMMITTED, seed) for seed in range(batch_size)]
    reqs = [
        Req("r", one[:PROMPT], SamplingParams(), output_ids=one[PROMPT : PROMPT + 1])
        for one in texts
    ]
    batch = decode_batch(reqs)
    start = perf_counter()
    drafter.draft(batch)
    first = perf_counter() - start
    seconds = []
    for number in range(rounds):
        done = PROMPT + 1 + number * COMMITTED
        for req, one in zip(reqs, texts, strict=True):
            req.output_ids += one[done : done + COMMITTED]
        start = perf_counter()
        drafter.draft(batch)
        seconds.append(perf_counter() - start)
    return {
        "first us a prompt token": first * 1e6 / batch_size / PROMPT,
        "us a draft": statistics.median(seconds) * 1e6,
        "fastest us": min(seconds) * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=200)
    args = parser.parse_args()

    def ngram(**options: Any) -> Drafter:
        spec = SpecConfig(algorithm="NGRAM", num_draft_tokens=NODES, **options)
        return NgramDrafter(spec, lambda req: NODES)

    def suffix(**options: Any) -> Drafter:
        spec = SpecConfig(algorithm="SUFFIX", num_draft_tokens=NODES, **options)
        return SuffixDrafter(spec, lambda req: NODES)

    contenders: dict[str, Callable[[], Drafter]] = {
        "NGRAM": ngram,
        "NGRAM, 3 branches": lambda: ngram(ngram_branches=3),
        "SUFFIX": suffix,
        "SUFFIX, 3 branches": lambda: suffix(suffix_branches=3),
    }
    gc.collect()
    gc.freeze()  # a full collection walks all of PyTorch, which is none of the drafters' doing
    rows: list[dict[str, Any]] = []
    for batch_size in args.batch_sizes:
        for name, make in contenders.items():
            figures = measure(make, batch_size, args.rounds)
            rows.append({"drafter": name, "batch": batch_size, **figures})
            print(rows[-1], flush=True)
    print(report.write("draft-host", "Host time of drafters without a model", rows))


if __name__ == "__main__":
    main()
