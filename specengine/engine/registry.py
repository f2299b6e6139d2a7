"""Drafters and verifiers by name. A new one is one file and one line here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from specengine.core.config import SpecConfig
from specengine.core.drafter import Drafter
from specengine.core.errors import ConfigError
from specengine.core.registry import VERIFIERS, load_place
from specengine.core.request import Req
from specengine.draft.eagle.load import load_eagle, load_eagle3
from specengine.draft.eagle.worker import Eagle3Worker, EagleWorker
from specengine.draft.empty import EmptyDrafter
from specengine.draft.hybrid import HybridDrafter
from specengine.draft.loaded import DraftTarget, LoadedDraft
from specengine.draft.mtp.load import load_mtp
from specengine.draft.mtp.worker import make_mtp_worker
from specengine.draft.names import ALIASES, algorithm_name
from specengine.draft.ngram.drafter import NgramDrafter
from specengine.draft.standalone.load import load_standalone
from specengine.draft.standalone.worker import StandaloneWorker
from specengine.draft.suffix.drafter import SuffixDrafter
from specengine.runner.model_runner import ModelRunner
from specengine.target.verify.base import TreeVerifier
from specengine.target.verify.simulated import SimulatedVerifier

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DraftContext:
    """What a drafter may be built from."""

    spec: SpecConfig
    node_limit: Callable[[Req], int]  # most nodes a request can use now, root included
    runners: Sequence[ModelRunner] = ()  # of the draft model, where there is one
    num_rows: int = 0  # rows of the page table, row 0 included
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))  # of the target


DRAFTERS: dict[str, Callable[[DraftContext], Drafter]] = {
    "NGRAM": lambda context: NgramDrafter(context.spec, context.node_limit),
    "SUFFIX": lambda context: SuffixDrafter(context.spec, context.node_limit),
    "STANDALONE": lambda context: StandaloneWorker(
        context.runners, context.spec, context.node_limit, context.num_rows
    ),
    "EAGLE": lambda context: EagleWorker(
        context.runners, context.spec, context.node_limit, context.num_rows
    ),
    "EAGLE3": lambda context: Eagle3Worker(
        context.runners, context.spec, context.node_limit, context.num_rows
    ),
    "MTP": lambda context: make_mtp_worker(
        context.runners, context.spec, context.node_limit, context.num_rows
    ),
}

# How algorithms that draft with a model come to it.
DRAFT_LOADERS: dict[str, Callable[[DraftTarget], LoadedDraft]] = {
    "STANDALONE": load_standalone,
    "EAGLE": load_eagle,
    "EAGLE3": load_eagle3,
    "MTP": load_mtp,
}


def make_registered(name: str, spec: SpecConfig) -> TreeVerifier:
    """The acceptance rule of a name in VERIFIERS."""
    verifier: TreeVerifier = load_place(VERIFIERS[name]).from_spec(spec)
    return verifier


def registered_verifiers() -> dict[str, TreeVerifier]:
    """Each by its name, made of the defaults."""
    return {name: make_registered(name, SpecConfig()) for name in VERIFIERS}


def max_nodes(spec: SpecConfig) -> int:
    """The most nodes of a proposal, root included."""
    return 1 if spec.algorithm is None else spec.max_nodes


def make_drafter(context: DraftContext) -> Drafter:
    """Raises ConfigError for an unknown algorithm, or one that --speculative-hybrid-suffix cannot
    stand beside."""
    drafter = _make_algorithm(context)
    if not context.spec.hybrid_suffix:
        return drafter
    if isinstance(drafter, EmptyDrafter | SuffixDrafter):
        raise ConfigError(
            "--speculative-hybrid-suffix stands beside another drafter; for suffix matches alone "
            "use --speculative-algorithm SUFFIX without it"
        )
    min_match = context.spec.hybrid_suffix_min_match
    return HybridDrafter(drafter, SuffixDrafter(context.spec, context.node_limit, min_match))


def _make_algorithm(context: DraftContext) -> Drafter:
    name = context.spec.algorithm
    return EmptyDrafter() if name is None else DRAFTERS[check_algorithm(name)](context)


def check_algorithm(name: str) -> str:
    """The name as the tables here have it. Raises ConfigError where it is not known."""
    found = algorithm_name(name)
    if found not in DRAFTERS:
        known = ", ".join([*DRAFTERS, *ALIASES])
        raise ConfigError(f"--speculative-algorithm {name} is not known; known are {known}")
    return found


def make_verifier(spec: SpecConfig, drafter: Drafter) -> TreeVerifier:
    """Raises ConfigError where the verifier asked for cannot judge what the drafter proposes; says
    so where it is lossy."""
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
    return _auto_verifier(drafter) if spec.verify == "auto" else spec.verify


def _auto_verifier(drafter: Drafter) -> str:
    if not drafter.emits_probs:
        return "match"
    return "sibling" if drafter.proposes_tree else "block"
