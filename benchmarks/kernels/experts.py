"""Mixtures of experts in Triton: errors against float64, and microseconds by rows and tiles.

    python benchmarks/kernels/experts.py [--json FILE] [--shape qwen3-30b-a3b] [--no-sweep]

A layer's routing, products and sum in one CUDA graph, replayed over several layers' weights, so
that none is read from a cache. Rows differ and choose experts evenly: "experts" is how many of them
a call reads, "limit" the time to read these once at the speed that this card copies at (of 256 rows
and more also the time to multiply, at 60% of a dense product's peak is common). Rows on equal
weights must have equal bits alone and among others: that is checked first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specengine.kernels.experts import experts_triton, route_triton
from specengine.kernels.experts.tiles import WHOLE, Tile, Tiles, are_few
from specengine.kernels.experts.types import Activation, Chosen, ExpertWeights, Router, Routing

SILU = Activation()
ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 2048)
LAYERS = 6  # whose weights take turns; one layer of 30B is 1.2 GB, more than any cache


@dataclass(frozen=True)
class Shape:
    hidden: int
    inner: int
    count: int
    chosen: int
    has_bias: bool = False
    activation: Activation = SILU


SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 768, 128, 8),
    "gpt-oss-20b": Shape(2880, 2880, 32, 4, True, Activation("clamped")),
    "gpt-oss-120b": Shape(2880, 2880, 128, 4, True, Activation("clamped")),
}

FEW_TILES = {
    "gate_up": [
        Tile(16, outs, inputs, warps, stages)
        for outs, inputs, warps, stages in (
            (16, 128, 4, 4),
            (16, 256, 4, 4),
            (32, 64, 4, 5),
            (32, 128, 4, 3),
            (32, 128, 4, 4),
            (32, 256, 4, 3),
            (64, 128, 4, 3),
            (64, 64, 4, 4),
        )
    ],
    "down": [
        Tile(16, outs, inputs, warps, stages)
        for outs, inputs, warps, stages in (
            (16, 256, 4, 3),
            (32, 128, 4, 4),
            (32, 256, 4, 3),
            (64, 128, 4, 3),
            (64, 128, 4, 4),
            (64, 64, 4, 5),
            (128, 64, 4, 4),
            (128, 128, 8, 3),
        )
    ],
}
MANY_TILES = [
    Tiles(Tile(rows, outs, 64, warps, stages), Tile(rows, 2 * outs, 64, warps, stages))
    for rows, outs, warps, stages in (
        (16, 64, 4, 4),
        (32, 64, 4, 4),
        (64, 64, 4, 3),
        (64, 64, 4, 4),
        (64, 128, 8, 3),
        (128, 64, 4, 3),
        (128, 64, 8, 3),
        (128, 64, 8, 4),
        (128, 128, 8, 3),
    )
]
SWEPT = {"few": (1, 8, 64), "many": (256, 2048)}


def draw(shape: Shape, seed: int) -> tuple[Router, ExpertWeights]:
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*size: int, scale: float) -> Tensor:
        out = torch.empty(size, device="cuda", dtype=torch.bfloat16)
        return out.normal_(0.0, scale, generator=generator)

    count, inner, hidden = shape.count, shape.inner, shape.hidden
    biases = (
        (normal(count, 2 * inner, scale=0.1), normal(count, hidden, scale=0.1))
        if shape.has_bias
        else (None, None)
    )
    weights = ExpertWeights(
        normal(count, 2 * inner, hidden, scale=hidden**-0.5),
        normal(count, hidden, inner, scale=inner**-0.5),
        *biases,
        shape.activation,
    )
    return Router(normal(count, hidden, scale=hidden**-0.5)), weights


def rows_of(shape: Shape, rows: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(rows)
    x = torch.empty(rows, shape.hidden, device="cuda", dtype=torch.bfloat16)
    return x.normal_(generator=generator)


def exact(x: Tensor, chosen: Chosen, weights: ExpertWeights, rows: Tensor) -> Tensor:
    """float64 [R, H], of some rows."""
    out = torch.zeros(len(rows), x.shape[1], dtype=torch.float64, device=x.device)
    how = weights.activation
    for number, row in enumerate(rows.tolist()):
        for expert, weight in zip(
            chosen.ids_TK[row].tolist(), chosen.weights_TK[row].double(), strict=True
        ):
            gate, up = (weights.gate_up[expert].double() @ x[row].double()).chunk(2)
            if weights.gate_up_bias is not None and weights.down_bias is not None:
                more = weights.gate_up_bias[expert].double().chunk(2)
                gate, up = gate + more[0], up + more[1]
            if how.name == "clamped":
                gate, up = gate.clamp(max=how.limit), up.clamp(-how.limit, how.limit) + 1
                gated = gate * torch.sigmoid(how.alpha * gate) * up
            else:
                gated = gate * torch.sigmoid(gate) * up
            down = weights.down[expert].double() @ gated
            if weights.down_bias is not None:
                down = down + weights.down_bias[expert].double()
            out[number] += weight * down
    return out


def summed(out: Tensor) -> Tensor:
    return out.sum(0) if out.dim() == 3 else out


def check(shape: Shape, router: Router, weights: ExpertWeights) -> list[dict[str, Any]]:
    """Raises SystemExit for errors beyond those of rounding to bfloat16."""
    found = []
    routing = Routing(shape.chosen)
    for rows in ROWS:
        x = rows_of(shape, rows)
        logits = x.double() @ router.weight.double().T
        chosen = route_triton.route(x, router, routing)
        best = logits.topk(shape.chosen).values
        gap = (best - logits.gather(1, chosen.ids_TK.long())).abs().max()
        scores = best.softmax(-1)
        off = (scores - chosen.weights_TK.double()).abs().max()
        some = torch.linspace(0, rows - 1, min(rows, 16), device="cuda").long()
        expected = exact(x, chosen, weights, some)
        out = summed(experts_triton.experts(x, chosen, weights))[some].double()
        error = ((out - expected).norm() / expected.norm()).item()
        row = {"rows": rows, "logit gap": gap.item(), "weights": off.item(), "experts": error}
        print("error", {name: f"{value:.2g}" for name, value in row.items()}, flush=True)
        if error > 0.01 or gap > 1e-3 or off > 1e-3:
            raise SystemExit(f"wrong at {rows} rows: {row}")
        found.append(row)
    return found


def check_independence(shape: Shape, router: Router, weights: ExpertWeights) -> dict[str, bool]:
    """Whether rows have the same bits alone and among others: within each tiling, and over the
    boundaries of tilings."""
    routing, x = Routing(shape.chosen), rows_of(shape, 300)
    whole = route_triton.route(x, router, routing)
    alone = route_triton.route(x[:1], router, routing)
    same = {
        "routing, 1 and 300 rows": torch.equal(whole.ids_TK[:1], alone.ids_TK)
        and torch.equal(whole.weights_TK[:1], alone.weights_TK)
    }
    few = _first_row(x, whole, weights, 1)
    for rows in (2, 8, 64, 65, 128, 256):
        same[f"experts, 1 and {rows} rows"] = torch.equal(few, _first_row(x, whole, weights, rows))
    again = [_first_row(x, whole, weights, 256) for _ in range(4)]
    same["experts, 256 rows again"] = all(torch.equal(one, again[0]) for one in again)
    print("same bits", same, flush=True)
    if not all(same[f"experts, 1 and {rows} rows"] for rows in (2, 8, 64)):
        raise SystemExit("a row depends on the rows beside it")
    return same


def _first_row(x: Tensor, chosen: Chosen, weights: ExpertWeights, rows: int) -> Tensor:
    part = Chosen(chosen.ids_TK[:rows].contiguous(), chosen.weights_TK[:rows].contiguous())
    return experts_triton.experts(x[:rows], part, weights)[:, 0].clone()


def graph_us(calls: list[Callable[[], object]]) -> float:
    """Microseconds a call, of a graph of all of them; the best of some replays."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(6):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    return min(times)


def copy_speed() -> float:
    """Bytes read and written a second by a plain copy."""
    source = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.numel() / graph_us([lambda: target.copy_(source)] * 4) * 1e6


@dataclass
class Bench:
    shape: Shape
    layers: list[tuple[Router, ExpertWeights]]
    speed: float  # bytes a second

    def row(self, rows: int) -> dict[str, Any]:
        """Times of one number of rows with the tiles in force."""
        x, routing = rows_of(self.shape, rows), Routing(self.shape.chosen)
        picked = [route_triton.route(x, router, routing) for router, _ in self.layers]
        parts = [
            lambda router=router: route_triton.route(x, router, routing)  # type: ignore[misc]
            for router, _ in self.layers
        ]
        routed = graph_us(parts)
        products = self.products(x, picked, None)
        read = sum(len(one.ids_TK.unique()) for one in picked) / len(picked)
        limit = read * self.expert_bytes / self.speed * 1e6
        flop = 6 * rows * self.shape.chosen * self.shape.hidden * self.shape.inner
        return {
            "rows": rows,
            "experts": read,
            "route us": routed,
            "products us": products,
            "limit us": limit,
            "of limit": limit / products,
            "TFLOP/s": flop / products / 1e6,
        }

    def products(self, x: Tensor, picked: list[Chosen], tiles: Tiles | None) -> float:
        calls = [
            lambda one=one, weights=weights: experts_triton.experts(  # type: ignore[misc]
                x, one, weights, tiles
            )
            for one, (_, weights) in zip(picked, self.layers, strict=True)
        ]
        return graph_us(calls)

    @property
    def expert_bytes(self) -> int:
        return 2 * 3 * self.shape.hidden * self.shape.inner

    def sweep(self, rows: int) -> list[dict[str, Any]]:
        x, routing = rows_of(self.shape, rows), Routing(self.shape.chosen)
        picked = [route_triton.route(x, router, routing) for router, _ in self.layers]
        found = []
        for tiles in self.candidates(rows):
            try:
                took = self.products(x, picked, tiles)
            except Exception as error:  # out of shared memory
                torch.cuda.synchronize()
                print(rows, tiles, type(error).__name__, str(error)[:80], flush=True)
                continue
            found.append({"rows": rows, "us": took} | asdict(tiles))
        return sorted(found, key=lambda one: one["us"])

    def candidates(self, rows: int) -> list[Tiles]:
        usual = WHOLE.tiles_of(rows, self.shape.count, self.shape.chosen)
        if not are_few(rows, self.shape.chosen):
            return MANY_TILES
        gates = [replace(usual, gate_up=tile) for tile in FEW_TILES["gate_up"]]
        return gates + [replace(usual, down=tile) for tile in FEW_TILES["down"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-30b-a3b")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--no-sweep", action="store_true")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    layers = [draw(shape, seed) for seed in range(LAYERS)]
    report: dict[str, Any] = {"shape": asdict(shape), "card": torch.cuda.get_device_name()}
    report["errors"] = check(shape, *layers[0])
    report["same bits"] = check_independence(shape, *layers[0])
    bench = Bench(shape, layers, copy_speed())
    report["copy TB/s"] = bench.speed / 1e12
    print(f"{report['card']}: a copy moves {report['copy TB/s']:.2f} TB/s", flush=True)
    report["rows"] = []
    for rows in ROWS:
        report["rows"].append(bench.row(rows))
        shown = {name: round(value, 2) for name, value in report["rows"][-1].items()}
        print(shown, flush=True)
    report["sweep"] = []
    for rows in () if args.no_sweep else SWEPT["few"] + SWEPT["many"]:
        found = bench.sweep(rows)
        report["sweep"] += found
        for one in found:
            print(f"{rows:5d} rows {one['us']:8.1f} us", one["gate_up"], one["down"], flush=True)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
