"""The proofs without a model hold, catch what they must, and measure what they say."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from specengine.core.interfaces import LogitsOutput
from specengine.core.random_streams import Stream, draw
from specengine.core.registry import VERIFIERS
from specengine.core.sampling_batch import SamplingBatch
from specengine.core.spec import DraftProposal
from specengine.engine.factories import registered_verifiers
from specengine.engine.proof.check import Check, chi_squared_p, combined_p
from specengine.engine.proof.engine_mutants import of_rules
from specengine.engine.proof.enumeration import Drafts, Outcomes, judged, matched
from specengine.engine.proof.mutants import MUTANTS, SharedResidualStream
from specengine.engine.proof.rules import (
    ENUMERATION,
    ROUNDS,
    Effort,
    checks_of,
    mutant_checks,
    rule_checks,
)
from specengine.engine.proof.shapes import CHAIN, TREE, Shape
from specengine.engine.proof.tables import TablePair
from specengine.target.verify.block import BlockVerifier
from specengine.target.verify.match import MatchVerifier
from specengine.target.verify.rejection import RejectionVerifier
from specengine.target.verify.rows import row_map
from specengine.target.verify.sampled import SampledVerifier
from specengine.target.verify.sibling import SiblingVerifier
from specengine.target.verify.target_only import TargetOnlyVerifier
from specengine.target.verify.walk import Walk
from tests.support import chi_squared

PAGE = Path(__file__).parents[2] / "docs" / "extend" / "rule.md"
QUICKER = Effort(num_pairs=1, num_requests=2500)


@pytest.fixture(scope="module")
def checks() -> list[Check]:
    return list(rule_checks(QUICKER))


def test_every_check_holds(checks: list[Check]) -> None:
    assert [check for check in checks if not check.passed] == []


def test_every_lossless_verifier_is_enumerated(checks: list[Check]) -> None:
    enumerated = {check.subject for check in checks if check.check == "enumeration"}
    for name, verifier in registered_verifiers().items():
        shapes = [CHAIN, TREE] if verifier.takes_trees else [CHAIN]
        for shape in shapes:
            assert verifier.is_lossy or f"{name}, {shape.name}" in enumerated


def test_every_mutant_is_caught(checks: list[Check]) -> None:
    caught = {check.subject.partition(": ")[2] for check in checks if "catches" in check.check}
    assert caught >= {mutant.name for mutant in MUTANTS}


class AcceptsFirst(MatchVerifier):
    """Not lossless, and does not say so: the first child stands at every node."""

    def walks(
        self, output: LogitsOutput, sampling: SamplingBatch, proposal: DraftProposal
    ) -> list[Walk]:
        sampled_T = self.sampler(output, sampling, row_map(proposal, sampling))
        last_B = sampled_T[torch.tensor(proposal.num_nodes).cumsum(0) - 1].tolist()
        walks = []
        for tokens, count, last in zip(
            proposal.tokens.tolist(), proposal.num_nodes, last_B, strict=True
        ):
            walks.append(Walk(list(range(count)), [*tokens[1:count], last]))
        return walks


def cut(walk: Walk, keeps: bool) -> Walk:
    return walk if keeps else Walk(walk.nodes[:1], walk.tokens[:1])


class OwnNumbers(MatchVerifier):
    """Lossless: accepts nothing where a coin of its own says so."""

    def walks(
        self, output: LogitsOutput, sampling: SamplingBatch, proposal: DraftProposal
    ) -> list[Walk]:
        assert sampling.random is not None
        assert sampling.output_pos is not None
        coins_B = draw(sampling.random.seeds, sampling.output_pos, Stream.ACCEPT)
        walks = super().walks(output, sampling, proposal)
        return [cut(one, coin < 0.5) for one, coin in zip(walks, coins_B.tolist(), strict=True)]


class OwnSampler(MatchVerifier):
    """Lossless, by a sampler that it brings along."""

    def walks(
        self, output: LogitsOutput, sampling: SamplingBatch, proposal: DraftProposal
    ) -> list[Walk]:
        return MatchVerifier().walks(output, sampling, proposal)


class AsksByHalves(MatchVerifier):
    """Lossless: asks its sampler about the root alone, and accepts nothing."""

    def walks(
        self, output: LogitsOutput, sampling: SamplingBatch, proposal: DraftProposal
    ) -> list[Walk]:
        roots_B = torch.tensor([0, *proposal.num_nodes[:-1]]).cumsum(0)
        tokens = self.sampler(LogitsOutput(output.logits[roots_B]), sampling).tolist()
        return [Walk([0], [token]) for token in tokens]


class NeverJudges(RejectionVerifier):
    """Lossless, but not by its judge."""

    def walks(
        self, output: LogitsOutput, sampling: SamplingBatch, proposal: DraftProposal
    ) -> list[Walk]:
        return MatchVerifier.walks(self, output, sampling, proposal)


def test_rule_with_walks_of_its_own_that_is_not_lossless_fails_the_enumeration() -> None:
    found = {one.check: one for one in checks_of(AcceptsFirst(), CHAIN, "own", QUICKER)}
    assert not found["enumeration"].passed
    assert not found["χ² of rounds"].passed


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (OwnNumbers, "it draws numbers beside those of its sampler"),
        (OwnSampler, "it does not ask its sampler"),
        (AsksByHalves, "it does not ask its sampler about all nodes at once"),
        (NeverJudges, "it does not decide by judge alone"),
    ],
)
def test_rule_that_enumeration_cannot_run_is_left_out_and_the_note_says_why(
    rule: type[MatchVerifier], reason: str
) -> None:
    (check,) = checks_of(rule(), CHAIN, "own", QUICKER)
    assert check.check == "χ² of rounds"
    assert check.passed
    assert check.note == f"not enumerated: {reason}"


def test_rule_that_does_not_decide_by_judge_is_not_proved_by_mutants_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(VERIFIERS, "rejection", f"{__name__}:NeverJudges")
    assert not any(one.name.startswith("rejection") for one in of_rules())
    quick = replace(QUICKER, num_requests=100, most_for_mutants=1)
    assert not any(one.subject.startswith("rejection") for one in mutant_checks(quick))


def documented_rule() -> SampledVerifier:
    """Of docs/extend/rule.md: lossless; a draft stands less than half as often as under token-level
    rejection."""
    names = ModuleType("specengine.target.verify.cautious")
    block, line = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(block, vars(names))
    place = eval("{" + line + "}")["cautious"]
    rule: SampledVerifier = vars(names)[place.removeprefix(f"{names.__name__}:")]()
    return rule


def test_mistake_of_a_rule_that_accepts_little_is_caught_by_more_samples() -> None:
    rule, effort = documented_rule(), replace(QUICKER, num_requests=1500)
    assert ENUMERATION.holds(rule, CHAIN, "cautious", effort).passed
    check = ROUNDS.catches(SharedResidualStream(rule), CHAIN, "cautious", effort)
    assert check.passed
    assert check.note, "more than other rules need"


def test_mutant_that_nothing_shows_is_missed_at_the_bound() -> None:
    effort = replace(QUICKER, num_requests=100, most_for_mutants=4)
    check = ROUNDS.catches(RejectionVerifier(), CHAIN, "no mistake", effort)
    assert not check.passed
    assert check.note == "4 times the effort"


def accepted(rule: SampledVerifier, pair: TablePair, shape: Shape) -> float:
    """Drafted tokens that stand in a round, expected exactly."""
    outcomes = judged(rule, pair, shape, Drafts.sampled(pair, shape))
    return expected_length(outcomes)


def expected_length(outcomes: Outcomes) -> float:
    lengths_B = torch.tensor([len(tokens) for tokens in outcomes.accepted])
    return float((outcomes.next_BV.sum(-1) * lengths_B).sum())


def test_block_accepts_at_least_what_token_level_rejection_does() -> None:
    gains = []
    for seed in range(6):
        pair = TablePair.random(3, seed)
        block = accepted(BlockVerifier(), pair, CHAIN)
        gains.append(block - accepted(RejectionVerifier(), pair, CHAIN))
        assert accepted(TargetOnlyVerifier(), pair, CHAIN) < block
    assert min(gains) > -1e-12
    assert max(gains) > 0.01


def test_a_second_sibling_is_accepted_too() -> None:
    two, one = Shape("two", (0, 0)), Shape("one", (0,))
    rule, gains = SiblingVerifier(), []
    for seed in range(6):
        pair = TablePair.random(3, seed)
        single = accepted(rule, pair, one)
        assert single == pytest.approx(accepted(RejectionVerifier(), pair, one))
        gains.append(accepted(rule, pair, two) - single)
    assert min(gains) > -1e-12
    assert max(gains) > 0.05


def test_target_only_accepts_what_matching_does() -> None:
    pair = TablePair.random(3, 1)
    drafts = Drafts.certain(pair, TREE)
    found = [
        judged(TargetOnlyVerifier(), pair, TREE, drafts),
        matched(MatchVerifier(), pair, TREE, drafts),
    ]
    means = [expected_length(one) for one in found]
    assert means[0] == pytest.approx(means[1], abs=1e-12)


# What scipy.stats.chisquare gives for counts and expected counts: the statistic and the p-value.
OF_SCIPY = [
    ([18, 30, 52], [25.0, 25.0, 50.0], 3.04, 0.21871188695221477),
    ([18, 30, 55], [25.0, 25.0, 53.0], 3.0354716981132075, 0.21920764470078982),
    ([18, 30, 52], [30.0, 30.0, 40.0], 8.4, 0.014995576820477707),
    ([7, 13], [7.0, 13.0], 0.0, 1.0),
]


@pytest.mark.parametrize(("observed", "expected", "statistic", "p_value"), OF_SCIPY)
def test_p_values_are_those_of_scipy(
    observed: list[int], expected: list[float], statistic: float, p_value: float
) -> None:
    found = chi_squared_p(torch.tensor(observed), torch.tensor(expected))
    assert found == pytest.approx(p_value, rel=1e-9)
    of_tests = chi_squared.chisquare(observed, expected)
    assert of_tests.statistic == pytest.approx(statistic, rel=1e-12)
    assert of_tests.pvalue == pytest.approx(p_value, rel=1e-12)


def test_neighbours_that_expect_few_are_taken_together() -> None:
    pooled = chi_squared_p(torch.tensor([18, 30, 52, 1, 2]), torch.tensor([25.0, 25, 50, 1, 2]))
    assert pooled == pytest.approx(0.21920764470078982, rel=1e-9)  # of 18, 30 and 55
    pooled = chi_squared_p(torch.tensor([1, 6, 9, 4]), torch.tensor([3.0, 4.0, 4.0, 9.0]))
    assert pooled == pytest.approx(1.0, rel=1e-9)  # of 7 and 13, as expected


def test_counts_are_expected_to_be_the_same_and_have_the_same_sum() -> None:
    found = chi_squared.chisquare([18, 30, 52])
    assert found.statistic == pytest.approx(17.84, rel=1e-12)
    assert found.pvalue == pytest.approx(0.00013368824479140047, rel=1e-12)
    with pytest.raises(ValueError, match=r"99\.0 counts"):
        chi_squared.chisquare([17, 30, 52], [30, 30, 40])


def test_many_small_cells_are_not_taken_as_one() -> None:
    expected = torch.full((100,), 1.0)
    observed = torch.cat([torch.full((50,), 2.0), torch.zeros(50)])
    assert chi_squared_p(observed, expected) < 1e-12


def test_combined_p_values_are_those_of_scipy() -> None:
    p_value = 0.12982442065226535  # scipy.stats.combine_pvalues
    assert combined_p([0.3, 0.04, 0.8, 0.2]) == pytest.approx(p_value, rel=1e-9)
    assert combined_p([0.0]) < 1e-290


def test_what_cannot_be_is_never_seen() -> None:
    assert chi_squared_p(torch.tensor([50, 49, 1]), torch.tensor([50.0, 50.0, 0.0])) == 0.0
    assert chi_squared_p(torch.tensor([50, 50, 0]), torch.tensor([50.0, 50.0, 0.0])) == 1.0


def test_checks_compare() -> None:
    assert Check("c", "s", 1.0, "<=", 1.0).passed
    assert not Check("c", "s", 2.0, "<=", 1.0).passed
    assert Check("c", "s", 2.0, ">=", 1.0).passed
    assert not Check("c", "s", float("nan"), ">=", 1.0).passed
