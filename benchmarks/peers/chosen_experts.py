"""How many experts of a layer one decoding step reads, by batch size, and how fast a card could run
such steps at most.

    python benchmarks/peers/chosen_experts.py DIR --json experts.json

This engine decodes the prompts of `bench throughput` eagerly, and each layer's routing is counted
on the device. Nothing here is timed but a plain copy. --turns: others start on the same card.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

from turns import turn

from specengine.core.version import __version__
from specengine.engine.llm import LLM
from specengine.engine.resolve import torch_dtype
from specengine.kernels.experts.types import Chosen
from specengine.lab.card import Card, card_line, measure_card
from specengine.lab.environment import environment
from specengine.lab.files import write_text
from specengine.lab.round_work import Weights, weights_of
from specengine.lab.throughput.workload import Workload
from specengine.layers.sparse_mlp import SparseMLP
from specengine.runner.layer_hooks import LayerOutput

DEFINITIONS = {
    "read": "Experts that some row of a decoding step chose: the mean over layers and steps.",
    "even": "As many as rows read that choose evenly and independently of each other.",
    "bytes": "Of those experts in every layer, all other weights and the head; KV is left out.",
    "limit": "Tokens a second if a step took as long as reading these bytes at a copy's speed.",
}


@dataclass(frozen=True)
class Point:
    """A batch size; figures as DEFINITIONS has them. read_by_layer: the mean over steps."""

    batch_size: int
    experts: int
    chosen: int
    steps: int
    read: float
    even: float
    bytes: float
    limit: float
    read_by_layer: list[float] = field(default_factory=list)


class Choices:
    """Which experts the rows of the last forward chose. ids: of each layer by its number, int64
    [rows, chosen]; of a captured graph what each replay writes."""

    def __init__(self, model: Any) -> None:
        """Raises SystemExit for a model without experts."""
        self.layers = [one for one in model.modules() if isinstance(one, SparseMLP)]
        if not self.layers:
            sys.exit("no layer of this model has experts: there is nothing to count")
        self.ids: dict[int, Tensor] = {}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Of what runs, or is captured, meanwhile."""
        for number, layer in enumerate(self.layers):
            layer.gate.choose = self._seen(number, layer.gate.choose)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for layer in self.layers:
                del layer.gate.choose

    def _seen(self, number: int, choose: Callable[[Tensor], Chosen]) -> Callable[[Tensor], Chosen]:
        def chosen(x: Tensor) -> Chosen:
            found = choose(x)
            self.ids[number] = found.ids_TK
            return found

        return chosen

    def read(self) -> Tensor:
        """int64 [layers], distinct experts of each layer; 0 of those that were not run."""
        numbers = range(len(self.layers))
        return torch.tensor([self.ids[n].unique().numel() if n in self.ids else 0 for n in numbers])


class RoutingCounter:
    """Distinct experts by layer, summed over decoding steps of `batch_size` requests."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.batch_size = 0
        self.steps = 0
        self.totals = torch.zeros(len(choices.layers), dtype=torch.int64)

    def start(self, batch_size: int) -> None:
        self.batch_size, self.steps = batch_size, 0
        self.totals.zero_()

    @contextmanager
    def watching(self, llm: LLM) -> Iterator[None]:
        """Decoding runs eagerly meanwhile."""
        hook = llm.add_layer_hook("layers.0", self._end)
        try:
            with self.choices.recorded():
                yield
        finally:
            hook.remove()

    def _end(self, output: LayerOutput) -> None:
        """After a whole forward: layers.0 is reported behind the last layer."""
        if output.mode.is_decode() and len(output.tokens_T) == self.batch_size:
            self.steps += 1
            self.totals += self.choices.read()
        self.choices.ids.clear()


def measure(llm: LLM, work: Workload, card: Card) -> Iterator[Point]:
    """Raises SystemExit for a model without experts."""
    model: Any = llm.engine.parts.worker.runner.model
    counter, weights = RoutingCounter(Choices(model)), weights_of(model)
    with counter.watching(llm):
        for size in work.batch_sizes:
            counter.start(size)
            llm.generate(work.batches(size, model.vocab_size)[0], work.params, progress=False)
            if not counter.steps:
                sys.exit(f"no step of {size} requests ran: is --max-total-tokens large enough?")
            yield _point(counter, weights, card)


def _point(counter: RoutingCounter, weights: Weights, card: Card) -> Point:
    by_layer = (counter.totals / counter.steps).tolist()
    size, first = counter.batch_size, weights.experts[0]
    routed = sum(n * one.bytes for n, one in zip(by_layer, weights.experts, strict=True))
    total = weights.body[0] + weights.head[0] + routed
    return Point(
        batch_size=size,
        experts=first.count,
        chosen=first.chosen,
        steps=counter.steps,
        read=sum(by_layer) / len(by_layer),
        even=first.count * (1 - (1 - first.chosen / first.count) ** size),
        bytes=total,
        limit=size * card.copy / total,
        read_by_layer=by_layer,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", help="a folder, or a built-in name")
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompt-len", type=int, default=30)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--max-total-tokens", type=int, help="of KV; default: what fits")
    parser.add_argument("--mem-fraction-static", type=float, help="of the card's memory")
    parser.add_argument(
        "--turns", type=Path, metavar="FOLDER", help="start beside others, be measured alone"
    )
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    work = Workload(tuple(args.batch_sizes), args.prompt_len, args.new_tokens, repeats=0)
    llm = LLM(
        args.model,
        load_format=args.load_format,
        disable_cuda_graph=True,
        disable_radix_cache=True,
        max_running_requests=max(work.batch_sizes),
        max_total_tokens=args.max_total_tokens,
        mem_fraction_static=args.mem_fraction_static,
    )
    with turn(args.turns):
        count(llm, work, args.json, Path(args.model).name)
    print(args.json)


def count(llm: LLM, work: Workload, path: Path, name: str) -> None:
    """Writes the report, point by point. name: of the model."""
    parts = llm.engine.parts
    card = measure_card(parts.worker.runner.device, torch_dtype(parts.config.model.dtype))
    print(card_line(card), flush=True)
    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "environment": environment(),
        "engine": f"specengine {__version__}",
        "model": {"name": name},
        "definitions": DEFINITIONS,
        "workload": asdict(work),
        "card": asdict(card),
        "experts": [],
    }
    for point in measure(llm, work, card):
        print(
            f"batch size {point.batch_size}: {point.read:.1f} of {point.experts} experts a layer "
            f"(evenly {point.even:.1f}), {point.bytes / 1e9:.2f} GB, at most {point.limit:.0f} "
            f"tok/s",
            flush=True,
        )
        report["experts"].append(asdict(point))
        write_text(path, json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
