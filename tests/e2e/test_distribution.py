"""Sampled output follows the target's distribution through the real engine, speculation or not."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.batch import ScheduleBatch
from specengine.core.interfaces import LogitsOutput
from specengine.core.spec import DraftProposal, VerifyResult
from specengine.target.verify.match import MatchVerifier
from tests.support.chi_squared import chisquare

# The continuations of this text are drafted again and again; each is right about one time in three.
PROMPT = "abcacbbacabccabacbaccbab"
LETTERS = "abc"
LENGTH = 4
SAMPLES = 1200
CHAIN = SpecConfig(algorithm="NGRAM", adaptive=False, num_draft_tokens=4, ngram_min_match=1)
TREE = SpecConfig(
    algorithm="NGRAM", adaptive=False, num_draft_tokens=6, ngram_min_match=1, ngram_branches=3
)

Joint = dict[tuple[int, ...], float]


def biased(tokenizer: Any) -> dict[int, float]:
    """Leaves the three letters alone in the vocabulary, their ratios untouched."""
    return dict.fromkeys(tokenizer(LETTERS)["input_ids"], 100.0)


@pytest.fixture(scope="module")
def target(small_models: dict[str, Path]) -> tuple[Path, Joint]:
    """A model, and its joint distribution over the LENGTH letters after the prompt."""
    import transformers

    folder = small_models["qwen2"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).float().eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    letters = tokenizer(LETTERS).input_ids
    prompt = tokenizer(PROMPT).input_ids
    joint: Joint = {(): 1.0}
    for _ in range(LENGTH):
        longer: Joint = {}
        for text, mass in joint.items():
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + list(text)])).logits[0, -1, letters]
            for letter, share in zip(letters, logits.double().softmax(-1).tolist(), strict=True):
                longer[(*text, letter)] = mass * share
        joint = longer
    return folder, joint


def draw(llm: LLM) -> Counter[tuple[int, ...]]:
    only_letters = biased(llm.tokenizer)
    params = [
        SamplingParams(
            max_tokens=LENGTH,
            temperature=1.0,
            seed=seed,
            ignore_eos=True,
            logit_bias=only_letters,
        )
        for seed in range(SAMPLES)
    ]
    prompt = llm.tokenizer(PROMPT)["input_ids"]
    results = llm.generate([prompt] * SAMPLES, params, progress=False)
    return Counter(tuple(one.token_ids) for one in results)


def p_value(counts: Counter[tuple[int, ...]], joint: Joint) -> float:
    """Chi-squared goodness of fit; cells that expect fewer than five are pooled."""
    assert set(counts) <= set(joint)
    rare = [text for text, mass in joint.items() if mass * SAMPLES < 5]
    common = [text for text in joint if text not in set(rare)]
    observed = [counts[text] for text in common]
    expected = [joint[text] * SAMPLES for text in common]
    if rare:
        observed.append(sum(counts[text] for text in rare))
        expected.append(sum(joint[text] for text in rare) * SAMPLES)
    return float(chisquare(observed, expected, sum_check=False).pvalue)


class AcceptsLikelyDrafts(MatchVerifier):
    """Wrong: a drafted token stands whenever the target gives it more than a quarter."""

    def accept(
        self, output: LogitsOutput, batch: ScheduleBatch, proposal: DraftProposal
    ) -> VerifyResult:
        assert proposal.is_chain
        logits, row = output.logits.clone(), 0
        probs = logits.softmax(-1)
        letters = [t for t in range(probs.shape[1]) if batch.reqs[0].sampling.logit_bias.get(t)]
        for tokens, count in zip(proposal.tokens.tolist(), proposal.num_nodes, strict=True):
            for node in range(1, count):
                within = probs[row + node - 1, letters]
                share = probs[row + node - 1, tokens[node]] / within.sum()
                if share > 0.25:
                    logits[row + node - 1, tokens[node]] = 1e4
            row += count
        return super().accept(LogitsOutput(logits), batch, proposal)


def make(folder: Path, spec: SpecConfig | None, **flags: Any) -> LLM:
    return LLM(str(folder), spec=spec, dtype="float32", max_total_tokens=4096, **flags)


@pytest.mark.parametrize("spec", [None, CHAIN, TREE], ids=["plain", "chain", "tree"])
def test_sampling_follows_the_target(spec: SpecConfig | None, target: tuple[Path, Joint]) -> None:
    folder, joint = target
    llm = make(folder, spec)
    assert p_value(draw(llm), joint) > 1e-3
    if spec is not None:
        assert llm.engine.stats().spec.num_accepted_tokens > SAMPLES / 10


def test_a_wrong_acceptance_rule_is_caught(target: tuple[Path, Joint]) -> None:
    folder, joint = target
    llm = make(folder, CHAIN, disable_cuda_graph=True)  # whose rule is captured with it
    llm.engine.host_round.verifier = AcceptsLikelyDrafts()
    assert p_value(draw(llm), joint) < 1e-6


def test_the_joint_distribution_is_one(target: tuple[Path, Joint]) -> None:
    _, joint = target
    assert len(joint) == len(list(itertools.product(LETTERS, repeat=LENGTH)))
    assert abs(sum(joint.values()) - 1) < 1e-9
