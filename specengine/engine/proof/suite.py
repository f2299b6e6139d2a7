"""Everything that `specengine verify` proves, in sections that can be run apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from specengine.core.config import EngineConfig
from specengine.core.errors import ConfigError
from specengine.engine.factories import make_registered
from specengine.engine.proof import rules
from specengine.engine.proof.check import CHI_SQUARED, Check, combined_p
from specengine.engine.proof.engine_mutants import AROUND_RULES, EngineMutant, of_drafts, of_rules
from specengine.engine.proof.matrix import SETTINGS, Effort, EngineProof
from specengine.engine.proof.runs import MIN_P
from specengine.engine.proof.subjects import (
    CHUNKED,
    FRESH,
    PREFIX_HIT,
    RETRACTED,
    State,
    Subject,
)

ALL_STATES = tuple(
    State(kind, size) for kind in (FRESH, PREFIX_HIT, CHUNKED, RETRACTED) for size in (1, 16)
)


@dataclass(frozen=True)
class Plan:
    """How much is tried."""

    name: str
    rules: rules.Effort
    engine: Effort
    states: tuple[State, ...]
    settings: tuple[str, ...]  # tried on fresh requests; all states see all parameters at once
    mutant_states: tuple[State, ...]  # for mutants of rules; those of the engine see all states


QUICK = Plan(
    name="quick",
    rules=rules.QUICK,
    engine=Effort(num_requests=150, mutant_requests=40000, draft_requests=2000, greedy_tokens=16),
    states=(State(PREFIX_HIT, 16), State(RETRACTED)),
    settings=(),
    mutant_states=(State(FRESH),),
)
FULL = Plan(
    name="full",
    rules=rules.FULL,
    engine=Effort(num_requests=400, mutant_requests=40000, draft_requests=6000, greedy_tokens=24),
    states=ALL_STATES,
    settings=tuple(SETTINGS),
    mutant_states=(State(FRESH), State(RETRACTED, 16)),
)


@dataclass(frozen=True)
class Section:
    """A part of the proof, made when it is run."""

    name: str
    run: Callable[[], Iterator[Check]]


def sections(config: EngineConfig, subjects: list[Subject], plan: Plan) -> Iterator[Section]:
    """Sections of the verifier that the configuration names, or of all. Raises ConfigError or
    ModelLoadError."""
    asked = config.spec.verify
    if asked != "auto" and make_registered(asked, config.spec).is_lossy:
        raise ConfigError(f"--speculative-verify {asked} is lossy: there is nothing to prove")
    yield Section("rules", partial(rules.rule_checks, plan.rules))
    proof = EngineProof(config, plan.engine)
    for subject in subjects:
        for state in plan.states:
            yield Section(f"{subject.name}; {state}", partial(proof.in_state, subject, state))
        yield Section(f"{subject.name}; drafts", partial(proof.of_drafts, subject))
        if plan.settings:
            run = partial(proof.with_settings, subject, plan.settings)
            yield Section(f"{subject.name}; settings", run)
    for mutant in (*of_rules(), *of_drafts()):
        yield _mutant_section(proof, mutant, plan.mutant_states)
    for mutant in AROUND_RULES:
        yield _mutant_section(proof, mutant, plan.states)


def together(checks: Iterable[Check]) -> Iterator[Check]:
    """What single histograms are too small to show: of each verifier, all of them as one."""
    found: dict[str, list[float]] = {}
    for check in checks:
        if check.check == CHI_SQUARED:
            verifier = check.subject.partition("; ")[0].rpartition(", ")[2]
            found.setdefault(verifier, []).append(check.statistic)
    for verifier, p_values in found.items():
        note = f"{len(p_values)} histograms"
        yield Check("χ² of all histograms", verifier, combined_p(p_values), ">=", MIN_P, note)


def _mutant_section(proof: EngineProof, mutant: EngineMutant, states: tuple[State, ...]) -> Section:
    name = f"mutant: {mutant.subject.name}, {mutant.name}"
    return Section(name, lambda: (proof.catches(mutant, state) for state in states))
