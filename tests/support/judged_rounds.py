"""Drafters, rules and requests of rounds whose rule judges drafts by more than the target's tokens:
the stochastic rules, and the relaxed one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specengine import LLM, GrammarSpec, SamplingParams, SpecConfig, SpecControl
from specengine.engine.factories import registered_verifiers
from specengine.engine.round.sampling import SamplingFeatures
from specengine.kernels.accept.types import Accepted, Draws, SampledRound
from specengine.target.verify.base import TreeVerifier
from tests.draft.mtp_reading import add_mtp
from tests.support.mtp_targets import predictable
from tests.support.rounds import CONTEXT, GREEDY, MANY, SAMPLED, make

Folders = dict[str, tuple[Path, SpecConfig]]

RELAXED: dict[str, Any] = {"verify": "relaxed", "relaxed_top_k": 4, "relaxed_delta": 0.02}


def _rules() -> Iterator[tuple[str, TreeVerifier, dict[str, Any]]]:
    """Each registered rule that judges by more than the target's tokens, by its name, with and,
    where it judges those too, without sampled drafts of a model."""
    for name, verifier in registered_verifiers().items():
        if verifier.device_rule == "match":
            continue
        given = RELAXED if name == "relaxed" else {"verify": name}
        yield name, verifier, given | {"draft_sampling": True}
        if not verifier.needs_draft_probs:
            yield f"{name}, best drafts", verifier, given


RULES = {name: given for name, _, given in _rules()}
STOCHASTIC = [name for name, verifier, _ in _rules() if not verifier.is_lossy]
OF_TREES = [name for name, verifier, _ in _rules() if verifier.takes_trees]
OF_LOOKUP = [name for name in RULES if not RULES[name].get("draft_sampling")]

# Requests that end by max_tokens and by context, that limit their drafts, use every parameter of
# sampling, and greedy ones among them.
ENDS = [
    replace(SAMPLED[0], max_tokens=23),
    replace(GREEDY, max_tokens=20),
    replace(SAMPLED[2], max_tokens=None),
    replace(SAMPLED[3], max_tokens=30, speculative=SpecControl(num_steps=1)),
    replace(SAMPLED[4], max_tokens=2),
    replace(SAMPLED[5], max_tokens=None),
    replace(SAMPLED[4], max_tokens=25, seed=11, speculative=SpecControl(enabled=False)),
    replace(SAMPLED[6], max_tokens=9),
]
TREE_ENDS = [
    *ENDS[:5],
    replace(ENDS[5], speculative=SpecControl(num_steps=2)),
    ENDS[6],
    replace(SAMPLED[3], max_tokens=15, seed=8, top_k=2),  # fewer tokens than siblings
]
_SURE = replace(GREEDY, temperature=0.15, top_k=3, seed=21)
LOOKUP_ENDS = [
    replace(_SURE, max_tokens=23),
    replace(GREEDY, max_tokens=20),
    replace(_SURE, max_tokens=None, seed=22),
    replace(_SURE, max_tokens=40, speculative=SpecControl(num_steps=1)),
    replace(SAMPLED[4], max_tokens=2),
    replace(_SURE, max_tokens=None, seed=23, speculative=SpecControl(num_steps=4)),
    replace(_SURE, max_tokens=30, speculative=SpecControl(enabled=False)),
    replace(SAMPLED[6], max_tokens=31),
]
# The target is between two tokens everywhere, so that lookup finds now one and now the other.
TORN = replace(GREEDY, temperature=9.0, top_k=2, max_tokens=100)
_DRAWN = replace(GREEDY, temperature=3.0, top_k=2, max_tokens=48)
LOOKUP_TREE_ENDS = [
    replace(_DRAWN, seed=31),
    replace(GREEDY, max_tokens=41),
    replace(_DRAWN, seed=32, max_tokens=None),
    replace(_DRAWN, seed=33, speculative=SpecControl(num_steps=1)),
    replace(SAMPLED[4], max_tokens=2),
    replace(_DRAWN, seed=34, max_tokens=None, speculative=SpecControl(num_steps=4)),
    replace(_DRAWN, seed=35, max_tokens=33, speculative=SpecControl(enabled=False)),
    replace(TORN, seed=36, max_tokens=37),
]

LIKELY = dict.fromkeys(range(68, 100), 6.0)  # bytes of letters: several drafts in a row stand
_LETTERS = GrammarSpec.regex("[a-c ]{4,30}")
_ASCII = GrammarSpec.regex("[ -}]{9,70}")
_STOPS = tuple(range(60, 120))
FEATURES = {
    "edits": [
        replace(SAMPLED[0], max_tokens=23, frequency_penalty=1.5, logit_bias=LIKELY),
        replace(GREEDY, max_tokens=20),
        replace(SAMPLED[2], max_tokens=None, presence_penalty=2.0, repetition_penalty=1.6),
        replace(SAMPLED[3], max_tokens=30, logit_bias=LIKELY),
        replace(GREEDY, max_tokens=26, repetition_penalty=1.5, logit_bias=LIKELY),
        replace(SAMPLED[5], max_tokens=9, frequency_penalty=-0.8),
        replace(
            SAMPLED[4],
            max_tokens=25,
            stop_token_ids=_STOPS,
            min_tokens=14,
            speculative=SpecControl(num_steps=2),
        ),
        replace(SAMPLED[6], max_tokens=20),
    ],
    "logprobs": [
        replace(SAMPLED[0], max_tokens=23, logprobs=2),
        replace(GREEDY, max_tokens=20, logprobs=0),
        replace(SAMPLED[2], max_tokens=None),
        replace(SAMPLED[4], max_tokens=21, logprobs=5),
    ],
    "grammars": [
        replace(SAMPLED[0], max_tokens=25, grammar=_LETTERS, ignore_eos=False),
        replace(SAMPLED[2], max_tokens=None),
        replace(GREEDY, max_tokens=20, grammar=_LETTERS, ignore_eos=False),
        replace(SAMPLED[4], max_tokens=30, grammar=GrammarSpec.regex("(ab|cd|[xyz]){12,30}")),
        replace(
            SAMPLED[5],
            max_tokens=40,
            grammar=GrammarSpec.choice(["The quick", "The quick brown fox", "yes"]),
            min_tokens=12,
        ),
        replace(SAMPLED[3], seed=8, max_tokens=60, grammar=_ASCII),
        replace(SAMPLED[0], seed=9, max_tokens=40, grammar=_ASCII),
    ],
}
FEATURES["all"] = [
    replace(FEATURES["edits"][0], logprobs=1),
    replace(FEATURES["grammars"][0], frequency_penalty=0.7, logprobs=2),
    *FEATURES["edits"][1:3],
    FEATURES["grammars"][5],
    replace(SAMPLED[4], max_tokens=17),
]
# What a round must be able to do for each of these batches.
NEEDED = {
    "edits": SamplingFeatures(samples=True, edits=True, stochastic=True),
    "logprobs": SamplingFeatures(samples=True, logprobs=True, stochastic=True),
    "grammars": SamplingFeatures(samples=True, masks=True, stochastic=True),
    "all": SamplingFeatures(True, True, True, True, True),
}
# Held back by min_tokens.
_HELD = replace(SAMPLED[1], temperature=0.9, seed=9, min_tokens=5, max_tokens=22, ignore_eos=False)
MIXED = [*ENDS, _HELD, *(one for params in FEATURES.values() for one in params)]


ROOMY = 160  # tokens of context


def judged_to_the_end(params: Sequence[SamplingParams]) -> list[SamplingParams]:
    """With one more, which samples, drafts nothing and so ends last: a token a round. Greedy
    requests that are left alone are matched, and a model's tree that is matched on the device is
    larger near the end of an output than the host's."""
    most = max(one.max_tokens or 0 for one in params)
    last = replace(SAMPLED[0], seed=12, max_tokens=most, speculative=SpecControl(enabled=False))
    return [*params, last]


def shortened(params: Sequence[SamplingParams], most: int = 40) -> list[SamplingParams]:
    return [replace(one, max_tokens=min(one.max_tokens or most, most)) for one in params]


@dataclass(frozen=True)
class Subject:
    """A drafter, and requests at whose ends it drafts less.

    context: for `ends`, which some of these reach. Where nodes of trees have no slots there, the
    host takes over; with ROOMY and `shortened` no request comes near.
    """

    folder: Path  # of the target
    spec: SpecConfig
    ends: list[SamplingParams]
    prompts: Sequence[str | list[int]] = tuple(MANY)
    context: int = 76
    is_tree: bool = False

    def with_rule(self, rule: str) -> SpecConfig:
        return replace(self.spec, **RULES[rule])


# algorithm, topk, levels, nodes, static
TREES = {
    "EAGLE tree of 2": ("EAGLE", 2, 3, 6, False),
    "EAGLE3 tree of 2": ("EAGLE3", 2, 3, 8, False),
    "EAGLE3 tree of 3": ("EAGLE3", 3, 4, 16, False),
    "EAGLE3 static tree": ("EAGLE3", 4, 3, 12, True),
    "EAGLE3 one level": ("EAGLE3", 4, 1, 4, False),
    "EAGLE3 few nodes": ("EAGLE3", 2, 4, 4, False),
    "STANDALONE tree of 3": ("STANDALONE", 3, 4, 16, False),
    "MTP tree of 2": ("MTP", 2, 3, 7, False),
}
_LOOKUP: dict[str, Any] = {"adaptive": False, "verify": "target_only"}
LOOKUP_CHAINS = {
    "NGRAM": SpecConfig(algorithm="NGRAM", ngram_min_match=1, num_draft_tokens=6, **_LOOKUP),
    "SUFFIX": SpecConfig(algorithm="SUFFIX", num_draft_tokens=8, **_LOOKUP),
}
LOOKUP_CHAINS["NGRAM, SUFFIX"] = replace(LOOKUP_CHAINS["NGRAM"], hybrid_suffix=True)
_NGRAM_TREE = replace(LOOKUP_CHAINS["NGRAM"], ngram_branches=2, num_draft_tokens=12)
LOOKUP_TREES = {
    "NGRAM tree": _NGRAM_TREE,
    "SUFFIX tree": SpecConfig(
        algorithm="SUFFIX", suffix_branches=2, suffix_factor=6.0, num_draft_tokens=16, **_LOOKUP
    ),
    "NGRAM, SUFFIX tree": replace(_NGRAM_TREE, hybrid_suffix=True, hybrid_suffix_min_match=3),
    "NGRAM corpus tree": replace(_NGRAM_TREE, ngram_shared_corpus=True),  # has no prefetch
}
MODELS = ["EAGLE", "EAGLE3", "MTP", "MTP layers", "STANDALONE"]


def make_subjects(
    folders: Folders, mtp_model: Path, mtp_folder: Path, lookup_prompts: list[Any]
) -> dict[str, Subject]:
    """folders: of chains. mtp_folder: empty, for a target with MTP that drafts trees well."""
    target = folders["EAGLE3"][0]
    add_mtp(mtp_model, mtp_folder, "mimo", 1)
    predictable(mtp_folder, "mimo", 1, residue=0.2)
    found = {name: Subject(*folders[name], ENDS) for name in MODELS}
    for name, (algorithm, topk, steps, nodes, static) in TREES.items():
        folder, spec = (mtp_folder, folders["MTP"][1]) if algorithm == "MTP" else folders[algorithm]
        shape = {"eagle_topk": topk, "num_steps": steps, "num_draft_tokens": nodes}
        spec = replace(spec, static_tree=static, **shape)
        found[name] = Subject(folder, spec, TREE_ENDS, context=CONTEXT, is_tree=True)
    for name, spec in LOOKUP_CHAINS.items():
        found[name] = Subject(target, spec, LOOKUP_ENDS)
    for name, spec in LOOKUP_TREES.items():
        found[name] = Subject(target, spec, LOOKUP_TREE_ENDS, lookup_prompts, 170, is_tree=True)
    return found


def make_lookup_prompts(target: Path) -> list[Any]:
    """Outputs of the target, and two prompts of which lookup drafts nothing at first."""
    llm = make(target, None, context_length=230, max_running_requests=8)
    torn = llm.generate(MANY[:6], [replace(TORN, seed=seed) for seed in range(6)])
    return [*(one.token_ids for one in torn), *MANY[6:]]


@dataclass(frozen=True)
class SeenDrafts:
    """What a rule got to see of one request's drafts in one round."""

    tokens: list[int]
    parents: list[int]  # numbers among the nodes that exist
    depths: list[int]
    weights_NV: Tensor | None  # float64, what each draft was drawn from, scaled to a sum of 1
    has_gaps: bool  # nodes that do not exist lie before others that do

    @property
    def nodes(self) -> tuple[list[int], list[int], list[int]]:
        return self.tokens, self.parents, self.depths

    @property
    def is_chain(self) -> bool:
        return self.parents == [0, *range(len(self.parents) - 1)]


def watch_drafts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], SeenDrafts]:
    """From now on, by seed and position in the output; of requests with a seed."""
    verifier: Any = llm.engine.parts.verifier
    found = dict[tuple[int, int], SeenDrafts]()

    kernel = verifier.kernel

    def watched(drafts: SampledRound, draws: Draws, **more: Any) -> Accepted:
        every_BN = drafts.nodes() if drafts.numbers_BN is None else drafts.numbers_BN
        for b, exists_N in enumerate(drafts.exists_BN):
            assert set(drafts.parents_BN[b][~exists_N].tolist()) <= {0}
            assert set(drafts.depths_BN[b][~exists_N].tolist()) <= {-1}
            if not int(draws.seeds_B[b]):
                continue
            at_N = exists_N.nonzero()[:, 0]
            numbers_N = every_BN[b]
            assert numbers_N[at_N].tolist() == [*range(len(at_N))]
            parents = numbers_N[drafts.parents_BN[b, at_N]].tolist()
            weights_NV = None
            judges_weights = verifier.needs_draft_probs and not drafts.greedy_B[b]
            if judges_weights and drafts.draft_BNV is not None:
                weights_NV = drafts.draft_BNV[b, at_N[1:]].double()
                weights_NV = weights_NV / weights_NV.sum(-1, keepdim=True)
            tokens, depths = drafts.tokens_BN[b, at_N].tolist(), drafts.depths_BN[b, at_N].tolist()
            has_gaps = at_N.tolist() != [*range(len(at_N))]
            key = int(draws.seeds_B[b]), int(draws.positions_B[b])
            found[key] = SeenDrafts(tokens, parents, depths, weights_NV, has_gaps)
        accepted: Accepted = kernel(drafts, draws, **more)
        return accepted

    monkeypatch.setattr(verifier, "kernel", watched)
    return found


SeenByRound = dict[tuple[int, int], SeenDrafts]


def assert_same_drafts(its: SeenByRound, mine: SeenByRound) -> int:
    """The rule sees the host's drafts on the device. Returns how many drafts were certain."""
    drafted = {key: one for key, one in its.items() if len(one.tokens) > 1}
    assert len(drafted) > 30
    certain = 0
    for key, one in drafted.items():
        assert mine[key].nodes == one.nodes
        assert (mine[key].weights_NV is None) == (one.weights_NV is None)
        if one.weights_NV is not None:
            torch.testing.assert_close(mine[key].weights_NV, one.weights_NV, rtol=1e-4, atol=1e-5)
            certain += int((one.weights_NV.max(-1).values == 1).sum())
    return certain
