"""Time of choosing tokens from rows of logits, by what requests ask for.

    python benchmarks/kernels/sample_rows.py --rows 1 4 32 256 --vocab 49152

Microseconds a call, in a graph, on logits that are nearly flat and on peaked ones.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import triton

sys.path.insert(0, str(Path(__file__).parent.parent))
import report

from specengine.kernels.dispatch import Backend
from specengine.kernels.sample.sample_rows import sample_rows
from specengine.kernels.sample.types import SEED, TEMPERATURE, TOP_K, TOP_P, ChoiceTable, DrawPlaces

SAMPLING = {  # temperature, top_k, top_p
    "greedy": (0.0, 0, 1.0),
    "temperature": (0.8, 0, 1.0),
    "top-p 0.95": (0.8, 0, 0.95),
    "top-k 50": (0.8, 50, 1.0),
    "both": (0.8, 50, 0.95),
}
SCALES = {"flat": 1.0, "peaked": 5.0}
CALLS = 4  # in one graph


def table_of(options: tuple[float, int, float], rows: int, vocab: int) -> ChoiceTable:
    table = ChoiceTable.of(rows, torch.device("cpu"))
    table.column(TEMPERATURE)[:], table.column(TOP_P)[:] = options[0], options[2]
    table.words[:, TOP_K] = options[1] or vocab
    table.words[:, SEED] = torch.arange(rows)
    return ChoiceTable(table.words.cuda())


def microseconds(
    logits: torch.Tensor, options: tuple[float, int, float], backend: Backend
) -> float:
    rows, vocab = logits.shape
    table, slots = table_of(options, rows, vocab), torch.arange(rows, device="cuda")
    places = DrawPlaces(slots, torch.zeros_like(slots))
    sample_rows(logits, table, places, 0, backend=backend)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            sample_rows(logits, table, places, 0, backend=backend)
    milliseconds = triton.testing.do_bench(graph.replay, return_mode="median")
    return float(milliseconds) / CALLS * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 32, 256])
    parser.add_argument("--vocab", type=int, nargs="+", default=[49_152, 128_256])
    parser.add_argument("--backends", nargs="+", default=["triton", "cuda"])
    args = parser.parse_args()
    found: list[dict[str, Any]] = []
    for vocab in args.vocab:
        for rows in args.rows:
            for name, scale in SCALES.items():
                logits = scale * torch.randn(rows, vocab, device="cuda")
                for backend in args.backends:
                    row = {"vocabulary": vocab, "rows": rows, "logits": name, "kernel": backend}
                    for column, options in SAMPLING.items():
                        row[column] = microseconds(logits, options, backend)
                    found.append(row)
                    print(row, flush=True)
    print(report.write("kernels", "sample-rows", "Choosing tokens from logits", found))


if __name__ == "__main__":
    main()
