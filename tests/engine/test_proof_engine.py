"""The proofs through the real engine: sampled drafts in every state, and what they would catch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specengine.core.config import EngineConfig, ModelConfig, SpecConfig
from specengine.core.errors import ConfigError
from specengine.core.interfaces import LogitsOutput
from specengine.core.sampling_batch import SamplingBatch
from specengine.core.spec import DraftProposal
from specengine.engine.loop import Engine
from specengine.engine.proof.rules import QUICK as QUICK_RULES
from specengine.engine.proof.runs import Divergences, complete, divergences
from specengine.engine.proof.shapes import CHAIN, TREE
from specengine.engine.proof.subjects import PREFIX_HIT, RETRACTED, State, Subject
from specengine.engine.proof.suite import EngineProof, Plan, verify
from specengine.target.verify.match import MatchVerifier
from specengine.target.verify.walk import Walk

PLAN = Plan(
    QUICK_RULES,
    num_requests=80,
    mutant_requests=4000,
    states=(State(RETRACTED, 16),),
    settings=(),
    greedy_tokens=16,
)
SAMPLED = [
    Subject("sampled chain", SpecConfig(), CHAIN),
    Subject("sampled tree", SpecConfig(), TREE),
]


@pytest.fixture(scope="module")
def proof(small_models: dict[str, Path]) -> EngineProof:
    config = EngineConfig(model=ModelConfig(model=str(small_models["qwen2"])))
    return EngineProof(config, PLAN)


def test_sampled_drafts_change_nothing(proof: EngineProof) -> None:
    checks = list(proof.checks(SAMPLED))
    assert [check for check in checks if not check.passed] == []
    subjects = " ".join(check.subject for check in checks)
    for name in ("match", "rejection", "block", "target_only", "sibling"):
        assert f"chain, {name}; retracted" in subjects
    assert "retractions" in " ".join(check.note for check in checks)


def test_the_verifier_asked_for_is_the_one(small_models: dict[str, Path]) -> None:
    config = EngineConfig(
        model=ModelConfig(model=str(small_models["qwen2"])), spec=SpecConfig(verify="block")
    )
    proof = EngineProof(config, replace(PLAN, states=(State(PREFIX_HIT, 16),), num_requests=64))
    subjects = {check.subject.partition(";")[0] for check in proof.checks(SAMPLED)}
    assert subjects == {"sampled chain, block", "sampled chain, block: wrong residual"}


class SecondBest(MatchVerifier):
    """Greedy output that is not the target's: the last token of a round is always 7."""

    def walks(
        self, output: LogitsOutput, sampling: SamplingBatch, proposal: DraftProposal
    ) -> list[Walk]:
        found = super().walks(output, sampling, proposal)
        return [Walk(walk.nodes, [*walk.tokens[:-1], 7]) for walk in found]


def test_other_greedy_output_is_a_divergence(proof: EngineProof) -> None:
    engine = Engine(replace(proof.plain.parts, verifier=SecondBest()))
    params = replace(proof._params("temperature"), temperature=0.0, max_tokens=6, logit_bias={})
    prompts = proof.prompts[:3]
    found, expected = (
        complete(one, prompts, [params] * 3).outputs for one in (engine, proof.plain)
    )
    compare: Callable[[float], Divergences] = lambda tie: divergences(  # noqa: E731
        proof.probe, prompts, params, found, expected, tie
    )
    strict = compare(1e-3)
    assert (strict.wrong, strict.tied) == (3, 0)
    assert strict.widest > 1e-3
    assert not strict.check("s").passed
    loose = compare(1e9)
    assert (loose.wrong, loose.tied) == (0, 3)
    assert loose.check("s").passed


def test_the_probe_reads_raw_logits(proof: EngineProof, small_models: dict[str, Path]) -> None:
    import transformers

    folder = small_models["qwen2"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).float().eval()
    texts = [proof.prompts[0], proof.prompts[1][:5]]
    for text, found in zip(texts, proof.probe.logits(texts), strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([text])).logits[0, -1]
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)


def test_lossy_rules_are_not_proved() -> None:
    config = EngineConfig(spec=SpecConfig(algorithm="NGRAM", verify="relaxed"))
    with pytest.raises(ConfigError, match="relaxed is lossy"):
        next(verify(config, [], PLAN))
