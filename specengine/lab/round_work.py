"""What a round cannot do without: bytes read and operations, part by part, and so the least time
that a device takes for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from specengine.draft.eagle.model import Eagle3Model
from specengine.draft.tree import tree_sizes
from specengine.engine.loop import Engine
from specengine.kernels.experts.packed import OneExpert
from specengine.lab.card import Card
from specengine.layers.linear import Linear, LinearKernel, LMHead
from specengine.layers.linear_cpu import MklLinear
from specengine.layers.quantization.linears import QuantisedLinear
from specengine.layers.sparse_mlp import SparseMLP

FORMULA = (
    "The card's limit is the time to read once what a round reads at least, at the speed of a "
    "plain copy, or to multiply it at the speed of a large matrix product, whichever is longer, "
    "part by part: verification reads the target's weights (not its embedding table) and the KV of "
    "every request; of K draft steps, levels of a tree, each reads the draft's head, all but the "
    "first its layers and their KV, which observing the accepted tokens reads once more. "
    "Activations, launches and the prefill are left out; what stays in a cache may pass the limit."
)


@dataclass(frozen=True)
class Work:
    bytes: float = 0.0
    operations: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.operations + other.operations)

    def times(self, count: float) -> Work:
        return Work(self.bytes * count, self.operations * count)


@dataclass(frozen=True)
class Weights:
    """A model's weights, in bytes and elements: what each forward reads; what fuses the target's
    features, once a round; the head."""

    body: tuple[float, float]
    fuse: tuple[float, float]
    head: tuple[float, float]
    experts: tuple[ExpertLayer, ...] = ()

    def body_work(self, rows: float) -> Work:
        """The work of a forward."""
        routed = (one.work(rows) for one in self.experts)
        return sum(routed, _multiply(self.body, rows))


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of a layer; bytes and elements are one expert's."""

    count: int
    chosen: int
    bytes: float
    elements: float

    def work(self, rows: float) -> Work:
        """Reads those that some row chose, each once: as many as rows choose on average that choose
        evenly and independently."""
        read = self.count * (1 - (1 - self.chosen / self.count) ** rows)
        return Work(read * self.bytes, 2 * self.elements * self.chosen * rows)


@dataclass(frozen=True)
class Drafts:
    """The drafts of each request in a round, possibly means."""

    nodes: float  # but the root
    levels: float  # of steps that found them
    width: int  # rows of each step but the first

    @classmethod
    def of(cls, engine: Engine, nodes: float) -> Drafts:
        """The drafts of a tree cut to fewer nodes: the deepest that has so many; between two sizes,
        for rounds of both, in proportion."""
        drafter: Any = engine.drafter
        if not getattr(drafter, "proposes_tree", False):
            return cls(nodes, nodes, 1)
        levels = range(drafter.num_steps + 1)
        sizes = [min(size, drafter.max_nodes) - 1 for size in tree_sizes([*levels], drafter.topk)]
        deepest = dict(zip(sizes, levels, strict=True))  # the last of equals stays
        found = float(np.interp(nodes, [*deepest], [*deepest.values()]))
        return cls(nodes, found, drafter.topk)


def round_work(engine: Engine, batch_size: int, nodes: float, context: float) -> dict[str, Work]:
    """Of the parts of a round. nodes: drafted tokens of each request, possibly a mean; context:
    tokens of each whose KV is kept."""
    target = engine.parts.worker.runner
    weights, rows = weights_of(target.model), batch_size * (nodes + 1)
    parts = {
        "verify": weights.body_work(rows) + _kv(target, batch_size * context),
        "verify head": _multiply(weights.head, rows),
    }
    draft = getattr(engine.drafter, "runner", None)
    if draft is None or nodes <= 0:
        return parts
    own, drafts = weights_of(draft.model), Drafts.of(engine, nodes)
    later, beams = max(drafts.levels - 1, 0.0), batch_size * drafts.width
    kv, observed = _kv(draft, batch_size * context), batch_size * (drafts.levels + 1)
    roots = _multiply(own.head, batch_size).times(min(drafts.levels, 1.0))
    return {
        "draft": (own.body_work(beams) + kv).times(later),
        "draft head": roots + _multiply(own.head, beams).times(later),
        **parts,
        "observe": own.body_work(observed) + _multiply(own.fuse, observed) + kv,
    }


def least_seconds(parts: dict[str, Work], card: Card) -> float:
    return sum(card.seconds(work.bytes, work.operations) for work in parts.values())


def weights_of(model: Any) -> Weights:
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    once = model.fc if isinstance(model, Eagle3Model) else None
    heads = [one for one in linears if isinstance(one, LMHead)]
    body = [one for one in linears if one is not once and not isinstance(one, LMHead)]
    experts = tuple(_experts(one) for one in model.modules() if isinstance(one, SparseMLP))
    return Weights(_sizes(body), _sizes([] if once is None else [once]), _sizes(heads), experts)


def _experts(layer: SparseMLP) -> ExpertLayer:
    spec, each = layer.spec, layer.experts.weights_each
    return ExpertLayer(spec.num_experts, spec.num_chosen, *_sizes(each))


def _sizes(products: Sequence[Linear | Tensor | LinearKernel | OneExpert]) -> tuple[float, float]:
    found = [_size(one) for one in products]
    return float(sum(size for size, _ in found)), float(sum(count for _, count in found))


def _size(product: Linear | Tensor | LinearKernel | OneExpert) -> tuple[int, int]:
    """Bytes and elements of the weight."""
    if isinstance(product, OneExpert):
        return product.num_bytes, product.shape[0] * product.shape[1]
    if isinstance(product, Linear) and isinstance(product.kernel, QuantisedLinear):
        return product.kernel.num_bytes, product.kernel.num_elements
    weight = product if isinstance(product, Tensor) else _largest(product)
    return weight.numel() * weight.element_size(), weight.numel()


def _largest(linear: Linear | LinearKernel) -> Tensor:
    """The weight; of a packed one, the largest of the tensors that stand for it. MKL's own layout
    has room for more than it reads."""
    if isinstance(linear, Linear) and linear.weight is not None:
        return linear.weight
    kernel: Any = linear.kernel if isinstance(linear, Linear) else linear
    if isinstance(kernel, MklLinear):
        return kernel.shape_only
    tensors = [one for one in vars(kernel).values() if isinstance(one, Tensor)]
    return max(tensors, key=lambda one: one.numel() * one.element_size())


def _multiply(weights: tuple[float, float], rows: float) -> Work:
    num_bytes, elements = weights
    return Work(num_bytes, 2 * elements * rows)


def _kv(runner: Any, tokens: float) -> Work:
    return Work(runner.pools.token_to_kv_pool.shape.bytes_per_token * tokens)
