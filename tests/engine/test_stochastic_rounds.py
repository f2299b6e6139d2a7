"""Device rounds under rules that judge drafts, stochastic or relaxed: a seed has the text, the end
and the accepted drafts that it has in rounds of the host."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from specengine import LLM, SamplingParams, SpecConfig
from specengine.engine.round.layouts import Branching
from specengine.engine.round.rules import Relaxed
from specengine.kernels.accept import (
    accept_block,
    accept_chain,
    accept_path,
    accept_relaxed,
    accept_sibling,
    accept_target_only,
)
from specengine.kernels.sample import draw_siblings, edit_rows, sample_rows, weigh_rows
from specengine.kernels.tree import tree_build, tree_shape, tree_step
from tests.halves import each_value, slow_but
from tests.support.device_rounds import come_and_go
from tests.support.judged_rounds import (
    FEATURES,
    LOOKUP_CHAINS,
    LOOKUP_TREES,
    MIXED,
    MODELS,
    NEEDED,
    OF_LOOKUP,
    OF_TREES,
    ROOMY,
    RULES,
    TREES,
    Subject,
    judged_to_the_end,
    shortened,
)
from tests.support.rounds import (
    CONTEXT,
    GREEDY,
    MANY,
    ON_CPU,
    PROMPTS,
    SAMPLED,
    assert_same_tokens,
    fallbacks,
)
from tests.support.rounds_compared import (
    NEARLY_FULL,
    assert_replayed,
    check,
    check_in_interpreter,
    pair_of,
    pair_on_gpu,
)

Subjects = dict[str, Subject]

LOOKUP = [*LOOKUP_CHAINS, *LOOKUP_TREES]
EVERY_LOOKUP = [
    (rule, name, flag) for rule in OF_LOOKUP for name in LOOKUP for flag in (True, False)
]
# A rule, a drafter, and whether rounds overlap.
EVERY_END = [
    *product(RULES, MODELS, [True]),
    *product(RULES, ["EAGLE3", "MTP"], [False]),
    *product(OF_TREES, TREES, [True]),
    *product(OF_TREES, ["EAGLE3 tree of 2"], [False]),
    *EVERY_LOOKUP,
]
# Each rule once; drafters that FAST_FEATURES has are not all here.
FAST_ENDS = [
    ("rejection", "EAGLE", True),
    ("block", "MTP", False),
    ("target_only, best drafts", "EAGLE3 one level", True),
    ("sibling", "EAGLE3 tree of 2", False),
    ("target_only, best drafts", "NGRAM corpus tree", False),
    ("relaxed, best drafts", "NGRAM, SUFFIX tree", True),
]
EVERY_FEATURE = [
    (*one, feature)
    for one in (
        *product(RULES, ["EAGLE3", "STANDALONE", "MTP layers"], [True]),
        *product(OF_TREES, TREES, [True]),
        *product(OF_LOOKUP, ["NGRAM", "SUFFIX", "NGRAM tree", "SUFFIX tree"], [True]),
        *((rule, "EAGLE3", False) for rule in RULES),
        *((rule, "EAGLE3 tree of 3", False) for rule in OF_TREES),
    )
    for feature in FEATURES
]
FAST_FEATURES = [
    ("block", "STANDALONE", True, "logprobs"),
    ("target_only", "MTP layers", True, "grammars"),
    ("target_only, best drafts", "EAGLE3", False, "all"),
    ("sibling", "EAGLE tree of 2", True, "edits"),
    ("sibling", "EAGLE3 tree of 3", False, "edits"),
    ("sibling", "EAGLE3 static tree", True, "grammars"),
    ("target_only, best drafts", "NGRAM", True, "edits"),
    ("relaxed, best drafts", "SUFFIX tree", True, "all"),
]


@ON_CPU
@pytest.mark.parametrize(("rule", "name", "overlaps"), slow_but(FAST_ENDS, EVERY_END))
def test_seed_has_hosts_text_to_the_end_of_output_and_context(
    rule: str, name: str, overlaps: bool, is_long: bool, subjects: Subjects
) -> None:
    subject = subjects[name]
    given, context, most = (subject.with_rule(rule), overlaps), subject.context, 48
    if name not in LOOKUP and not is_long:
        context, most = context - 12, 16
    if name in LOOKUP_CHAINS and is_long:
        context = CONTEXT
    host, llm, rounds = pair_of(subject.folder, *given, context_length=context)
    assert isinstance(rounds.round.layout, Branching) == subject.is_tree
    found = check(host, llm, [ending_by(one, most) for one in subject.ends], subject.prompts)
    assert fallbacks(rounds) == ({NEARLY_FULL} if subject.is_tree else set())
    lengths = [len(one.prompt_ids) + len(one.token_ids) for one in found]
    assert "relaxed" in rule or lengths.count(context) == 2
    assert all(one.spec.is_lossy == ("relaxed" in rule) for one in found)
    if name in LOOKUP:
        check_smaller_batches(host, llm, subject, (1, 3, 8) if is_long else (3, 1))
        judged = {key.num_steps for key in rounds.captured if key.sampling.stochastic}
        assert judged == {*rounds.steps}
    assert rounds.counters["replays"] > 8
    assert any(key.sampling.stochastic for key in rounds.captured)
    totals = llm.engine.scheduler.spec_totals
    assert totals == host.engine.scheduler.spec_totals
    assert 5 < totals.num_accepted_tokens < totals.num_draft_tokens - 5


def ending_by(params: SamplingParams, most: int) -> SamplingParams:
    """What ends with the context still does."""
    limit = params.max_tokens
    return params if limit is None else replace(params, max_tokens=min(limit, most))


def check_smaller_batches(host: LLM, llm: LLM, subject: Subject, counts: tuple[int, ...]) -> None:
    """What larger rounds have left stands behind short drafts."""
    for count in counts:
        params = [replace(one, seed=40 + count) for one in shortened(subject.ends[:count], 24)]
        check(host, llm, params, subject.prompts[:count])


@ON_CPU
@pytest.mark.parametrize(
    ("rule", "name", "overlaps", "feature"),
    slow_but(FAST_FEATURES, EVERY_FEATURE),
)
def test_seed_has_hosts_text_under_edits_logprobs_and_grammars(
    rule: str, name: str, overlaps: bool, feature: str, is_long: bool, subjects: Subjects
) -> None:
    subject, params = subjects[name], shortened(FEATURES[feature], 19 if is_long else 16)
    more = {"context_length": ROOMY} if subject.is_tree else {}
    params = judged_to_the_end(params) if name in TREES else params
    spec = subject.with_rule(rule)
    host, llm, rounds = pair_of(subject.folder, spec, overlaps, **more)
    check(host, llm, params)
    assert not fallbacks(rounds)
    assert rounds.counters["replays"] > 5
    assert NEEDED[feature] in {key.sampling for key in rounds.captured if key.num_steps}
    totals = llm.engine.scheduler.spec_totals
    assert totals == host.engine.scheduler.spec_totals
    assert (name not in LOOKUP) < totals.num_accepted_tokens < totals.num_draft_tokens


@ON_CPU
@pytest.mark.parametrize(
    ("count", "rule"),
    slow_but(
        [(3, "target_only"), (1, "sibling")],
        product([3, 1], ["target_only", "sibling", "relaxed"]),
    ),
)
def test_last_rounds_draft_less_where_slots_are_plenty(
    count: int, rule: str, is_long: bool, subjects: Subjects
) -> None:
    """Trees are smaller near the end of the output; no round falls back."""
    subject = subjects["EAGLE3 tree of 3"]
    given = subject.folder, subject.with_rule(rule)
    host, llm, rounds = pair_of(*given, context_length=ROOMY)
    for seed in range(0, 12 if is_long else 7, max(2, count)):  # ends of lengths 3 to 14, or to 9
        params = [replace(SAMPLED[4], seed=seed, max_tokens=3 + seed + i) for i in range(count)]
        check(host, llm, params, PROMPTS[:count])
    assert not fallbacks(rounds)
    assert all(key.sampling.stochastic for key in rounds.captured)


@ON_CPU
@pytest.mark.parametrize("name", TREES)
def test_greedy_tree_near_its_end_is_the_hosts_only_beside_a_request_that_samples(
    name: str, subjects: Subjects
) -> None:
    """Two tokens from the end. Alone it is matched: any node of the first level may be accepted,
    and all of them count. Judged, it has no more nodes than tokens left, as on the host."""
    subject = subjects[name]
    given = subject.folder, subject.with_rule("sibling")
    host, llm, rounds = pair_of(*given, context_length=ROOMY)
    last, beside = replace(GREEDY, max_tokens=3), replace(SAMPLED[0], max_tokens=9)
    level = min(subject.spec.eagle_topk, subject.spec.max_nodes - 1)
    for params, drafted in (([last], level), ([last, beside], 1)):
        mine, its = (one.generate(PROMPTS[: len(params)], params)[0] for one in (llm, host))
        assert mine.token_ids == its.token_ids
        assert [one.completions[0].spec.num_draft_tokens for one in (mine, its)] == [drafted, 1]
    assert not fallbacks(rounds)


@ON_CPU
@pytest.mark.parametrize(
    ("rule", "name", "feature"),
    each_value(
        1,
        [
            ("block", "EAGLE3"),
            ("sibling", "EAGLE3 tree of 3"),
            ("target_only, best drafts", "NGRAM"),
            ("target_only, best drafts", "SUFFIX tree"),
        ],
        [{}, {"frequency_penalty": 0.6}, {"logprobs": 2}],
    ),
    ids=str,
)
def test_greedy_requests_alone_are_matched(
    rule: str, name: str, feature: dict[str, Any], subjects: Subjects
) -> None:
    subject = subjects[name]
    given = subject.folder, subject.with_rule(rule)
    host, llm, rounds = pair_of(*given, context_length=ROOMY)
    assert_same_tokens(host, llm, PROMPTS, [replace(GREEDY, **feature), GREEDY, GREEDY])
    assert rounds.counters["replays"] > 5
    assert not any(key.sampling.stochastic for key in rounds.captured)
    assert not fallbacks(rounds)


GREEDY_CASES = {
    "greedy": [replace(GREEDY, max_tokens=one) for one in (20, None, 26)],
    "edits, logprobs": [
        replace(GREEDY, repetition_penalty=1.5),
        replace(GREEDY, max_tokens=20, logprobs=2),
    ],
    "grammars": [replace(one, temperature=0.0) for one in FEATURES["grammars"]],
}


@ON_CPU
@pytest.mark.parametrize(
    ("name", "asked"),
    each_value(1, ["NGRAM", "EAGLE3", "EAGLE3 tree of 3", "SUFFIX tree"], GREEDY_CASES),
)
def test_relaxed_rule_judges_greedy_requests_too(
    name: str, asked: str, is_long: bool, subjects: Subjects
) -> None:
    subject, params = subjects[name], GREEDY_CASES[asked]
    given = subject.folder, subject.with_rule("relaxed, best drafts")
    host, llm, rounds = pair_of(*given, context_length=max(ROOMY, subject.context))
    check(host, llm, shortened(params, 40 if is_long else 20), subject.prompts)
    assert isinstance(rounds.round.rule, Relaxed)
    assert all(key.sampling.stochastic for key in rounds.captured)
    assert not fallbacks(rounds)


@ON_CPU
def test_relaxed_texts_differ_from_matched_ones(subjects: Subjects) -> None:
    """Or the other tests would show nothing."""
    subject = subjects["EAGLE3"]
    _, llm, _ = pair_of(subject.folder, subject.with_rule("relaxed, best drafts"))
    plain, _, _ = pair_of(subject.folder, None)
    params = [replace(SAMPLED[0], max_tokens=20), GREEDY]
    found, expected = (one.generate(MANY[:2], params) for one in (llm, plain))
    assert all(a.token_ids != b.token_ids for a, b in zip(found, expected, strict=True))


@ON_CPU
@pytest.mark.parametrize("rule", ["block", "relaxed, best drafts"])
def test_rounds_captured_at_start_and_in_idle_moments_suffice(
    rule: str, subjects: Subjects
) -> None:
    subject = subjects["EAGLE3"]
    _, llm, rounds = pair_of(subject.folder, subject.with_rule(rule))
    rounds.capture()
    for params in (GREEDY, SAMPLED[0]):
        before = rounds.counters["captures"]
        llm.generate(MANY[:3], [params] * 3)
        assert rounds.counters["captures"] == before
        while llm.engine.use_idle_moment():
            pass


@ON_CPU
@pytest.mark.parametrize("name", slow_but(["EAGLE3"], ["EAGLE", "EAGLE3", "MTP"]))
def test_seed_goes_on_from_an_answer_in_the_cache_as_on_the_host(
    name: str, subjects: Subjects
) -> None:
    """What a drafter keeps of it is what it keeps on the host."""
    subject = subjects[name]
    more = {"context_length": 512, "max_running_requests": 4}
    host, llm, _ = pair_of(subject.folder, subject.with_rule("block"), **more)
    params, texts = SAMPLED[:3], [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    for turn in range(2):
        found = check(host, llm, params, texts)
        assert not turn or min(one.num_cached_tokens for one in found) > 20
        pairs = zip(texts, found, strict=True)
        texts = [[*text, *one.token_ids, 7 + turn] for text, one in pairs]


COMING = [
    ("block", "EAGLE3"),
    ("target_only", "STANDALONE"),
    ("relaxed, best drafts", "MTP layers"),
    ("rejection", "MTP layers"),
    ("target_only, best drafts", "EAGLE3"),
    ("relaxed", "EAGLE3"),
    ("sibling", "EAGLE3 tree of 3"),
    ("target_only", "MTP tree of 2"),
    ("target_only, best drafts", "EAGLE3 tree of 3"),
    ("relaxed", "EAGLE3 tree of 3"),
    ("target_only, best drafts", "NGRAM"),
    ("target_only, best drafts", "SUFFIX tree"),
    ("relaxed, best drafts", "SUFFIX"),
]


@ON_CPU
@pytest.mark.parametrize(
    ("rule", "name"),
    slow_but([COMING[6], COMING[11]], COMING),
)
def test_seed_keeps_its_text_as_requests_come_and_go_between_host_and_device(
    rule: str, name: str, is_long: bool, subjects: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = subjects[name]
    more = {"context_length": ROOMY, "disable_radix_cache": True}
    host, llm, rounds = pair_of(subject.folder, subject.with_rule(rule), **more)
    params = [*subject.ends[:4], *MIXED[:: 2 if is_long else 5]]
    come_and_go(host, llm, [*MANY, "0a"], shortened(params, 17 if is_long else 14), monkeypatch)
    assert rounds.counters["replays"] > 20
    assert not fallbacks(rounds)


ON_CHAINS = [accept_chain, weigh_rows, sample_rows, edit_rows]
ON_TREES = [*ON_CHAINS, accept_path, draw_siblings, tree_build, tree_step, tree_shape]
IN_INTERPRETER = [
    ("block", "EAGLE3"),
    ("relaxed, best drafts", "EAGLE3"),
    ("sibling", "EAGLE3 tree of 2"),
    ("target_only", "EAGLE3 tree of 2"),
    ("target_only, best drafts", "EAGLE3 tree of 2"),
    ("relaxed, best drafts", "EAGLE3 tree of 2"),
    ("target_only, best drafts", "NGRAM tree"),
]


@ON_CPU
@pytest.mark.parametrize(
    ("rule", "name"),
    slow_but([*IN_INTERPRETER[1:3], IN_INTERPRETER[-1]], IN_INTERPRETER),
)
def test_kernels_decide_as_the_references_do(
    rule: str, name: str, is_long: bool, subjects: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's interpreter."""
    subject = subjects[name]
    given = subject.folder, subject.with_rule(rule)
    more = {"sizes": (1, 4 if is_long else 2), "context_length": max(ROOMY, subject.context)}
    host, llm, rounds = pair_of(*given, **more)
    wanted = [FEATURES["all"][0], FEATURES["grammars"][2], FEATURES["grammars"][3]]
    wanted += [GREEDY, subject.ends[3]]
    wanted = wanted[2:] + wanted[:1] if is_long else wanted[:2]
    modules = [accept_block, accept_sibling, accept_target_only, accept_relaxed]
    modules += ON_TREES if subject.is_tree else ON_CHAINS
    some = shortened(wanted, 3), subject.prompts[: len(wanted)], modules, monkeypatch
    check_in_interpreter(host, llm, *some)
    assert not fallbacks(rounds)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnTheGpu:
    @pytest.mark.parametrize("overlaps", [True, False], ids=["overlap", "no overlap"])
    @pytest.mark.parametrize(
        ("rule", "name"),
        [
            *((rule, name) for rule in RULES for name in MODELS),
            *((rule, name) for rule in OF_TREES for name in TREES),
            *((rule, name) for rule in OF_LOOKUP for name in LOOKUP),
        ],
    )
    def test_seed_has_the_text_that_it_has_without_graphs(
        self, rule: str, name: str, overlaps: bool, subjects: Subjects
    ) -> None:
        subject = subjects[name]
        given = subject.folder, subject.with_rule(rule), overlaps
        context = ROOMY if subject.is_tree and name not in LOOKUP else subject.context
        host, llm = pair_on_gpu(*given, context_length=context)
        for count in (8, 3, 1):
            check(host, llm, subject.ends[:count], subject.prompts[:count])
        for params in FEATURES.values():
            check(host, llm, shortened(params))
        assert_replayed(llm, 40)
        for params in GREEDY_CASES.values() if "relaxed" in rule else ():
            check(host, llm, shortened(params))

    def test_greedy_requests_are_matched(self, subjects: Subjects) -> None:
        subject = subjects["EAGLE3 tree of 2"]
        plain, _ = pair_on_gpu(subject.folder, None)
        llm = pair_on_gpu(subject.folder, subject.with_rule("target_only, best drafts"))[1]
        rounds = llm.engine.device_rounds
        assert rounds is not None
        at_start = {*rounds.captured}
        assert_same_tokens(plain, llm, PROMPTS, GREEDY)
        assert {*rounds.captured} == at_start
        assert_replayed(llm, 5)

    def test_the_model_that_comes_with_the_engine(self) -> None:
        spec = SpecConfig(algorithm="EAGLE3", draft_sampling=True, verify="block", num_steps=4)
        given: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 4096}
        host, llm = LLM("tiny", spec, disable_cuda_graph=True, **given), LLM("tiny", spec, **given)
        check(host, llm, [replace(one, max_tokens=60) for one in SAMPLED])
        assert not llm.engine.stats().graphs["round"].fallbacks
