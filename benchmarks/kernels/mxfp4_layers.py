"""Layers of experts in MXFP4, and what is measured of their products: errors, bits, microseconds
and bytes a second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import torch

from benchmarks.kernels.experts import SHAPES, Shape, graph_us, rows_of, summed
from benchmarks.kernels.packed_experts import mxfp4
from specengine.core.registry import EXPERT_FORMATS, load_place
from specengine.kernels.experts import experts_triton, mxfp4_cuda, route_triton
from specengine.kernels.experts.experts import experts
from specengine.kernels.experts.packed import PackedExperts, PackedExpertWeights
from specengine.kernels.experts.tiles import Tiles, are_few
from specengine.kernels.experts.types import Chosen, Router, Routing
from specengine.kernels.linear.mxfp4 import Mxfp4Weight
from specengine.kernels.linear.norm import fused_add_rms_norm, rms_norm, sum_add_rms_norm

CUDA = "cuda"
FORMAT = load_place(EXPERT_FORMATS["mxfp4"])
LAYERS = {"gpt-oss-20b": 4, "gpt-oss-120b": 2}  # whose weights take turns
AnyTiles = Tiles | mxfp4_cuda.AnyTile
CALLS, EPS = 24, 1e-5  # of a chain


@dataclass(frozen=True)
class Variant:
    name: str
    tiles: AnyTiles


def multiplied(
    x: torch.Tensor, chosen: Chosen, weights: PackedExpertWeights, tiles: AnyTiles | None
) -> torch.Tensor:
    """tiles: None takes those of CUDA C++ that are in force."""
    if isinstance(tiles, Tiles):
        return experts_triton.experts(x, chosen, weights, tiles)
    return mxfp4_cuda.experts(x, chosen, weights, tiles)


def draw(rows: int, columns: int, seed: int) -> Mxfp4Weight:
    """Of scales that differ."""
    made = mxfp4(rows, columns, seed)
    generator = torch.Generator(CUDA).manual_seed(seed)
    more = torch.randint(-2, 2, made.scale.shape, device=CUDA, generator=generator)
    return replace(made, scale=(made.scale + more).to(torch.uint8))


@dataclass
class Layer:
    router: Router
    weights: PackedExpertWeights

    @classmethod
    def of(cls, shape: Shape, seed: int) -> Layer:
        generator = torch.Generator(CUDA).manual_seed(seed)
        seeds = count(1000 * seed)

        def normal(*size: int, scale: float) -> torch.Tensor:
            out = torch.empty(size, device=CUDA, dtype=torch.bfloat16)
            return out.normal_(0.0, scale, generator=generator)

        def stack(rows: int, columns: int) -> PackedExperts:
            each = (draw(rows, columns, next(seeds)) for _ in range(shape.count))
            made = PackedExperts.of(FORMAT, shape.count, each)
            assert made is not None
            return made

        weights = PackedExpertWeights(
            stack(2 * shape.inner, shape.hidden),
            stack(shape.hidden, shape.inner),
            normal(shape.count, 2 * shape.inner, scale=0.1),
            normal(shape.count, shape.hidden, scale=0.1),
            shape.activation,
        )
        return cls(Router(normal(shape.count, shape.hidden, scale=shape.hidden**-0.5)), weights)


def some(chosen: Chosen, rows: Any) -> Chosen:
    return Chosen(chosen.ids_TK[rows].contiguous(), chosen.weights_TK[rows].contiguous())


class Chain:
    """What layers have from their second norm on: norm, router, both products, and the norm that
    adds up their parts, each time of other rows."""

    def __init__(self, shape: Shape, layers: list[Layer], rows: int) -> None:
        generator = torch.Generator(CUDA).manual_seed(rows)
        size = (CALLS, rows, shape.hidden)
        streams = torch.randn(size, device=CUDA, generator=generator).bfloat16()
        self.of = [(x, layers[i % len(layers)]) for i, x in enumerate(streams)]
        self.routing = Routing(shape.chosen)
        self.gain = torch.ones(shape.hidden, device=CUDA, dtype=torch.bfloat16)
        self.nothing = torch.zeros(shape.chosen, *size[1:], device=CUDA)

    def routed(self, stream: torch.Tensor, layer: Layer) -> tuple[torch.Tensor, Chosen]:
        x = rms_norm(stream, self.gain, EPS)
        return x, route_triton.route(x, layer.router, self.routing)

    def run(self, stream: torch.Tensor, layer: Layer, tiles: AnyTiles | None) -> None:
        x, chosen = self.routed(stream, layer)
        out = self.nothing if tiles is None else multiplied(x, chosen, layer.weights, tiles)
        add = sum_add_rms_norm if out.dim() == 3 else fused_add_rms_norm
        add(out, stream, self.gain, EPS)

    def us(self, tiles: AnyTiles | None) -> float:
        """Of a call; tiles: None leaves out the products."""
        return graph_us([partial(self.run, *one, tiles) for one in self.of])

    def picked(self) -> list[Chosen]:
        return [self.routed(*one)[1] for one in self.of]


@dataclass
class Bench:
    name: str
    layers: list[Layer]

    @property
    def shape(self) -> Shape:
        return SHAPES[self.name]

    def picked(self, rows: int) -> list[Chosen]:
        x, routing = rows_of(self.shape, rows), Routing(self.shape.chosen)
        return [route_triton.route(x, layer.router, routing) for layer in self.layers]

    def expected(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Which rows are looked at, and what the reference gives of them."""
        x, chosen, weights = rows_of(self.shape, rows), self.picked(rows)[0], self.layers[0].weights
        few = torch.linspace(0, rows - 1, min(rows, 3), device=CUDA).long()
        return few, experts(x[few], some(chosen, few), weights, backend="torch").double()

    def error(
        self, rows: int, tiles: AnyTiles, few: torch.Tensor, expected: torch.Tensor
    ) -> tuple[float, bool | None]:
        """Of some rows, and whether each of them alone has the same bits, by what is chosen for one
        row, or by Triton's tiles."""
        x, chosen, weights = rows_of(self.shape, rows), self.picked(rows)[0], self.layers[0].weights
        out = multiplied(x, chosen, weights, tiles)
        error = (summed(out)[few].double() - expected).norm() / expected.norm()
        same = None
        if not isinstance(tiles, Tiles) or are_few(*chosen.ids_TK.shape):
            of_one = tiles if isinstance(tiles, Tiles) else None
            alone = [multiplied(x[i, None], some(chosen, i[None]), weights, of_one) for i in few]
            same = all(torch.equal(a[:, 0], out[:, i]) for a, i in zip(alone, few, strict=True))
        return float(error), same

    def us(self, rows: int, tiles: AnyTiles) -> float:
        x = rows_of(self.shape, rows)
        pairs = zip(self.picked(rows), self.layers, strict=True)
        return graph_us(
            [
                lambda c=c, w=one.weights: multiplied(x, c, w, tiles)  # type: ignore[misc]
                for c, one in pairs
            ]
        )

    def read_bytes(self, picked: list[Chosen]) -> float:
        weights = self.layers[0].weights
        size = (weights.gate_up.num_bytes + weights.down.num_bytes) / self.shape.count
        return size * sum(len(one.ids_TK.unique()) for one in picked) / len(picked)

    def table(
        self,
        made: Callable[[int, int], list[Variant]],
        all_rows: Sequence[int],
        in_chain: bool = False,
    ) -> list[dict[str, Any]]:
        """in_chain: what the products add to a chain is timed, in place of them alone."""
        found = []
        for rows in all_rows:
            chain = Chain(self.shape, self.layers, rows) if in_chain else None
            moved = self.read_bytes(chain.picked() if chain else self.picked(rows))
            rest, expected = chain.us(None) if chain else 0.0, self.expected(rows)
            for one in made(rows, self.shape.chosen):
                try:
                    error, same = self.error(rows, one.tiles, *expected)
                    us = chain.us(one.tiles) - rest if chain else self.us(rows, one.tiles)
                except Exception as problem:  # out of shared memory
                    print(rows, one.name, type(problem).__name__, str(problem)[:80], flush=True)
                    continue
                row = {"shape": self.name, "rows": rows, "variant": one.name, "us": us}
                found.append(row | {"TB/s": moved / us / 1e6, "error": error, "bits": same})
                print(
                    f"{self.name} {rows:5d} {us:7.1f} us {moved / us / 1e6:5.2f} TB/s "
                    f"error {error:.2g} bits {same} {one.name}",
                    flush=True,
                )
        return found
