"""Proofs of the acceptance rules, without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from specengine.engine.factories import registered_verifiers
from specengine.engine.proof.check import Check, Sense
from specengine.engine.proof.enumeration import (
    Drafts,
    NotEnumerable,
    Outcomes,
    joint_error,
    judged,
    matched,
    round_probs,
)
from specengine.engine.proof.mutants import MUTANTS, decides_by_judge
from specengine.engine.proof.shapes import CHAIN, CUT_CHAIN, FAN, LONG_CHAIN, TREE, Shape
from specengine.engine.proof.tables import TablePair, generate, joint_p
from specengine.target.verify.base import TreeVerifier
from specengine.target.verify.block import BlockVerifier
from specengine.target.verify.sampled import SampledVerifier

_LENGTH = 4  # tokens of the joint histograms


@dataclass(frozen=True)
class Effort:
    num_pairs: int  # random targets and drafters that are enumerated
    num_requests: int  # of each histogram
    most_for_mutants: int = 32  # times as many of both, before a mutant counts as missed

    def times(self, factor: int) -> Effort:
        return replace(
            self, num_pairs=factor * self.num_pairs, num_requests=factor * self.num_requests
        )


QUICK = Effort(num_pairs=2, num_requests=4000)
FULL = Effort(num_pairs=8, num_requests=20000)


@dataclass(frozen=True)
class Proof:
    """A number that distinguishes lossless rules from others, and how far apart they are."""

    check: str
    measure: Callable[[TreeVerifier, Shape, Effort], float]
    sense: Sense
    bound: float
    mutant_bound: float

    def holds(self, verifier: TreeVerifier, shape: Shape, subject: str, effort: Effort) -> Check:
        return Check(
            self.check, subject, self.measure(verifier, shape, effort), self.sense, self.bound
        )

    def catches(self, mutant: TreeVerifier, shape: Shape, subject: str, effort: Effort) -> Check:
        """With growing effort: a rule that accepts little shows little of what is wrong with it."""
        opposite: Sense = ">=" if self.sense == "<=" else "<="
        name, factor = f"{self.check} catches", 1
        while True:
            statistic = self.measure(mutant, shape, effort.times(factor))
            check = Check(name, subject, statistic, opposite, self.mutant_bound)
            if check.passed or 2 * factor > effort.most_for_mutants:
                return check if factor == 1 else replace(check, note=f"{factor} times the effort")
            factor *= 2


def enumeration_error(verifier: TreeVerifier, shape: Shape, effort: Effort) -> float:
    """The largest error of a joint probability, over random targets and drafters. Raises
    NotEnumerable."""
    errors = []
    for seed in range(effort.num_pairs):
        pair = TablePair.random(_vocab(shape), seed)
        errors += [joint_error(one, pair, shape) for one in _outcomes(verifier, pair, shape)]
    return max(errors)


def _outcomes(verifier: TreeVerifier, pair: TablePair, shape: Shape) -> Iterator[Outcomes]:
    certain = Drafts.certain(pair, shape)
    if decides_by_judge(verifier):
        yield judged(verifier, pair, shape, Drafts.sampled(pair, shape))
        yield judged(verifier, pair, shape, certain)
    elif isinstance(verifier, SampledVerifier):
        raise NotEnumerable("it does not decide by judge alone")
    else:
        yield matched(verifier, pair, shape, certain)


def impossible_tokens(verifier: TreeVerifier, shape: Shape, effort: Effort) -> float:
    """Drafted tokens that the target never says and that are accepted where every uniform is 0."""
    assert isinstance(verifier, SampledVerifier)
    count = 0
    for seed in range(effort.num_pairs):
        pair = TablePair.random(_vocab(shape), seed)
        _, probs = round_probs(pair, shape, Drafts.sampled(pair, shape))
        zeros_BN = torch.zeros(probs.tokens_BN.shape, dtype=torch.float64)
        ends_B = verifier.judge(probs, verifier.coins(zeros_BN)).ends_B
        requests = torch.arange(len(ends_B))
        accepted_BN = probs.mask_BNN[requests, ends_B] & (probs.depths_BN > 0)
        count += int((accepted_BN & (probs.target_of_tokens() == 0)).sum())
    return float(count)


def rounds_p(verifier: TreeVerifier, shape: Shape, effort: Effort) -> float:
    """χ² of joint outputs after rounds on the real random streams."""
    pair = TablePair.random(_vocab(shape), seed=0)
    return joint_p(generate(pair, shape, verifier, effort.num_requests, _LENGTH), pair)


def repeated_drafts_p(verifier: TreeVerifier, shape: Shape, effort: Effort) -> float:
    """The same, where a position that is drafted again is drawn with the same number, on a pair of
    tables that shows the difference early."""
    pair, count = TablePair.random(_vocab(shape), seed=7), 2 * effort.num_requests
    return joint_p(generate(pair, shape, verifier, count, 5, keyed_by_node=False), pair)


ENUMERATION = Proof("enumeration", enumeration_error, "<=", 1e-12, mutant_bound=1e-6)
ZERO_COINS = Proof("uniforms of 0", impossible_tokens, "<=", 0, mutant_bound=1)
ROUNDS = Proof("χ² of rounds", rounds_p, ">=", 1e-5, mutant_bound=1e-9)
REPEATED_DRAFTS = Proof("χ² of rounds", repeated_drafts_p, ">=", 1e-5, mutant_bound=1e-9)
PROOFS = {proof.check: proof for proof in (ENUMERATION, ZERO_COINS, ROUNDS)}


def rule_checks(effort: Effort) -> Iterator[Check]:
    """Every lossless verifier on every shape that it takes, then what is wrong on purpose. A check
    that cannot run a rule is left out, and the note of its χ² says why."""
    for name, verifier in registered_verifiers().items():
        if verifier.is_lossy:
            yield Check("says that it is lossy", name, 1.0, ">=", 1.0)
            continue
        for shape in _shapes(verifier):
            yield from checks_of(verifier, shape, f"{name}, {shape.name}", effort)
    yield from mutant_checks(effort)


def checks_of(
    verifier: TreeVerifier, shape: Shape, subject: str, effort: Effort
) -> Iterator[Check]:
    """Of one lossless verifier on one shape."""
    exact, note = [], ""
    try:
        exact.append(ENUMERATION.holds(verifier, shape, subject, effort))
    except NotEnumerable as reason:
        note = f"not enumerated: {reason}"
    if decides_by_judge(verifier):
        exact.append(ZERO_COINS.holds(verifier, shape, subject, effort))
    yield from exact
    yield replace(ROUNDS.holds(verifier, shape, subject, effort), note=note)


def mutant_checks(effort: Effort) -> Iterator[Check]:
    for name, rule in registered_verifiers().items():
        if not decides_by_judge(rule):
            continue
        for mutant in MUTANTS:
            if mutant.weighs_draft and not rule.needs_draft_probs:
                continue
            proof = PROOFS[mutant.caught_by]
            shape = TREE if rule.takes_trees and proof is ENUMERATION else CHAIN
            subject = f"{name}, {shape.name}: {mutant.name}"
            yield proof.catches(mutant(rule), shape, subject, effort)
    subject = f"block, {LONG_CHAIN.name}: drafts repeated with the same numbers"
    yield REPEATED_DRAFTS.catches(BlockVerifier(), LONG_CHAIN, subject, effort)


def _shapes(verifier: TreeVerifier) -> tuple[Shape, ...]:
    return (CHAIN, CUT_CHAIN, TREE, FAN) if verifier.takes_trees else (CHAIN, CUT_CHAIN)


def _vocab(shape: Shape) -> int:
    """Enough for siblings without replacement, where each distribution may lack a token."""
    return 4 if shape is FAN else 3
