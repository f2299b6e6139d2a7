"""Time to the first token of one prompt by its length, and start-up, by --cuda-graph-mode.

    python benchmarks/step/prefill_modes.py smollm2-shape llama-3.1-8b-shape
    python benchmarks/step/prefill_modes.py --start-up llama-3.1-8b-shape

Random weights, or a folder's with --load-format auto; one request at a time, no prefix cache. Each
mode's engine is built anew over the same weights. Prompts come when all graphs of idle moments are
captured, as a server's that has had a quiet second. --turns: others start on the same card
meanwhile; the first model is loaded beside them, and all else waits for its turn
(benchmarks/peers/first_tokens.py). --start-up: an engine in compiled pieces in two processes, one
after the other, whose caches of compiled code are empty at first, and its times to the first token.
--json: the rows go there, and no table is written. Run it on a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(1, str(Path(__file__).parent.parent / "peers"))
import report
from by_turns import milliseconds
from turns import turn

from specengine.core.config import (
    EngineConfig,
    GraphConfig,
    MemoryConfig,
    ModelConfig,
    ScheduleConfig,
)
from specengine.core.sampling import SamplingParams
from specengine.engine.build import build_engine, load
from specengine.engine.loop import Engine
from specengine.engine.phases import Phases
from specengine.lab.environment import environment
from specengine.runner.fallbacks import GraphStats
from specengine.runner.loader.loaded_model import LoadedModel

LENGTHS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
FEW = {"cuda_graph_bs": (1,)}  # graphs of decode steps are not what is measured
PIECES = {"cuda_graph_mode": "piecewise", "piecewise_cuda_graph_tokens": LENGTHS}
MODES: dict[str, dict[str, Any]] = {
    "none": {"cuda_graph_mode": "none"},
    "auto": FEW,
    "full": FEW | {"cuda_graph_mode": "full"},
    "piecewise, eager": PIECES,
    "piecewise, inductor": PIECES | {"piecewise_compiler": "inductor"},
}
REPEATS = 9
NEARLY_ALL = 0.95  # of the card's memory: what others have on it counts


def config_of(model: str, mode: str, fraction: float | None = None, **weights: Any) -> EngineConfig:
    """weights: of ModelConfig."""
    weights = {"load_format": "dummy"} | weights
    memory = MemoryConfig(
        max_total_tokens=16384, disable_radix_cache=True, mem_fraction_static=fraction
    )
    return EngineConfig(
        model=ModelConfig(model=model, context_length=8192, **weights),
        memory=memory,
        schedule=ScheduleConfig(max_running_requests=8),
        graph=GraphConfig(**MODES[mode]),
    )


def capture_late_graphs(engine: Engine) -> None:
    """What a server captures while there is no work, long prompts among them. An engine without
    rounds on the device captures those for the second prompt of a length, which is not counted."""
    while engine.use_idle_moment():
        pass


def first_tokens(
    engine: Engine, vocab_size: int, lengths: Sequence[int]
) -> Iterator[tuple[int, float]]:
    """(length, milliseconds), the median of what follows the first third."""
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    for length in lengths:
        prompt = [5 + (7 * place) % (vocab_size - 5) for place in range(length)]
        times = [sum(milliseconds(engine, [prompt], params)) for _ in range(REPEATS)]
        yield length, statistics.median(times[REPEATS // 3 :])


def measure(given: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    weights = weights_of(given)
    loaded: LoadedModel | None = load(config_of(given.models[0], "none", **weights), Phases())
    with turn(given.turns):
        for model in given.models:
            loaded = loaded or load(config_of(model, "none", **weights), Phases())
            rows += measure_modes(given, model, loaded)
            loaded = None
            gc.collect()
    return rows


def weights_of(given: argparse.Namespace) -> dict[str, Any]:
    return {"load_format": given.load_format, "quantization": given.quantization}


def measure_modes(
    given: argparse.Namespace, model: str, loaded: LoadedModel
) -> Iterator[dict[str, Any]]:
    for mode in given.modes:
        fraction = NEARLY_ALL if given.turns else None
        config = config_of(model, mode, fraction, **weights_of(given))
        start = perf_counter()
        engine = build_engine(config, loaded, Phases())
        row: dict[str, Any] = {"model": model, "mode": mode, "start, s": perf_counter() - start}
        capture_late_graphs(engine)
        found = first_tokens(engine, loaded.model.vocab_size, given.lengths)
        row |= {str(length): spent for length, spent in found}
        graphs = engine.stats().graphs
        print(row, graphs.get("prefill"), graphs.get("piecewise"), flush=True)
        yield row
        del engine, found
        gc.collect()


def start_once(model: str, mode: str, lengths: Sequence[int]) -> None:
    """In a process of its own: prints seconds by phase, pieces compiled and loaded, and
    milliseconds to the first token."""
    phases, begin = Phases(), perf_counter()
    loaded = load(config_of(model, mode), phases)
    engine = build_engine(config_of(model, mode), loaded, phases)
    pieces = engine.parts.worker.runner.pieces
    row: dict[str, Any] = {"all, s": perf_counter() - begin}
    if pieces is not None:
        made = pieces.compiled
        row |= {"compiled": made.compiled, "loaded": made.loaded, "trace": pieces.seconds}
        row["captured"] = GraphStats.of(pieces.counters).captures
    found = first_tokens(engine, loaded.model.vocab_size, lengths)
    row |= {f"{length} tokens, ms": spent for length, spent in found}
    print("START " + json.dumps(row), flush=True)


def start_up(model: str, lengths: Sequence[int]) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        kept = {name: f"{folder}/{name}" for name in ("SPECENGINE_CACHE_DIR",)}
        kept |= {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/t"}
        for when in ("cold", "warm"):
            command = [sys.executable, __file__, "--once", model]
            command += ["--lengths", *map(str, lengths)]
            output = subprocess.run(
                command, env={**os.environ, **kept}, check=True, text=True, stdout=subprocess.PIPE
            ).stdout
            (line,) = (one for one in output.splitlines() if one.startswith("START "))
            rows.append({"model": model, "caches": when} | json.loads(line.removeprefix("START ")))
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[*MODES])
    parser.add_argument("--lengths", nargs="+", type=int, default=[*LENGTHS], help="up to 8191")
    parser.add_argument(
        "--turns", type=Path, metavar="FOLDER", help="start beside others, be measured alone"
    )
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--quantization", help="of weights when they are loaded")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--start-up", action="store_true")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.once:
        start_once(given.models[0], "piecewise, inductor", given.lengths)
    elif given.start_up:
        rows = [row for model in given.models for row in start_up(model, given.lengths)]
        title = "Start-up with compiled pieces, caches empty and filled"
        notes = "Seconds; of prompts, milliseconds to the first token, medians of six."
        print(report.write("prefill-modes", "start-up", title, rows, notes))
    elif given.json is not None:
        found = {"environment": environment(), "rows": measure(given)}
        given.json.write_text(json.dumps(found, indent=1))
    else:
        title = "Time to the first token by the prompt's length and --cuda-graph-mode"
        notes = "Milliseconds, medians of six; columns are lengths of prompts in tokens."
        print(report.write("prefill-modes", "first-token", title, measure(given), notes))


if __name__ == "__main__":
    main()
