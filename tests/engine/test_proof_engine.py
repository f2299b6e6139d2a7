"""The proofs through the real engine: every way to draft in a hard state, and what they catch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from specengine.core.batch import ScheduleBatch
from specengine.core.config import EngineConfig, ModelConfig, SpecConfig
from specengine.core.draft_context import DraftContext
from specengine.core.drafter import Drafter
from specengine.core.errors import ConfigError
from specengine.core.interfaces import LogitsOutput
from specengine.core.registry import DRAFTERS
from specengine.core.sampling_batch import SamplingBatch
from specengine.core.spec import DraftProposal
from specengine.draft.proposals import Draft, assemble
from specengine.draft.worker import DraftWorker
from specengine.engine.factories import drafter_class, drafters_with_models, registered_verifiers
from specengine.engine.loop import Engine
from specengine.engine.proof import matrix
from specengine.engine.proof.catalogue import with_models, without_models
from specengine.engine.proof.check import AS_REPORTED, Check
from specengine.engine.proof.draft_mutants import Spoil, neighbouring_parent, next_node
from specengine.engine.proof.engine_mutants import AROUND_RULES, EngineMutant, of_drafts, rule_of
from specengine.engine.proof.matrix import Effort, EngineProof
from specengine.engine.proof.runs import (
    MAX_MUTANT_P,
    MIN_P,
    Divergences,
    complete,
    divergences,
    looks,
)
from specengine.engine.proof.subjects import (
    CHUNKED,
    FRESH,
    PLAIN,
    PREFIX_HIT,
    RETRACTED,
    State,
    Subject,
)
from specengine.engine.proof.suite import ALL_STATES, FULL, QUICK, Plan, sections, together
from specengine.engine.proof.tiny_model import TinyModels, save_tiny_models
from specengine.target.verify.match import MatchVerifier
from specengine.target.verify.walk import Walk

STEP = matrix._MUTANT_STEP  # as it is without the fixture
EFFORT = Effort(num_requests=40, mutant_requests=6000, draft_requests=400, greedy_tokens=12)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return save_tiny_models(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def proof(tiny: TinyModels) -> Iterator[EngineProof]:
    """Most mistakes are caught after fewer requests than a proof begins with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matrix, "_MUTANT_STEP", 50)
        yield EngineProof(EngineConfig(model=ModelConfig(model=str(tiny.target))), EFFORT)


def failures(checks: list[Check]) -> list[Check]:
    return [check for check in checks if not check.passed]


def subject_of(tiny: TinyModels, name: str) -> Subject:
    (found,) = [one for one in [*without_models(), *with_models(tiny)] if one.name == name]
    return found


def test_the_matrix_is_whole(proof: EngineProof, tiny: TinyModels) -> None:
    """Every registered drafter in each shape that it declares, with every lossless rule that may
    judge such drafts by what it declares; every state with both page sizes."""
    rules = registered_verifiers()
    seen: dict[tuple[str | None, bool, bool], set[str]] = {}
    for subject in [*without_models(), *with_models(tiny)]:
        drafter = subject.build(proof.config, State(FRESH), proof.loaded, proof.tokens).drafter
        algorithm = None if subject.shape is not None else subject.spec.algorithm
        trees, sampled = drafter.proposes_tree, drafter.emits_probs
        seen.setdefault((algorithm, trees, sampled), set()).update(subject.verifiers(drafter))
    for (_, trees, sampled), names in seen.items():
        assert names == {
            name
            for name, rule in rules.items()
            if not rule.is_lossy
            and (rule.takes_trees or not trees)
            and (sampled or not rule.needs_draft_probs)
        }
    for algorithm in DRAFTERS:
        shapes = [trees for name, trees, _ in seen if name == algorithm]
        assert shapes, f"nothing proves {algorithm}"
        drafter = drafter_class(algorithm)
        of_model = 2 if drafter.drafts_trees else 1
        has_model = algorithm in drafters_with_models()
        assert len(set(shapes)) == (of_model if has_model else len(drafter.proof_options))
    assert set().union(*seen.values()) == {n for n, one in rules.items() if not one.is_lossy}
    assert len(ALL_STATES) == 8
    assert FULL.states == ALL_STATES
    assert {state.kind for state in QUICK.states} == {PREFIX_HIT, RETRACTED}


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("NGRAM tree", State(RETRACTED, 16)),
        ("SUFFIX tree", State(CHUNKED, 16)),
        pytest.param("NGRAM chain + suffix", State(RETRACTED), marks=pytest.mark.slow),
        pytest.param("STANDALONE sampled chain", State(RETRACTED, 16), marks=pytest.mark.slow),
        pytest.param("STANDALONE sampled tree", State(PREFIX_HIT, 16), marks=pytest.mark.slow),
        ("EAGLE tree", State(RETRACTED)),
        pytest.param("EAGLE3 sampled chain", State(CHUNKED), marks=pytest.mark.slow),
        ("EAGLE3 tree + suffix", State(PREFIX_HIT, 16)),
        pytest.param("MTP sampled tree", State(RETRACTED), marks=pytest.mark.slow),
        pytest.param(
            "MTP, a layer a step: sampled chain", State(RETRACTED, 16), marks=pytest.mark.slow
        ),
        ("sampled tree", State(PREFIX_HIT)),
        pytest.param("NGRAM tree, any depth", State(RETRACTED), marks=pytest.mark.slow),
        pytest.param("SUFFIX tree, any depth", State(PREFIX_HIT), marks=pytest.mark.slow),
        pytest.param("STANDALONE chain, any depth", State(CHUNKED, 16), marks=pytest.mark.slow),
        ("EAGLE3 chain, any depth", State(PREFIX_HIT)),
    ],
    ids=str,
)
def test_output_is_plain_decodings(
    name: str, state: State, proof: EngineProof, tiny: TinyModels
) -> None:
    checks = list(proof.in_state(subject_of(tiny, name), state))
    assert failures(checks) == []
    assert {check.check for check in checks} == {
        "χ² of the engine",
        "greedy identity",
        "ran as meant",
    }


@pytest.mark.parametrize("kind", [PREFIX_HIT, CHUNKED, RETRACTED])
def test_a_state_that_is_not_met_fails(kind: str, proof: EngineProof) -> None:
    """Fresh requests are not taken for others, nor others for fresh ones."""
    fresh, other = State(FRESH), State(kind)
    run = complete(proof.plain, proof.greedy_asks, fresh)
    assert run.check("s", fresh).statistic == 0.0, "nothing was drafted"
    run = replace(run, num_accepted=1)
    assert run.check("s", fresh).passed
    assert not run.check("s", other).passed
    engine = PLAIN.build(proof.config, other, proof.loaded, [])
    complete(engine, proof.greedy_asks, other)
    again = replace(complete(engine, proof.greedy_asks, other), num_accepted=1)
    assert again.check("s", other).passed
    assert not again.check("s", fresh).passed
    assert again.outputs == run.outputs


class SaysItAgain(Drafter):
    """Drafts the last token again, in chains whatever is asked for."""

    needs_hidden = proposes_tree = emits_probs = False

    def __init__(self, context: DraftContext) -> None:
        self.max_nodes = context.spec.max_nodes
        self._node_limit = context.node_limit

    @classmethod
    def from_context(cls, context: DraftContext) -> SaysItAgain:
        return cls(context)

    def draft(self, batch: ScheduleBatch) -> DraftProposal:
        sizes = [min(self.max_nodes, self._node_limit(req)) for req in batch.reqs]
        return assemble(
            [
                Draft([req.last_token] * size, confidence=[1.0] * size)
                for req, size in zip(batch.reqs, sizes, strict=True)
            ]
        )


def test_a_registered_drafter_of_chains_is_proved_by_what_it_declares(
    proof: EngineProof, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DRAFTERS, "AGAIN", f"{__name__}:SaysItAgain")
    found = [one for one in without_models() if one.spec.algorithm == "AGAIN"]
    assert [one.name for one in found] == ["AGAIN chain", "AGAIN chain + suffix"]
    subject = found[0]
    checks = [*proof.in_state(subject, State(PREFIX_HIT, 16)), *proof.of_drafts(subject)]
    assert failures(checks) == []
    rules = {check.subject.partition(";")[0] for check in checks}
    assert rules == {"AGAIN chain, match", "AGAIN chain, target_only"}


def spoil(monkeypatch: pytest.MonkeyPatch, mistake: Spoil) -> None:
    """In whatever drafts with a model."""
    right = DraftWorker.draft

    def draft(self: DraftWorker, batch: ScheduleBatch) -> DraftProposal:
        proposal = right(self, batch)
        probs_BNV = proposal.draft_probs
        return proposal if probs_BNV is None else mistake(proposal, probs_BNV)

    monkeypatch.setattr(DraftWorker, "draft", draft)


@pytest.mark.parametrize(
    ("name", "mistake"),
    [  # next_node is caught among test_spoilt_drafts_are_caught, too
        pytest.param("EAGLE3 sampled chain", next_node, marks=pytest.mark.slow),
        ("EAGLE3 sampled tree", neighbouring_parent),
    ],
)
def test_thousands_of_drafts_show_whose_weights_they_report(
    name: str,
    mistake: Spoil,
    proof: EngineProof,
    tiny: TinyModels,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    subject = subject_of(tiny, name)
    assert [check.passed for check in proof.of_drafts(subject)] == [True, True]
    spoil(monkeypatch, mistake)
    assert [check.passed for check in proof.of_drafts(subject)] == [False, False]


def test_what_reports_nothing_is_not_held_against_it(proof: EngineProof, tiny: TinyModels) -> None:
    assert list(proof.of_drafts(subject_of(tiny, "EAGLE3 tree"))) == []


def draft_cases() -> list[Any]:
    """What convicts by its own report, of chains or of trees by turns, and the two that passed
    once; all in make test-all."""
    at_once = ("block: weights of the next node", "weights of a neighbouring parent")
    of_both = ("tokens off by one", "weights before temperature", "weights of another request")
    found = []
    for mutant in of_drafts():
        is_fast = mutant.caught_by == AS_REPORTED or mutant.name.endswith(at_once)
        if mutant.name in of_both:
            shape = "sampled tree" if of_both.index(mutant.name) % 2 else "sampled chain"
            is_fast = mutant.subject.name == shape
        label = f"{mutant.name}, {mutant.caught_by}"
        found.append(pytest.param(mutant, id=label, marks=() if is_fast else pytest.mark.slow))
    return found


@pytest.mark.parametrize("mutant", draft_cases())
def test_spoilt_drafts_are_caught(mutant: EngineMutant, proof: EngineProof) -> None:
    assert proof.catches(mutant, State(FRESH)).passed


@pytest.mark.parametrize("mutant", AROUND_RULES, ids=lambda mutant: mutant.name)
def test_mistakes_around_the_rules_are_caught(mutant: EngineMutant, proof: EngineProof) -> None:
    assert proof.catches(mutant, State(FRESH)).passed


@pytest.mark.parametrize("caught_by", ["χ²", AS_REPORTED, "greedy identity"])
def test_rule_that_is_right_is_not_noticed_at_the_bound(
    caught_by: str, proof: EngineProof, tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "effort", replace(EFFORT, mutant_requests=150))
    subject = subject_of(tiny, "sampled tree")
    check = proof.catches(EngineMutant("none", rule_of(True), subject, caught_by), State(FRESH))
    assert not check.passed
    assert check.note.startswith("after 150 requests")


def test_mistake_that_the_usual_greedy_texts_hide_is_noticed_by_others(
    proof: EngineProof, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_token = [
        replace(ask, params=replace(ask.params, max_tokens=1)) for ask in proof.greedy_asks
    ]
    monkeypatch.setattr(proof, "greedy_asks", one_token)
    monkeypatch.setattr(proof, "expected", [output[:1] for output in proof.expected])
    (mutant,) = (one for one in AROUND_RULES if one.name == "positions are off by one")
    check = proof.catches(mutant, State(FRESH))
    assert check.passed
    assert int(check.note.split()[1]) > len(one_token)


@pytest.mark.parametrize("plan", [QUICK, FULL], ids=lambda plan: plan.name)
def test_looks_at_a_mutant_are_too_few_to_notice_one_that_changes_nothing(plan: Plan) -> None:
    most = plan.engine.mutant_requests
    found = list(looks(STEP, most))
    assert found[-1] == most
    assert all(second > first for first, second in pairwise(found))
    assert len(found) * MAX_MUTANT_P < MIN_P / 10


def test_the_verifier_asked_for_is_the_one(tiny: TinyModels) -> None:
    config = EngineConfig(
        model=ModelConfig(model=str(tiny.target)), spec=SpecConfig(verify="block")
    )
    proof = EngineProof(config, EFFORT)
    sampled = [subject_of(tiny, f"sampled {shape}") for shape in ("chain", "tree")]
    found = [check.subject for one in sampled for check in proof.in_state(one, State(FRESH))]
    assert {name.partition(";")[0] for name in found} == {"sampled chain, block"}


class SecondBest(MatchVerifier):
    """Greedy output that is not the target's: the last token of a round is always 7."""

    def walks(
        self, output: LogitsOutput, sampling: SamplingBatch, proposal: DraftProposal
    ) -> list[Walk]:
        found = super().walks(output, sampling, proposal)
        return [Walk(walk.nodes, [*walk.tokens[:-1], 7]) for walk in found]


def test_other_greedy_output_is_a_divergence(proof: EngineProof) -> None:
    engine = Engine(replace(proof.plain.parts, verifier=SecondBest()))
    asks = proof.greedy_asks[:3]
    found, expected = (complete(one, asks, State(FRESH)).outputs for one in (engine, proof.plain))
    compare: Callable[[float], Divergences] = lambda tie: divergences(  # noqa: E731
        proof.probe, asks, found, expected, tie
    )
    strict = compare(1e-3)
    assert (strict.wrong, strict.tied) == (3, 0)
    assert strict.widest > 1e-3
    assert not strict.check("s").passed
    loose = compare(1e9)
    assert (loose.wrong, loose.tied) == (0, 3)
    assert loose.check("s").passed


def test_the_probe_reads_raw_logits(proof: EngineProof, tiny: TinyModels) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny.target).float().eval()
    texts = [proof.prompts[0], proof.prompts[1][:5]]
    for text, found in zip(texts, proof.probe.logits(texts), strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([text])).logits[0, -1]
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)


def test_histograms_are_taken_together() -> None:
    cells = [
        Check("χ² of the engine", f"X, block; {i}", p, ">=", 1e-6)
        for i, p in enumerate([1e-3, 1e-3, 1e-3, 2e-3])
    ]
    other = Check("χ² of the engine", "X, match; 0", 0.5, ">=", 1e-6)
    block, match = together([*cells, other])
    assert not block.passed
    assert match.passed
    assert (block.subject, match.subject) == ("block", "match")


def test_lossy_rules_are_not_proved() -> None:
    config = EngineConfig(spec=SpecConfig(algorithm="NGRAM", verify="relaxed"))
    with pytest.raises(ConfigError, match="relaxed is lossy"):
        next(sections(config, [], QUICK))
