"""Routing at few rows, on a GPU: microseconds a layer, of a norm and the routing behind it.

    python benchmarks/kernels/routing.py [--other FILE] [--rows 1 4 8 32 64] [--tiles] [--json FILE]

A CUDA graph of norms and routings in turns, of four layers' routers, as a round of the engine runs
them. --other: another route_triton.py beside the present one, such as that of an older commit
(`git show COMMIT:PATH > FILE`). Both must give the same experts and the same bits of their weights;
a line says so for other forms of routing as well. --tiles: programs of logits of other sizes, for
512 experts alone. The card's pace differs from minute to minute:
both are timed in turns, several times, and the median counts.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))
import report

from specengine.kernels.experts import route_triton
from specengine.kernels.experts.route_triton import LogitsTile
from specengine.kernels.experts.types import Chosen, Router, Routing
from specengine.kernels.linear.norm import rms_norm
from specengine.kernels.precompile import precompile

TILES = [
    LogitsTile(*one)
    for one in (
        *((16, 16, 2), (16, 32, 2), (32, 16, 2), (32, 32, 2), (32, 32, 4), (64, 16, 2)),
        *((32, 64, 4), (32, 64, 8), (32, 128, 8)),
    )
]
MANY_ROWS = 1, 2, 7, 8, 16, 17, 31, 32, 33, 64, 200, 511, 512, 600  # that are compared
LAYERS, CALLS, TURNS, EPS = 4, 40, 9, 1e-6
Route = Callable[[Tensor, Router, Routing], Chosen]


@dataclass(frozen=True)
class Shape:
    name: str
    hidden: int
    count: int
    routing: Routing
    has_bias: bool = False
    has_correction: bool = False


SHAPES = [
    Shape("GPT-OSS-20B", 2880, 32, Routing(4), has_bias=True),
    Shape("GPT-OSS-120B", 2880, 128, Routing(4), has_bias=True),
    Shape("Qwen3-30B-A3B", 2048, 128, Routing(8)),
    Shape("Qwen3-Next-80B", 2048, 512, Routing(10)),
    Shape("DeepSeek-V2-Lite", 2048, 64, Routing(6, normalised=False)),
]
CHECKED = [
    *SHAPES,
    replace(SHAPES[2], routing=Routing(8, normalised=False, scaling=2.5)),
    replace(SHAPES[4], count=60),
    Shape("sigmoid", 4096, 128, Routing(1, "sigmoid", normalised=False)),
    Shape("groups", 7168, 256, Routing(8, "sigmoid", True, 2.5, 8, 4), has_correction=True),
    Shape("groups, best of one", 5120, 160, Routing(6, "softmax", False, 16.0, 8, 3, 1)),
    Shape("few experts", 4096, 8, Routing(2)),
]


def load(path: Path) -> Route:
    spec = importlib.util.spec_from_file_location("other_route_triton", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["other_route_triton"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    route: Route = module.route
    return route


def draw(shape: Shape) -> list[Router]:
    def normal(*size: int, scale: float) -> Tensor:
        return torch.randn(size, device="cuda") * scale

    return [
        Router(
            normal(shape.count, shape.hidden, scale=shape.hidden**-0.5).bfloat16(),
            normal(shape.count, scale=0.5).bfloat16() if shape.has_bias else None,
            normal(shape.count, scale=0.1) if shape.has_correction else None,
        )
        for _ in range(LAYERS)
    ]


def rows_of(shape: Shape, rows: int) -> Tensor:
    return torch.randn(rows, shape.hidden, device="cuda").bfloat16()


def check(shape: Shape, ways: dict[str, Route]) -> bool:
    """Whether all ways give the bits of one row alone, at any number of rows, again and again."""
    router, x = draw(shape)[0], rows_of(shape, 600)
    x[5] = float("nan")
    x[6] = x[7]
    alone = [route_triton.route(x[row : row + 1], router, shape.routing) for row in range(len(x))]
    ids = torch.cat([one.ids_TK for one in alone])
    weights = torch.cat([one.weights_TK for one in alone])
    for route, rows in itertools.product(ways.values(), MANY_ROWS):
        for _ in range(20):
            found = route(x[:rows], router, shape.routing)
            same = torch.equal(found.weights_TK.nan_to_num(-1.0), weights[:rows].nan_to_num(-1.0))
            if not torch.equal(found.ids_TK, ids[:rows]) or not same:
                return False
    return True


def graph_of(shape: Shape, route: Route | None, rows: int) -> torch.cuda.CUDAGraph:
    """route: None for the norms alone."""
    routers, x = draw(shape), rows_of(shape, rows)
    gain = torch.ones(shape.hidden, device="cuda", dtype=torch.bfloat16)

    def run(calls: int) -> None:
        for i in range(calls):
            normed = rms_norm(x, gain, EPS)
            if route is not None:
                route(normed, routers[i % LAYERS], shape.routing)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(2)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run(CALLS)
    graph.kept = routers, x, gain  # type: ignore[attr-defined]
    return graph


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000 / CALLS


def measure(shape: Shape, rows: int, ways: dict[str, Route]) -> dict[str, Any]:
    graphs = {name: graph_of(shape, route, rows) for name, route in {"norm": None, **ways}.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for graph in graphs.values():
        graph.replay()
    for _ in range(TURNS):
        for name, graph in graphs.items():
            times[name].append(replay_us(graph))
    taken = {f"{name} us": round(median(one), 2) for name, one in times.items()}
    what = {"model": shape.name, "experts": shape.count, "chosen": shape.routing.num_chosen}
    return {**what, "rows": rows, **taken}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--other", type=Path, help="another route_triton.py")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 32, 64])
    parser.add_argument("--tiles", action="store_true", help="sweep tiles, of 512 experts alone")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--page", action="store_true", help="write a page of results")
    args = parser.parse_args()
    torch.manual_seed(0)
    ways: dict[str, Route] = {"now": route_triton.route}
    if args.other is not None:
        ways["other"] = load(args.other)
    checked, shapes = CHECKED, SHAPES
    if args.tiles:
        checked = shapes = [one for one in SHAPES if one.count == 512]
        ways |= {str(one): partial(route_triton.route, tile=one) for one in TILES}
    with precompile():
        for shape, route, count in itertools.product(checked, ways.values(), (2,)):
            route(rows_of(shape, count), draw(shape)[0], shape.routing)
    same = {}
    for shape in checked:
        key = f"{shape.name}, {shape.count} experts, {shape.routing}"
        same[key] = check(shape, ways)
        print("same bits" if same[key] else "OTHER BITS", key, flush=True)
    rows = []
    for shape, count in itertools.product(shapes, args.rows):
        rows.append(measure(shape, count, ways))
        print(rows[-1], flush=True)
    if args.json:
        found = {"card": torch.cuda.get_device_name(), "same bits": same, "rows": rows}
        args.json.write_text(json.dumps(found, indent=1))
    if args.page:
        print(report.write("kernels", "routing", "Routing of mixtures of experts", rows))
    if not all(same.values()):
        raise SystemExit("not the same bits")


if __name__ == "__main__":
    main()
