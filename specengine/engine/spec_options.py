"""Resolves the shape of drafts from what was given of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from specengine.core.config import DRAFT_MODEL, SpecConfig
from specengine.core.drafter import Drafter
from specengine.core.errors import ConfigError
from specengine.core.options import Option
from specengine.core.registry import DRAFTERS, VERIFIERS
from specengine.engine.factories import (
    check_algorithm,
    drafter_class,
    drafters_with_models,
    max_nodes,
)

_DEFAULT_STEPS = 3
_DEFAULT_TREE_NODES = 8


def resolve_spec(spec: SpecConfig) -> SpecConfig:
    """Fill in the shape of drafts. Raises ConfigError where options contradict each other, or mean
    nothing to the algorithm."""
    if spec.algorithm is None:
        _refuse_all_options(spec)
        return spec
    algorithm = check_algorithm(spec.algorithm)
    _refuse_idle_options(spec, algorithm)
    if algorithm not in drafters_with_models():
        _refuse_model_options(spec)
        return replace(spec, num_draft_tokens=spec.max_nodes)
    _refuse_token_map(spec, algorithm)
    if spec.eagle_topk > 1 and not drafter_class(algorithm).drafts_trees:
        raise ConfigError(
            f"--speculative-eagle-topk {spec.eagle_topk}: {algorithm} drafts chains; leave it out"
        )
    return _chain(spec) if spec.eagle_topk == 1 else _tree(spec)


def _refuse_idle_options(spec: SpecConfig, algorithm: str) -> None:
    """Those of which no owner was asked for."""
    for option in _given(spec):
        owners = [one for one in option.owners if one != DRAFT_MODEL]
        if owners and not any(_is_used(spec, algorithm, one) for one in owners):
            raise ConfigError(
                f"{option.flag} does nothing without {_remedy(owners[0])}; leave it out, or add "
                "that"
            )


def _is_used(spec: SpecConfig, algorithm: str, owner: str) -> bool:
    if owner in DRAFTERS:
        return owner == algorithm
    return spec.verify == owner if owner in VERIFIERS else bool(getattr(spec, owner))


def _remedy(owner: str) -> str:
    """What asks for an owner of options."""
    if owner in DRAFTERS:
        return f"--speculative-algorithm {owner}"
    if owner in VERIFIERS:
        return f"--speculative-verify {owner}"
    return SpecConfig.options()[owner].flag


def _refuse_all_options(spec: SpecConfig) -> None:
    for option in _given(spec):
        if option.name != "adaptive":  # where nothing is drafted, nothing adapts
            raise ConfigError(
                f"{option.flag} does nothing without --speculative-algorithm; leave it out, or add "
                f"that, with one of {', '.join(DRAFTERS)}"
            )


def _refuse_model_options(spec: SpecConfig) -> None:
    for option in _given(spec):
        if DRAFT_MODEL in option.owners:
            raise ConfigError(
                f"{option.flag} is for algorithms that draft with a model "
                f"({', '.join(drafters_with_models())}); leave it out with {spec.algorithm}"
            )


def _given(spec: SpecConfig) -> Iterator[Option]:
    """Each option that differs from its default."""
    plain = SpecConfig()
    for field, option in SpecConfig.options().items():
        if getattr(spec, field) != getattr(plain, field):
            yield option


def _refuse_token_map(spec: SpecConfig, algorithm: str) -> None:
    takers = [name for name in drafters_with_models() if drafter_class(name).takes_token_map]
    if spec.token_map is not None and algorithm not in takers:
        raise ConfigError(
            f"--speculative-token-map is for {', '.join(takers)}, whose drafts may say a part of "
            f"the vocabulary; leave it out with {spec.algorithm}"
        )


def _chain(spec: SpecConfig) -> SpecConfig:
    nodes, steps = spec.num_draft_tokens, spec.num_steps
    if steps is None:
        steps = _DEFAULT_STEPS if nodes is None or spec.hybrid_suffix else nodes - 1
    nodes = steps + 1 if nodes is None else nodes
    # A suffix match beside the model may be longer than what the model drafts.
    if nodes < steps + 1 or (nodes > steps + 1 and not spec.hybrid_suffix):
        raise ConfigError(
            f"--speculative-num-draft-tokens {nodes}: a chain of --speculative-num-steps {steps} "
            f"has {steps + 1} nodes; leave one of the two out, or draft a tree with "
            "--speculative-eagle-topk"
        )
    if spec.static_tree:
        raise ConfigError("--speculative-static-tree needs --speculative-eagle-topk above 1")
    return replace(spec, num_steps=steps, num_draft_tokens=nodes)


def _tree(spec: SpecConfig) -> SpecConfig:
    steps = _DEFAULT_STEPS if spec.num_steps is None else spec.num_steps
    most = 1 + spec.eagle_topk + (steps - 1) * spec.eagle_topk**2
    nodes = spec.num_draft_tokens
    if nodes is None:
        nodes = min(_DEFAULT_TREE_NODES, most)
    if nodes > most and not spec.hybrid_suffix:
        raise ConfigError(
            f"--speculative-num-draft-tokens {nodes}: --speculative-num-steps {steps} and "
            f"--speculative-eagle-topk {spec.eagle_topk} give trees of at most {most} nodes"
        )
    return replace(spec, num_steps=steps, num_draft_tokens=nodes)


def draft_slots(spec: SpecConfig) -> int:
    """KV slots that the levels of a tree take up beyond the root's; a chain stays within those of
    its nodes."""
    if spec.num_steps is None or spec.eagle_topk == 1:
        return 0
    return 1 + (spec.num_steps - 1) * spec.eagle_topk


def check_sizes(spec: SpecConfig, drafter: Drafter) -> None:
    """spec: resolved. Raises ConfigError where a draft may be larger than what is reserved for each
    round: every batch would run on the host, for want of slots."""
    name, nodes = type(drafter).__name__, max_nodes(spec)
    if drafter.max_nodes > nodes:
        raise ConfigError(
            f"{name} proposes up to {drafter.max_nodes} nodes and rounds have {nodes}; raise "
            "--speculative-num-draft-tokens, or let its max_nodes be at most that of the context"
        )
    slots = max(nodes, draft_slots(spec))
    if drafter.draft_slots > slots:
        raise ConfigError(
            f"{name} drafts in {drafter.draft_slots} KV slots and {slots} are reserved for a round;"
            " raise --speculative-num-draft-tokens, or lower its draft_slots"
        )
