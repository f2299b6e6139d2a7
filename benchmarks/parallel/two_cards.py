"""Tensor parallelism on two GPUs of one host beside one of them: are the tokens the same, how fast
is it, what does an all-reduce take, what memory does a rank have, and does a dead rank end it.

    NCCL_NVLS_ENABLE=0 python benchmarks/parallel/two_cards.py --out $OUT/two_cards.json

Needs no weights but those of the package. --parts runs some of it, in the order given; --device cpu
tries the script. Two cards of 80 GB hold all of it: models of one and of two ranks are loaded one
after the other where both would not fit beside each other.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.parallel.shapes import write_shape  # noqa: E402
from specengine import LLM, SamplingParams, SpecConfig  # noqa: E402
from specengine.core.config_sources import config_from_flags  # noqa: E402
from specengine.core.errors import EngineStoppedError, OutOfMemoryError  # noqa: E402
from specengine.core.parallel_config import ParallelConfig  # noqa: E402
from specengine.engine.build import build_engine, load  # noqa: E402
from specengine.engine.loop import Engine  # noqa: E402
from specengine.engine.parallel.ranks import start_ranks  # noqa: E402
from specengine.engine.phases import Phases  # noqa: E402
from specengine.lab.accept.speed import run_batches  # noqa: E402
from specengine.lab.throughput.workload import Workload  # noqa: E402
from specengine.runner.loader.builtin import BUILTIN_MODELS  # noqa: E402
from specengine.runner.loader.loaded_model import LoadedModel  # noqa: E402

SIZE = 2
CHAIN = {"num_steps": 3, "adaptive": False}
TREE = CHAIN | {"eagle_topk": 3, "num_draft_tokens": 8}
SPECS: dict[str, SpecConfig | None] = {
    "plain": None,
    "eagle3 chain": SpecConfig(algorithm="EAGLE3", **CHAIN),
    "eagle3 tree": SpecConfig(algorithm="EAGLE3", **TREE),
    "mtp": SpecConfig(algorithm="MTP", **CHAIN),
}
FORCED = SpecConfig(algorithm="EAGLE3", **CHAIN, simulate_accept_length=2.5)
# Name, drafts, and of how many ranks the draft model is.
VARIANTS: tuple[tuple[str, SpecConfig | None, int | None], ...] = (
    ("plain", None, None),
    ("eagle3 forced 2.5", FORCED, None),
    ("eagle3 forced 2.5, draft whole", FORCED, 1),
)
BATCH_SIZES = (1, 8, 64)
PROMPTS = [[(7 * i * i + n * i) % 3000 + 5 for i in range(9 + 5 * n)] for n in range(1, 4)]
GREEDY = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
SEEDED = [
    SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, seed=seed, ignore_eos=True)
    for seed in range(3)
]
ENDS_WITHIN = 10.0  # seconds
HANGS_AFTER = 100.0  # seconds without a line


@dataclass
class Bench:
    """found: all that is printed, as JSON."""

    device: str
    new_tokens: int
    found: dict[str, Any]
    folder: Path  # for shapes
    out: Path | None
    symm_mem: bool = False
    small: bool = False
    graphs: tuple[bool, ...] = (True,)  # of shapes: in graphs, without, or both
    noted: float = 0.0

    def shape(self, name: str) -> str:
        """A built-in name, or a directory in `folder`."""
        if self.small:
            return write_shape("small experts", self.folder)
        return name if name in BUILTIN_MODELS else write_shape(name, self.folder)

    def note(self, part: str, name: str, value: Any) -> None:
        self.noted = time.monotonic()
        self.found.setdefault(part, {})[name] = value
        print(f"{part:>10}  {name:<58} {value}", flush=True)
        if self.out is not None:
            self.out.write_text(json.dumps(self.found, indent=1))

    def flags(self, **more: Any) -> dict[str, Any]:
        return {"device": self.device, "max_running_requests": 64, "random_seed": 7, **more}

    def start(self) -> Any:
        """The link to the other rank, whatever model they load."""
        flags = self.flags(tp_size=SIZE, enable_symm_mem=self.symm_mem)
        link: Any = start_ranks(config_from_flags(flags), Phases())
        self.noted = time.monotonic()
        watch = threading.Thread(target=self._watch, args=(link.watch.pids,), daemon=True)
        watch.start()
        return link

    def _watch(self, pids: list[int]) -> None:
        """Where all ranks stand, if nothing is noted for long; then the end."""
        while time.monotonic() - self.noted < HANGS_AFTER:
            time.sleep(1.0)
        print("HANGS", flush=True)
        faulthandler.dump_traceback()
        for pid in pids:
            os.kill(pid, signal.SIGUSR1)
        time.sleep(3.0)
        os._exit(3)

    @contextmanager
    def models(
        self, link: Any, sizes: tuple[int, ...] = (1, SIZE), **flags: Any
    ) -> Iterator[dict[int, LoadedModel]]:
        """One on this card, and its halves on both."""
        found = {}
        for size in sizes:
            config = config_from_flags(self.flags(tp_size=size, **flags))
            found[size] = load(config, Phases(), link if size > 1 else None)
        yield found
        found.clear()
        free()

    def engine(self, loaded: LoadedModel, spec: SpecConfig | None, **flags: Any) -> Engine:
        draft_size = flags.pop("draft_tp_size", None)
        config = config_from_flags(self.flags(model=loaded.config.model.model, **flags), spec)
        parallel = ParallelConfig(tp_size=loaded.link.communicator.size, draft_tp_size=draft_size)
        model = replace(loaded.config.model)
        return build_engine(replace(config, model=model, parallel=parallel), loaded)


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def identity(bench: Bench, link: Any) -> None:
    """float32, trained small models with drafts that are accepted, and the 135M shape."""
    identical(bench, link, (True, False), model="tiny")
    identical(bench, link, bench.graphs, model="smollm2-shape", load_format="dummy")


def identity8(bench: Bench, link: Any) -> None:
    """The same of the 8B shape, whose drafts are random."""
    flags = {"model": bench.shape("llama-3.1-8b-shape"), "load_format": "dummy"}
    identical(bench, link, bench.graphs, **flags)


def identity30(bench: Bench, link: Any) -> None:
    """The same with experts, of Qwen3-30B-A3B's shape with 8 layers in place of 48."""
    flags = {"model": bench.shape("30b-a3b, 8 layers"), "load_format": "dummy"}
    identical(bench, link, bench.graphs, **flags)


def identical(bench: Bench, link: Any, graphs: tuple[bool, ...], **flags: Any) -> None:
    with bench.models(link, dtype="float32", **flags) as loaded:
        for name, spec in SPECS.items():
            for captured in graphs:
                title = f"{Path(flags['model']).name} {name} graphs={captured}"
                compare(bench, loaded, title, spec, captured)


def compare(
    bench: Bench, loaded: dict[int, LoadedModel], name: str, spec: SpecConfig | None, graphs: bool
) -> None:
    given: dict[int, list[Any]] = {}
    sizes = {"cuda_graph_bs": (1, 4)} if graphs else {"disable_cuda_graph": True}
    for size, model in loaded.items():
        engine = bench.engine(model, spec, max_total_tokens=8192, context_length=1024, **sizes)
        llm = LLM.of(engine)
        found = [*llm.generate(PROMPTS, GREEDY), *llm.generate(PROMPTS, SEEDED)]
        given[size] = [(one.token_ids, one.spec.num_accepted) for one in found]
        given[size].append([] if engine.device_rounds is None else ["device rounds"])
        engine.close()
        del engine, llm
        free()
    same = sum(one == other for one, other in zip(given[1], given[SIZE], strict=True))
    accepted = sum(count for _, count in given[1][:-1])
    verdict = "same" if given[1] == given[SIZE] else f"DIFFERENT ({same} of {len(given[1])} same)"
    bench.note("identity", name, f"{verdict}; {accepted} accepted; {given[1][-1]}")


def speed(bench: Bench, link: Any) -> None:
    """The 8B shape: one card, and two."""
    sweep(bench, link, "llama-3.1-8b-shape")


def speed30(bench: Bench, link: Any) -> None:
    """Qwen3-30B-A3B's shape: 57 GiB of weights on one card."""
    sweep(bench, link, "qwen3-30b-a3b-shape")


def speed70(bench: Bench, link: Any) -> None:
    """Llama-3.1-70B's shape, of which a rank has 65.7 GiB, and 160 KiB of KV for a token. No card
    of 141 GB holds it alone with its KV, and two of 80 GB hold a few requests."""
    name, flags = "llama-3.1-70b-shape", {"mem_fraction_static": 0.94}
    if torch.cuda.is_available() and torch.cuda.mem_get_info()[1] > 100 << 30:
        sweep(bench, link, name, (SIZE,), **flags)
        return
    flags |= {"chunked_prefill_size": 512, "max_running_requests": 16, "max_total_tokens": 4096}
    sweep(bench, link, name, (SIZE,), (1, 8), **flags)


def sweep(
    bench: Bench,
    link: Any,
    shape: str,
    sizes: tuple[int, ...] = (1, SIZE),
    batch_sizes: tuple[int, ...] = BATCH_SIZES,
    **flags: Any,
) -> None:
    """bfloat16, 30 tokens in, every batch together; memory and collectives beside it. The model of
    one rank is gone before that of two is loaded."""
    name = bench.shape(shape)
    rates: dict[tuple[str, int], list[float]] = {}
    given = {"model": name, "load_format": "dummy", "dtype": "bfloat16"}
    for size in sizes:
        with bench.models(link, (size,), **given) as loaded:
            for kind, spec, draft_size in VARIANTS:
                if draft_size is not None and (size == 1 or shape != "llama-3.1-8b-shape"):
                    continue
                title, more = f"{shape} {kind} tp {size}", flags | {"draft_tp_size": draft_size}
                try:
                    rates[kind, size] = measure(
                        bench, loaded[size], title, spec, batch_sizes, **more
                    )
                except OutOfMemoryError as error:
                    bench.note("speed", title, f"does not fit: {error}")
                free()
    for kind in ("plain", "eagle3 forced 2.5"):
        if {(kind, one) for one in (1, SIZE)} <= rates.keys():
            pairs = zip(rates[kind, 1], rates[kind, SIZE], strict=True)
            ratios = [f"{b / a:.2f}" for a, b in pairs]
            bench.note("speed", f"{shape} {kind} tp {SIZE} / tp 1", ratios)


def measure(
    bench: Bench,
    loaded: LoadedModel,
    name: str,
    spec: SpecConfig | None,
    batch_sizes: tuple[int, ...],
    **flags: Any,
) -> list[float]:
    """tok/s by batch size."""
    start = time.perf_counter()
    flags = {"max_total_tokens": 64 * 256, "context_length": 2048, **flags}
    engine = bench.engine(loaded, spec, **flags)  # graphs of a server's sizes: requests end apart
    bench.note("speed", f"{name} start-up seconds", round(time.perf_counter() - start, 1))
    rates = []
    for size in batch_sizes:
        work = Workload(batch_sizes=(size,), new_tokens=bench.new_tokens, repeats=2)
        runs = [
            run_batches(engine, prompts, work.params, size, lambda _: None)
            for prompts in work.batches(size, loaded.model.vocab_size)
        ][1:]
        rates.append(max(one.tokens / one.seconds for one in runs))
    bench.note("speed", f"{name} tok/s at {batch_sizes}", [round(one, 1) for one in rates])
    if engine.device_rounds is not None:
        collectives(bench, engine, name, batch_sizes)
    weigh(bench, engine, name)
    engine.close()
    return rates


def everywhere(engine: Engine, function: str, **arguments: Any) -> Any:
    """On every rank; what rank 0 finds."""
    place = f"benchmarks.parallel.on_ranks:{function}"
    call: Callable[..., Any] | None = getattr(engine, "call", None)
    if call is not None:
        return call(place, **arguments)
    from specengine.core.registry import load_place

    return load_place(place)(engine, **arguments)


def collectives(bench: Bench, engine: Engine, name: str, batch_sizes: tuple[int, ...]) -> None:
    """Time of an all-reduce in a graph, and the share of all of them in a round."""
    rounds = engine.device_rounds
    assert rounds is not None
    while engine.use_idle_moment(may_capture=False):  # a round of requests that have ended
        pass
    size, steps = engine.parts.link.communicator.size, rounds.steps[-1]
    layers = engine.parts.worker.runner.model.num_layers
    for batch in batch_sizes:
        whole = everywhere(engine, "round_seconds", batch_size=batch, num_steps=steps)
        line = f"round {whole * 1e3:.3f} ms"
        if size > 1:
            target = everywhere(engine, "all_reduce_seconds", num_rows=batch * (steps + 1))
            draft = everywhere(engine, "all_reduce_seconds", num_rows=batch)
            # Two a layer and one of the embedding; a draft step has a layer, and reads a head.
            share = ((2 * layers + 1) * target + steps * 4 * draft) / whole
            line += f"; all-reduce {target * 1e6:.1f} us, {share:.0%} of the round"
        bench.note("rounds", f"{name} batch {batch}, {steps} steps", line)
    if size > 1 and not steps:
        found = everywhere(engine, "all_reduces", rows=[1, 4, 8, 16, 32, 64, 128, 256])
        bench.note("rounds", f"all-reduce by rows, {name}", found)


def weigh(bench: Bench, engine: Engine, name: str) -> None:
    """Memory of each rank beside the formula: weights of layers and vocabulary by rank, norms and
    what is not split whole, KV of the rank's heads."""
    model, size = engine.parts.worker.runner.model, engine.parts.link.communicator.size
    expected = formula(model.config, size, torch.finfo(torch.bfloat16).bits // 8)
    with tempfile.TemporaryDirectory() as folder:
        everywhere(engine, "memory", folder=folder)
        for path in until(size, Path(folder)):
            found = json.loads(path.read_text())
            ratio = found["weights"] / expected
            line = {key: f"{value / 2**30:.3f} GiB" for key, value in found.items()}
            bench.note("memory", f"{name} {path.stem}", f"{line}, weights / formula {ratio:.4f}")


def formula(config: Any, size: int, each: int) -> int:
    """Bytes of a target's weights on one rank."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    width = getattr(config, "head_dim", None) or hidden // heads
    kv = max(config.num_key_value_heads // size, 1)
    layer = hidden * width * (2 * heads // size + 2 * kv)
    experts = getattr(config, "num_experts", 0)
    inner = config.moe_intermediate_size * experts if experts else config.intermediate_size
    # The router is whole, and so are Qwen3's norms of q and k.
    layer += 3 * hidden * inner // size + 2 * hidden + experts * hidden
    layer += 2 * width if config.model_type.startswith("qwen3") else 0
    tables = 1 if config.tie_word_embeddings else 2
    vocabulary = tables * hidden * config.vocab_size // size
    return each * (config.num_hidden_layers * layer + vocabulary + hidden)


def until(count: int, folder: Path) -> list[Path]:
    deadline = time.monotonic() + 20
    while len(found := sorted(folder.glob("*.json"))) < count and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.2)
    return found


def killed(bench: Bench) -> None:
    """In another process: rank 1 is killed amid rounds, and rank 0 must end by itself."""
    for symm_mem in (True, False):
        command = [sys.executable, __file__, "--victim", "--device", bench.device]
        command += ["--symm-mem"] if symm_mem else []
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, text=True, **pipes) as process:
            assert process.stdout is not None
            pid = int(process.stdout.readline())
            time.sleep(2.0)
            os.kill(pid, signal.SIGKILL)
            start = time.monotonic()
            try:
                said, errors = process.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                said, errors = process.communicate()
            took = time.monotonic() - start
        verdict = "ok" if took < ENDS_WITHIN and process.returncode > 0 else "WRONG"
        line = f"{verdict}: {took:.1f} s, code {process.returncode}: {said.strip()}"
        bench.note("killed", f"rank 0 ends, symm_mem {symm_mem}", line)
        print(errors[-1500:], flush=True)


def victim(device: str, symm_mem: bool) -> None:
    flags = {"device": device, "dtype": "float32", "max_total_tokens": 8192, "tp_size": SIZE}
    flags |= {"enable_symm_mem": symm_mem}
    engine = build_engine(config_from_flags({"model": "tiny", "cuda_graph_bs": (1,), **flags}))
    watch: Any = engine.parts.link
    print(*watch.watch.pids, flush=True)
    params = SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True)
    try:
        while True:
            LLM.of(engine).generate([[5, 9, 7]], params)
    except EngineStoppedError as error:
        print(error, flush=True)
        sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parts = ["killed", *(one.__name__ for one in PARTS)]
    parser.add_argument(
        "--parts", nargs="+", choices=parts, default=["killed", "identity", "speed"]
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a small shape in place of all others")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--graphs", nargs="+", choices=("on", "off"), default=["on"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--symm-mem", action="store_true", help="--enable-symm-mem")
    parser.add_argument("--victim", action="store_true", help="run by the script itself")
    args = parser.parse_args()
    if args.victim:
        victim(args.device, args.symm_mem)
    with tempfile.TemporaryDirectory() as folder:
        graphs = tuple(one == "on" for one in args.graphs)
        options = Path(folder), args.out, args.symm_mem, args.small, graphs
        run_parts(Bench(args.device, args.new_tokens, {}, *options), args.parts)


def run_parts(bench: Bench, parts: list[str]) -> None:
    start = time.perf_counter()
    functions = {one.__name__: one for one in PARTS}
    link = None
    for name in parts:
        if name == "killed":
            killed(bench)
        else:
            link = link or bench.start()
            functions[name](bench, link)
        bench.note("seconds", name, round(time.perf_counter() - start, 1))
    if link is not None:
        bench.noted = float("inf")
        link.watch.end()


PARTS = (identity, identity8, identity30, speed, speed30, speed70)


if __name__ == "__main__":
    main()
