"""Which verifiers and drafters have rounds on the device, by which rule, and why others do not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from specengine import SpecConfig
from specengine.core.interfaces import LogitsOutput
from specengine.core.registry import VERIFIERS
from specengine.core.sampling_batch import SamplingBatch
from specengine.core.spec import DraftProposal
from specengine.engine import build
from specengine.engine.phases import Phases
from specengine.engine.round.build import HostRoundsError, make_rounds, make_rule
from specengine.engine.round.layouts import Branching
from specengine.engine.round.rules import Relaxed, Stochastic
from specengine.kernels.accept.accept_rejection_ref import judge as judge_by_rejection
from specengine.kernels.accept.accept_sampled_ref import Verdict
from specengine.kernels.accept.types import SampledRound
from specengine.target.verify.base import TreeVerifier
from specengine.target.verify.coins import Coins
from specengine.target.verify.match import MatchVerifier
from specengine.target.verify.relaxed import RelaxedVerifier
from specengine.target.verify.sampled import SampledVerifier
from specengine.target.verify.sibling import SiblingVerifier
from specengine.target.verify.simulated import SimulatedVerifier
from specengine.target.verify.target_only import TargetOnlyVerifier
from specengine.target.verify.walk import Walk
from tests.support.device_rounds import prepare_drafter
from tests.support.judged_rounds import ROOMY, Subject, shortened
from tests.support.rounds import ON_CPU, PROMPTS, SAMPLED, fallbacks, make, with_graphs
from tests.support.rounds_compared import check, pair_of

UNJUDGED = "drafts are sampled, and the verifier does not weigh them"
UNKNOWN = "the verifier does more than compare tokens"
CHAIN, TREE = False, True
SIMULATED = {"simulate_accept_length": 2.5}
BRANCHES = {"eagle_topk": 2}


@pytest.mark.parametrize(
    ("name", "given", "draws", "expected"),
    [
        ("EAGLE3", {"verify": "match"}, True, UNJUDGED),
        ("EAGLE3", SIMULATED, True, UNJUDGED),
        ("EAGLE3", BRANCHES | {"verify": "match"}, True, UNJUDGED),
        ("STANDALONE", BRANCHES | {"verify": "match"}, True, UNJUDGED),
        ("EAGLE3", {}, False, (CHAIN, None)),
        ("NGRAM", {}, False, (CHAIN, None)),
        ("EAGLE3", SIMULATED, False, (CHAIN, None)),
        ("EAGLE3", SIMULATED | {"verify": "relaxed"}, False, (CHAIN, None)),
        ("EAGLE3", BRANCHES, False, (TREE, None)),
        ("EAGLE3", BRANCHES | SIMULATED, False, (TREE, None)),
        ("STANDALONE", BRANCHES, False, (TREE, None)),
        ("EAGLE3", {}, True, (CHAIN, Stochastic)),
        ("EAGLE3", {"verify": "target_only"}, False, (CHAIN, Stochastic)),
        ("STANDALONE", {"verify": "sibling"}, True, (CHAIN, Stochastic)),
        ("NGRAM", {"verify": "target_only"}, False, (CHAIN, Stochastic)),
        ("SUFFIX", {"verify": "target_only"}, False, (CHAIN, Stochastic)),
        ("EAGLE3", BRANCHES, True, (TREE, Stochastic)),
        ("EAGLE3", BRANCHES | {"verify": "target_only"}, False, (TREE, Stochastic)),
        ("STANDALONE", BRANCHES | {"verify": "target_only"}, False, (TREE, Stochastic)),
        ("STANDALONE", BRANCHES | {"verify": "sibling"}, True, (TREE, Stochastic)),
        ("NGRAM", {"verify": "target_only", "ngram_branches": 2}, False, (TREE, Stochastic)),
        ("SUFFIX", {"verify": "target_only", "suffix_branches": 2}, False, (TREE, Stochastic)),
        ("EAGLE3", {"verify": "relaxed"}, False, (CHAIN, Relaxed)),
        ("EAGLE3", {"verify": "relaxed"}, True, (CHAIN, Relaxed)),
        ("NGRAM", {"verify": "relaxed"}, False, (CHAIN, Relaxed)),
        ("EAGLE3", BRANCHES | {"verify": "relaxed"}, False, (TREE, Relaxed)),
        ("STANDALONE", BRANCHES | {"verify": "relaxed"}, True, (TREE, Relaxed)),
        ("SUFFIX", {"verify": "relaxed", "suffix_branches": 2}, False, (TREE, Relaxed)),
    ],
)
def test_rounds_have_the_layout_and_rule_of_drafter_and_verifier(
    name: str,
    given: dict[str, Any],
    draws: bool,
    expected: str | tuple[bool, type[Stochastic | Relaxed] | None],
    target: Path,
    drafters: dict[str, str],
) -> None:
    shape: dict[str, Any] = {"num_draft_tokens": 4}
    if name in drafters:
        shape = {"draft_model_path": drafters[name], "num_steps": 3}
    spec = SpecConfig(algorithm=name, draft_sampling=draws, **shape, **given)
    llm = make(target, spec, device="cpu")
    prepare_drafter(llm)
    parts = llm.engine.parts
    runner, config = parts.worker.runner, with_graphs(llm)
    given_all = config, runner, parts.drafter, parts.verifier, False
    if isinstance(expected, str):
        with pytest.raises(HostRoundsError, match=f"^{expected}$"):
            make_rounds(*given_all)
        return
    made = make_rounds(*given_all)
    is_tree, rule = expected
    assert isinstance(made.round.layout, Branching) == is_tree
    assert type(made.round.rule) is (type(None) if rule is None else rule)
    assert made.sampling.stochastic == (rule is not None)
    assert made.sampling.stochastic_greedy == (rule is Relaxed)
    assert (made.round.commit.simulated is None) == ("simulate_accept_length" not in given)
    assert made.is_lossy == (rule is Relaxed or "simulate_accept_length" in given)


@dataclass
class Drafts:
    """A drafter, as far as rules ask."""

    emits_probs: bool


def test_stochastic_rule_that_lacks_draft_probabilities_matches() -> None:
    """As it does on the host. No configuration asks for it."""
    drafter: Any = Drafts(emits_probs=False)
    assert make_rule(SiblingVerifier(), drafter) is None
    assert isinstance(make_rule(TargetOnlyVerifier(), drafter), Stochastic)


class Promising(MatchVerifier):
    """Declares a rule that it has no methods of."""

    device_rule = "stochastic"


@pytest.mark.parametrize("rule", ["stochastic", "relaxed", "a rule that no round knows"])
def test_verifier_that_lacks_what_its_device_rule_asks_for_runs_on_the_host(rule: str) -> None:
    drafter: Any = Drafts(emits_probs=False)
    verifier: Any = Promising()
    verifier.device_rule = rule
    with pytest.raises(HostRoundsError, match=f"^{UNKNOWN}$"):
        make_rule(verifier, drafter)


class OwnWalks(MatchVerifier):
    """Lossless, and not what MatchVerifier accepts: a chain's first draft at most."""

    def walks(
        self, output: LogitsOutput, sampling: SamplingBatch, proposal: DraftProposal
    ) -> list[Walk]:
        found = super().walks(output, sampling, proposal)
        return [Walk(one.nodes[:2], one.tokens[:2]) for one in found]


class Mixin:
    walks = OwnWalks.walks


class MixedIn(Mixin, MatchVerifier):
    """Decides by a method that it takes from elsewhere."""


class OwnDecision(TargetOnlyVerifier):
    decide = SampledVerifier.decide


class OwnDecisionOnTheHost(TargetOnlyVerifier):
    decide_on_host = SampledVerifier.decide_on_host


class OwnAccept(RelaxedVerifier):
    accept = TreeVerifier.accept


class Declared(OwnWalks):
    device_rule = "match"
    walks = MatchVerifier.walks


class FirstDraftOnly(SampledVerifier):
    """A stochastic rule of `judge` alone: of a chain the first draft at most stands."""

    takes_trees = False

    def judge(self, probs: SampledRound, coins: Coins) -> Verdict:
        first = replace(probs, exists_BN=probs.exists_BN & (probs.depths_BN <= 1))
        verdict = judge_by_rejection(first, coins.pick)
        stood_B1 = (verdict.ends_B > 0)[:, None]
        after_BV = probs.target(verdict.ends_B)
        return replace(verdict, residual_BV=after_BV.where(stood_B1, verdict.residual_BV))


class JudgedTrees(TargetOnlyVerifier):
    """target_only without its kernel."""

    def judge(self, probs: SampledRound, coins: Coins) -> Verdict:
        return super().judge(probs, coins)


@pytest.mark.parametrize(
    ("verifier", "expected"),
    [
        (MatchVerifier, "match"),
        (SimulatedVerifier, "match"),
        (OwnWalks, None),
        (type("Heir", (OwnWalks,), {}), None),
        (MixedIn, None),
        (OwnDecision, None),
        (OwnDecisionOnTheHost, None),
        (OwnAccept, None),
        (Declared, "match"),
        (type("Heir", (Declared,), {}), "match"),
        (TargetOnlyVerifier, "stochastic"),
        (FirstDraftOnly, "stochastic"),
        (JudgedTrees, "stochastic"),
        (RelaxedVerifier, "relaxed"),
    ],
)
def test_verifier_that_decides_otherwise_has_no_device_rule_unless_it_declares_one(
    verifier: type[TreeVerifier], expected: str | None
) -> None:
    assert verifier.device_rule == expected


@ON_CPU
def test_registered_rule_without_a_device_rule_runs_on_the_host_and_is_counted(
    drafters: dict[str, str], target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(VERIFIERS, "target_only", f"{__name__}:OwnWalks")
    given: dict[str, Any] = {"num_steps": 3, "adaptive": False, "verify": "target_only"}
    spec = SpecConfig(algorithm="EAGLE3", draft_model_path=drafters["EAGLE3"], **given)
    plain, host, llm = (make(target, one, device="cpu") for one in (None, spec, spec))
    prepare_drafter(llm)
    engine = llm.engine
    build._capture(with_graphs(llm), engine, engine.parts.worker.runner, Phases(), None)
    assert engine.pipeline is None
    found = check(host, llm, SAMPLED[:3], PROMPTS)
    expected = plain.generate(PROMPTS, SAMPLED[:3])
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert {len(one.spec.histogram) for one in found} <= {1, 2}, "one draft stands, never more"
    assert llm.engine.scheduler.spec_totals.num_accepted_tokens > 5
    (reason, count), *others = engine.stats().graphs["round"].fallbacks.items()
    assert (reason, others) == (UNKNOWN, [])
    assert count > 10


@ON_CPU
@pytest.mark.parametrize(
    ("verifier", "rule", "name"),
    [
        (FirstDraftOnly, "block", "EAGLE3"),
        pytest.param(FirstDraftOnly, "rejection", "STANDALONE", marks=pytest.mark.slow),
        (JudgedTrees, "target_only, best drafts", "EAGLE3 tree of 3"),
        pytest.param(JudgedTrees, "target_only", "EAGLE3 tree of 2", marks=pytest.mark.slow),
    ],
)
def test_stochastic_rule_of_judge_alone_has_hosts_text_in_device_rounds(
    verifier: type[SampledVerifier],
    rule: str,
    name: str,
    subjects: dict[str, Subject],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    subject = subjects[name]
    spec = subject.with_rule(rule)
    monkeypatch.setitem(VERIFIERS, spec.verify, f"{__name__}:{verifier.__name__}")
    host, llm, rounds = pair_of(subject.folder, spec, context_length=ROOMY)
    for one in (host, llm):
        assert type(one.engine.parts.verifier) is verifier
        assert verifier.kernel is None
    found = check(host, llm, shortened(subject.ends, 24))
    assert not fallbacks(rounds)
    assert rounds.counters["replays"] > 8
    assert isinstance(rounds.round.rule, Stochastic)
    assert any(key.sampling.stochastic for key in rounds.captured)
    if verifier is FirstDraftOnly:
        sampled = [
            one for one, wanted in zip(found, subject.ends, strict=True) if wanted.temperature
        ]
        assert {len(one.spec.histogram) for one in sampled} == {1, 2}
    assert llm.engine.scheduler.spec_totals.num_accepted_tokens > 5
