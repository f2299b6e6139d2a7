"""Which rounds on the device an engine has: how deep they draft, and a key for each. Rounds are
made by these functions, and counted by them before there is a drafter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from specengine.engine.round.key import RoundKey
from specengine.engine.round.sampling import SamplingFeatures

_SHALLOW = (0, 1, 2, 3)  # depths to choose from beside the deepest
_BETWEEN = 3  # depth of drafts from lookup, beside the deepest and none

Variants = list[tuple[int, int | None]]  # num_steps and model_steps of keys


def model_steps(deepest: int, chooses: bool) -> list[int]:
    """Depths of a model's drafts, ascending. deepest: that it drafts. chooses: whether depths are
    chosen round by round, no drafts among them."""
    return [*(depth for depth in _SHALLOW if chooses and depth < deepest), deepest]


def hybrid_steps(model: int, lookup: int, chooses: bool) -> list[int]:
    """Depths where lookup is used together with a model, ascending. model, lookup: how deep each
    drafts at most. chooses: whether depths are chosen round by round, no drafts among them."""
    return sorted({*model_steps(model, chooses), lookup})


def hybrid_variants(steps: Sequence[int], model: int) -> Variants:
    """Of keys beside (depth, None) for each of the steps: for rounds in which lookup has drafted.
    Deeper than the model drafts, which is `model` levels, drafts come from lookup in any case."""
    some = [(depth, depth) for depth in steps if 0 < depth <= model]
    return [*some, *((depth, 0) for depth in steps if depth >= model)]


def lookup_steps(max_nodes: int, nodes_of: Callable[[int], int]) -> list[int]:
    """Depths of lookup alone: no drafts, the deepest, and a depth between where it costs less than
    the deepest. max_nodes: of a draft, root included. nodes_of(depth): of one so deep."""
    between = [_BETWEEN] if nodes_of(_BETWEEN) < max_nodes else []
    return [0, *between, max_nodes - 1]


def round_keys(
    batch_size: int,
    features: SamplingFeatures,
    steps: Sequence[int],
    tree_sizes: Mapping[int, Sequence[int]],
    may_pause: bool,
    variants: Variants,
) -> list[RoundKey]:
    """Keys of all rounds of one batch size. tree_sizes: nodes to cut trees to, root included, by
    num_steps. may_pause: there are also plain rounds that the drafter does not observe."""
    keys = [
        RoundKey(batch_size, depth, features, num_nodes=size)
        for depth, sizes in tree_sizes.items()
        for size in sizes
    ]
    keys += [RoundKey(batch_size, depth, features) for depth in steps]
    if may_pause:
        keys.append(RoundKey(batch_size, 0, features, paused=True))
    return keys + [RoundKey(batch_size, n, features, model_steps=m) for n, m in variants]
