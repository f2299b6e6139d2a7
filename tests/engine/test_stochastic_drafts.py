"""What a stochastic rule sees in device rounds, and what becomes of its decision."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from specengine import SamplingParams
from specengine.draft.loop_graphs import DraftLoops, LoopKey
from specengine.kernels.accept.types import Accepted, Draws, SampledRound
from tests.halves import slow_but
from tests.support.judged_rounds import (
    FEATURES,
    LIKELY,
    LOOKUP_TREES,
    ROOMY,
    Subject,
    assert_same_drafts,
    shortened,
    watch_drafts,
)
from tests.support.rounds import GREEDY, MANY, ON_CPU, PROMPTS, SAMPLED, make
from tests.support.rounds_compared import check, flags, pair_of

Subjects = dict[str, Subject]

SEEN = [
    ("block", "EAGLE3"),
    ("sibling", "EAGLE3 tree of 3"),
    ("target_only", "EAGLE3 tree of 3"),
    ("target_only, best drafts", "EAGLE3 tree of 3"),
    *(("target_only, best drafts", name) for name in LOOKUP_TREES),
]


@ON_CPU
@pytest.mark.parametrize(
    ("rule", "name"),
    slow_but([*SEEN[:2], SEEN[-1]], SEEN),
)
def test_rule_sees_the_hosts_drafts_whatever_others_of_the_batch_may_draft(
    rule: str, name: str, subjects: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = subjects[name]
    given = subject.folder, subject.with_rule(rule)
    host, llm, _ = pair_of(*given, context_length=subject.context)
    its, mine = (watch_drafts(one, monkeypatch) for one in (host, llm))
    params = [replace(one, seed=n + 1) for n, one in enumerate(shortened(subject.ends))]
    check(host, llm, params, subject.prompts)
    assert_same_drafts(its, mine)
    assert len({len(one.tokens) for one in its.values()}) > (4 if subject.is_tree else 3)
    assert not subject.is_tree or sum(not one.is_chain for one in its.values()) > 3
    has_weights = any(one.weights_NV is not None for one in its.values())
    assert has_weights == (rule in ("block", "sibling"))


@ON_CPU
@pytest.mark.parametrize(
    "rule",
    slow_but(["sibling"], ["sibling", "target_only", "target_only, best drafts"]),
)
def test_nodes_that_a_grammar_leaves_have_the_hosts_numbers(
    rule: str, subjects: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever they lie among others that it has cut."""
    subject = subjects["EAGLE3 tree of 3"]
    given = subject.folder, subject.with_rule(rule)
    host, llm, _ = pair_of(*given, context_length=ROOMY)
    its, mine = (watch_drafts(one, monkeypatch) for one in (host, llm))
    grammars = shortened(FEATURES["grammars"], 24)
    check(host, llm, [replace(one, seed=n + 1) for n, one in enumerate(grammars)])
    assert_same_drafts(its, mine)
    assert sum(one.has_gaps for one in mine.values()) > 3


@ON_CPU
@pytest.mark.parametrize("name", ["EAGLE3", "EAGLE3 tree of 2"])
def test_token_after_the_path_that_equals_the_next_draft_is_not_counted_as_accepted(
    name: str, subjects: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = subjects[name]
    tempted = Counter[bool]()

    def decide(drafts: SampledRound, draws: Draws) -> Accepted:
        """One draft stands where there is one, and its first child is emitted after it."""
        ends_B = drafts.children(torch.zeros_like(drafts.roots_B)).int().argmax(1)
        below_BN = drafts.children(ends_B)
        tempted.update(below_BN.any(1).tolist())
        child_B1 = below_BN.int().argmax(1, keepdim=True)
        return Accepted(ends_B, drafts.tokens_BN.gather(1, child_B1)[:, 0])

    _, llm, rounds = pair_of(subject.folder, subject.with_rule("target_only, best drafts"))
    monkeypatch.setattr(llm.engine.parts.verifier, "decide", decide)
    found = llm.generate(PROMPTS, [replace(SAMPLED[0], max_tokens=21)] * 3)
    assert [one.spec.histogram for one in found] == [[0, 10]] * 3
    assert tempted[True] > 20
    assert all(key.sampling.stochastic for key in rounds.captured)


@ON_CPU
@pytest.mark.parametrize(
    ("params", "is_drafted"),
    [
        (replace(SAMPLED[0], logit_bias=LIKELY), True),
        (replace(SAMPLED[0], presence_penalty=0.3), False),
        (replace(SAMPLED[0], min_tokens=5), False),
        (replace(GREEDY, presence_penalty=0.3), True),
    ],
    ids=["bias", "a penalty", "min_tokens", "greedy"],
)
def test_host_graphs_draft_for_a_stochastic_rule_only_what_seeds_follow_from(
    params: SamplingParams, is_drafted: bool, subjects: Subjects
) -> None:
    """In these graphs, edits are those of the round's root."""
    subject = subjects["EAGLE3"]
    llm = make(subject.folder, subject.with_rule("target_only, best drafts"), **flags())
    llm.engine.add_request("it", llm.tokenizer.encode(MANY[0]), params)
    llm.engine.step()
    batch = llm.engine.scheduler.schedule()
    assert batch is not None
    drafter: Any = llm.engine.drafter
    key = LoopKey(1, 3, edited=True)
    for stochastic in (True, False):
        loops = DraftLoops(drafter, (1,), True, Counter(), stochastic)
        assert (loops._key_of(batch, 3) == key) == (is_drafted or not stochastic)
