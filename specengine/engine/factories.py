"""Makes drafters and acceptance rules by name: those of core/registry.py."""

from __future__ import annotations

import logging
from itertools import product

from specengine.core.config import SpecConfig
from specengine.core.draft_context import DraftContext
from specengine.core.drafter import Drafter
from specengine.core.errors import ConfigError
from specengine.core.registry import DRAFTERS, VERIFIERS, load_place
from specengine.draft.empty import EmptyDrafter
from specengine.draft.hybrid import HybridDrafter
from specengine.draft.names import ALIASES, algorithm_name
from specengine.draft.suffix.drafter import SuffixDrafter
from specengine.target.verify.base import TreeVerifier
from specengine.target.verify.simulated import SimulatedVerifier

logger = logging.getLogger(__name__)


def drafter_class(name: str) -> type[Drafter]:
    """Raises ConfigError where it is not known."""
    found: type[Drafter] = load_place(DRAFTERS[check_algorithm(name)])
    return found


def drafters_with_models() -> list[str]:
    return [name for name in DRAFTERS if drafter_class(name).load_draft is not None]


def verifier_class(name: str) -> type[TreeVerifier]:
    """The acceptance rule of a name in VERIFIERS."""
    found: type[TreeVerifier] = load_place(VERIFIERS[name])
    return found


def make_registered(name: str, spec: SpecConfig) -> TreeVerifier:
    return verifier_class(name).from_spec(spec)


def registered_verifiers() -> dict[str, TreeVerifier]:
    """Each by its name, made of the defaults."""
    return {name: make_registered(name, SpecConfig()) for name in VERIFIERS}


def has_two_sources(spec: SpecConfig) -> bool:
    """Whether lookup is used together with a drafter of another kind, as its `lookup`. Two
    lookup drafters are one source."""
    if spec.algorithm is None or not spec.hybrid_suffix:
        return False
    return drafter_class(spec.algorithm).drafts_on != "lookup"


def max_nodes(spec: SpecConfig) -> int:
    """The most nodes of a proposal, root included."""
    return 1 if spec.algorithm is None else spec.max_nodes


def make_drafter(context: DraftContext) -> Drafter:
    """Raises ConfigError for an unknown algorithm, or one that --speculative-hybrid-suffix cannot
    be used with."""
    name = context.spec.algorithm
    drafter = EmptyDrafter() if name is None else drafter_class(name).from_context(context)
    if not context.spec.hybrid_suffix:
        return drafter
    if not drafter.can_be_hybrid:
        raise ConfigError(
            "--speculative-hybrid-suffix goes with another drafter; for suffix matches alone "
            "use --speculative-algorithm SUFFIX without it"
        )
    min_match = context.spec.hybrid_suffix_min_match
    return HybridDrafter(drafter, SuffixDrafter(context.spec, context.node_limit, min_match))


def check_algorithm(name: str) -> str:
    """The name as core.registry.DRAFTERS has it. Raises ConfigError where it is not known."""
    found = algorithm_name(name)
    if found not in DRAFTERS:
        known = ", ".join([*DRAFTERS, *ALIASES])
        raise ConfigError(f"--speculative-algorithm {name} is not known; known are {known}")
    return found


def make_verifier(spec: SpecConfig, drafter: Drafter) -> TreeVerifier:
    """Raises ConfigError where the chosen verifier cannot verify what the drafter proposes; logs it
    where it is lossy."""
    if spec.simulate_accept_length is not None:
        logger.warning("--speculative-simulate-accept-length is lossy: text means nothing")
        return SimulatedVerifier(spec.simulate_accept_length)
    verifier = make_registered(verifier_name(spec, drafter), spec)
    flag = f"--speculative-verify {spec.verify}"
    if verifier.needs_draft_probs and not drafter.emits_probs:
        raise ConfigError(
            f"{flag} weighs the probabilities that drafts were sampled with, and these drafts are "
            "not sampled; use match, target_only or auto, or --speculative-draft-sampling where a "
            "model drafts"
        )
    if drafter.proposes_tree and not verifier.takes_trees:
        raise ConfigError(
            f"{flag} verifies chains, and the drafter proposes trees; use sibling or auto, or "
            "draft one branch"
        )
    if verifier.is_lossy:
        logger.warning("%s is lossy: outputs are not what the model alone says", flag)
    return verifier


def verifier_name(spec: SpecConfig, drafter: Drafter) -> str:
    """As --speculative-verify calls it."""
    if spec.verify != "auto":
        return spec.verify
    return _auto_name(drafter.emits_probs, drafter.proposes_tree)


def keeps_logits(spec: SpecConfig) -> bool:
    """Whether the acceptance rule does, or any that --speculative-verify auto may choose."""
    names = {spec.verify}
    if spec.verify == "auto":
        names = {_auto_name(*fields) for fields in product((False, True), repeat=2)}
    return any(verifier_class(name).keeps_logits for name in names)


def _auto_name(emits_probs: bool, proposes_tree: bool) -> str:
    """Of a drafter with these fields."""
    if not emits_probs:
        return "match"
    return "sibling" if proposes_tree else "block"
