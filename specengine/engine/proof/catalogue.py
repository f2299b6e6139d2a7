"""Every way to draft that can be proved here and now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from specengine.core.config import SpecConfig
from specengine.core.draft_context import DraftContext
from specengine.core.registry import DRAFTERS
from specengine.engine.factories import drafter_class, drafters_with_models, make_drafter
from specengine.engine.proof.shapes import CHAIN, TREE
from specengine.engine.proof.subjects import Subject
from specengine.engine.proof.tiny_model import TinyModels

_NODES = 6
_CHAIN: dict[str, Any] = {"num_steps": 3}
_TREE: dict[str, Any] = {"num_steps": 3, "eagle_topk": 2, "num_draft_tokens": _NODES}
_SHAPES: dict[str, dict[str, Any]] = {
    "chain": _CHAIN,
    "sampled chain": _CHAIN | {"draft_sampling": True},
    "tree": _TREE,
    "sampled tree": _TREE | {"draft_sampling": True},
}
_STATIC_TREE: dict[str, Any] = _TREE | {"static_tree": True}
# Longer than what a model drafts, so that it shows whose drafts were taken.
_SUFFIX: dict[str, Any] = {
    "hybrid_suffix": True,
    "hybrid_suffix_min_match": 3,
    "num_draft_tokens": _NODES,
}


def without_models() -> list[Subject]:
    """Registered drafters that need no checkpoint, in each shape that they declare, and beside
    suffix matches where they may be; sampled drafts of no algorithm."""
    return [
        *_without_models(),
        Subject("sampled chain", SpecConfig(), CHAIN),
        Subject("sampled tree", SpecConfig(), TREE),
    ]


def _without_models() -> Iterator[Subject]:
    for algorithm in sorted(DRAFTERS.keys() - drafters_with_models()):
        for options in drafter_class(algorithm).proof_options:
            spec = SpecConfig(algorithm=algorithm, num_draft_tokens=_NODES, **options)
            rows, cpu = 2, torch.device("cpu")
            drafter = make_drafter(DraftContext(spec, lambda req: _NODES, (), rows, cpu))
            shape = "tree" if drafter.proposes_tree else "chain"
            one = Subject(f"{algorithm} {'sampled ' * drafter.emits_probs}{shape}", spec)
            yield one
            if drafter.can_be_hybrid:
                yield from _beside([one])
            if drafter.proposes_tree:
                yield replace(one, name=f"{one.name}, any depth", any_depth=True)


def with_models(models: TinyModels) -> list[Subject]:
    """Those that draft with a model, alone and beside suffix matches."""
    paths = {name: models.draft_of(name) for name in drafters_with_models()}
    drafts = {name: path for name, path in paths.items() if path is not None}
    chains = {name: shape for name, shape in _SHAPES.items() if "chain" in name}
    layers = "MTP, a layer a step:"
    return [
        *(one for name, path in drafts.items() for one in _of(name, name, path, _SHAPES)),
        *_of("STANDALONE", "STANDALONE", models.standalone, {"static tree": _STATIC_TREE}),
        *_of(layers, "MTP", models.mtp_layers, chains),
        *_beside(_of("STANDALONE", "STANDALONE", models.standalone, _SHAPES)),
        *_beside(_of("EAGLE3", "EAGLE3", models.eagle3, {"tree": _TREE})),
        *_beside(_of(layers, "MTP", models.mtp_layers, {"chain": _CHAIN})),
        *(
            replace(one, name=f"{one.name}, any depth", any_depth=True)
            for name, path in drafts.items()
            for one in _of(name, name, path, {"chain": _CHAIN})
        ),
    ]


def _of(
    name: str, algorithm: str, path: Path, shapes: dict[str, dict[str, Any]]
) -> Iterator[Subject]:
    for shape, options in shapes.items():
        if "eagle_topk" in options and not drafter_class(algorithm).drafts_trees:
            continue
        spec = SpecConfig(algorithm=algorithm, draft_model_path=str(path), **options)
        yield Subject(f"{name} {shape}", spec)


def _beside(subjects: Iterable[Subject]) -> Iterator[Subject]:
    """The same, where long suffix matches take the place of their drafts."""
    for one in subjects:
        yield Subject(f"{one.name} + suffix", replace(one.spec, **_SUFFIX))
