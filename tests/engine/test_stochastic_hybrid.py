"""A model's drafts beside suffix matches under rules that judge drafts, in device rounds: a seed
has the text that it has in rounds of the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specengine import LLM, SpecConfig, SpecControl
from specengine.engine.launched import Launched
from specengine.engine.round.executor import RoundExecutor
from specengine.kernels.accept import (
    accept_block,
    accept_chain,
    accept_path,
    accept_rejection,
    accept_relaxed,
    accept_sibling,
    accept_target_only,
)
from specengine.kernels.sample import draw_siblings, sample_rows, weigh_rows
from specengine.kernels.tree import tree_build, tree_shape, tree_step
from tests.support.device_rounds import come_and_go, run_on_device
from tests.support.hybrid import (
    LONG,
    NAMES,
    NODES,
    PROMPTS,
    TREE_CASES,
    TREES,
    Folders,
    Prompts,
    Sources,
    hybrid,
    make,
    source_of,
    trees,
)
from tests.support.judged_rounds import (
    FEATURES,
    OF_TREES,
    RULES,
    assert_same_drafts,
    watch_drafts,
)
from tests.support.rounds import ON_CPU, SAMPLED, assert_same_tokens, fallbacks
from tests.support.rounds_compared import (
    NEARLY_FULL,
    assert_replayed,
    check,
    check_in_interpreter,
)

FLAGS: dict[str, Any] = {
    "context_length": 190,
    "max_total_tokens": 4096,
    "max_running_requests": 8,
    "disable_radix_cache": True,
}
# The target is between two tokens everywhere: either source's drafts stand now and then.
TORN = replace(LONG, temperature=3.0, top_k=2)
ALONE = replace(
    TORN, temperature=9.0, seed=41, max_tokens=70
)  # has rounds of lookup's drafts alone
ENDS = [  # by max_tokens and by context, limits, and greedy ones among those that sample
    replace(TORN, seed=31, max_tokens=40),
    replace(LONG, max_tokens=41),
    replace(TORN, seed=32, max_tokens=None),
    replace(TORN, seed=33, max_tokens=30, speculative=SpecControl(num_steps=1)),
    replace(SAMPLED[4], max_tokens=30, speculative=SpecControl(num_steps=5)),
    replace(TORN, seed=35, max_tokens=20, speculative=SpecControl(enabled=False)),
]
CHAIN = "chain"
# A rule, a model, and which of the two drafts trees.
ENTIRE = [
    *((rule, name, CHAIN) for rule in RULES if rule != "relaxed, best drafts" for name in NAMES),
    *((rule, *case) for rule in OF_TREES for case in TREE_CASES),
]
FAST = [
    ("rejection", "STANDALONE", CHAIN, True),
    ("sibling", "EAGLE3", "both", True),
    ("relaxed, best drafts", "EAGLE3", "text", False),
]
SLOW = pytest.mark.slow


def slow_unless(fast: bool, *values: Any) -> Any:
    return pytest.param(*values, marks=() if fast else SLOW)


def shortened(params: list[Any], most: int = 30) -> list[Any]:
    """No request comes near the context's end, and no greedy one is left alone: rounds of these are
    matched, and count a model's tree near an output's end as the device has it."""
    limits = [10 if one.is_greedy else most for one in params]
    pairs = zip(params, limits, strict=True)
    return [replace(one, max_tokens=min(one.max_tokens or most, limit)) for one, limit in pairs]


def ending_by(params: list[Any], most: int) -> list[Any]:
    """What ends with the context still does."""
    return [
        one if one.max_tokens is None else replace(one, max_tokens=min(one.max_tokens, most))
        for one in params
    ]


def spec_of(spec: SpecConfig, rule: str, shape: str, min_match: int = 3) -> SpecConfig:
    given = {"hybrid_suffix_min_match": min_match} | RULES[rule]
    return hybrid(spec, **given) if shape == CHAIN else trees(spec, shape, **given)


def prompts_of(torn: Prompts, folders: Folders, name: str, count: int = 6) -> list[Any]:
    """Ends of what the target has emitted, twice, so that lookup drafts; and others."""
    every = [*torn[folders[name][0]], [40, 41] * 20, [50]]
    return [one[-55:] * 2 for one in every[:count]]


def pair_of(
    folders: Folders,
    name: str,
    spec: SpecConfig,
    monkeypatch: pytest.MonkeyPatch,
    overlaps: bool = True,
    context: int = 190,
) -> tuple[LLM, LLM, RoundExecutor, Sources]:
    flags = FLAGS | {"context_length": context}
    host, llm = (make(folders[name][0], spec, **flags) for _ in range(2))
    rounds, sources = run_on_device(llm, overlaps, sizes=(1, 2, 8)), Sources()
    assert source_of(rounds)
    sources.watch(rounds, monkeypatch)
    return host, llm, rounds, sources


@ON_CPU
@pytest.mark.parametrize(
    ("rule", "name", "shape", "overlaps"),
    [slow_unless((*one, flag) in FAST, *one, flag) for one in ENTIRE for flag in (True, False)],
)
def test_seed_has_hosts_text_with_drafts_of_either_source_or_both(
    rule: str,
    name: str,
    shape: str,
    overlaps: bool,
    is_long: bool,
    folders: Folders,
    torn: Prompts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Deeper than the model drafts, and shorter."""
    spec = spec_of(folders[name][1], rule, shape, min_match=2)
    given = spec, monkeypatch, overlaps, 190 if is_long else 156
    host, llm, rounds, sources = pair_of(folders, name, *given)
    prompts = prompts_of(torn, folders, name)
    check(host, llm, ENDS if is_long else ending_by(ENDS, 34), prompts)
    check(host, llm, [ALONE], prompts)
    assert fallbacks(rounds) <= (set() if shape == CHAIN else {NEARLY_FULL})
    totals = llm.engine.scheduler.spec_totals
    assert totals == host.engine.scheduler.spec_totals
    assert 5 < totals.num_accepted_tokens < totals.num_draft_tokens - 5
    assert sources.rounds.keys() == {"model", "both", "text"}
    assert min(sources.accepted["model"], sources.accepted["text"]) > 0
    judged = {key.num_steps for key in sources.keys if key.sampling.stochastic}
    assert judged == {3, 7 if shape == CHAIN else NODES - 1}


@ON_CPU
@pytest.mark.parametrize(
    ("rule", "name", "shape", "feature"),
    [
        slow_unless(feature == fast, *case, feature)
        for *case, fast in (
            ("block", "EAGLE3", CHAIN, "all"),
            ("target_only", "STANDALONE", CHAIN, None),
            ("target_only, best drafts", "EAGLE3", CHAIN, None),
            ("relaxed", "EAGLE3", CHAIN, None),
            ("sibling", "EAGLE3", "both", "grammars"),
            ("target_only", "STANDALONE", "text", None),
            ("target_only, best drafts", "EAGLE3", "text", "edits"),
            ("target_only, best drafts", "EAGLE", "both", None),
            ("relaxed", "STANDALONE", "model", None),
            ("relaxed, best drafts", "EAGLE3", "text", None),
        )
        for feature in FEATURES
    ],
)
def test_seed_has_hosts_text_under_edits_logprobs_and_grammars(
    rule: str,
    name: str,
    shape: str,
    feature: str,
    is_long: bool,
    folders: Folders,
    torn: Prompts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chains of a model follow edits in trees as they do among chains."""
    spec = spec_of(folders[name][1], rule, shape, min_match=1)
    host, llm, rounds, sources = pair_of(folders, name, spec, monkeypatch)
    check(
        host,
        llm,
        shortened(FEATURES[feature], 30 if is_long else 20),
        prompts_of(torn, folders, name),
    )
    assert not fallbacks(rounds)
    if feature != "logprobs":  # of few requests
        assert sources.rounds["both"]
        assert min(sources.accepted["model"], sources.accepted["text"]) > 0
    assert llm.engine.scheduler.spec_totals == host.engine.scheduler.spec_totals


@ON_CPU
@pytest.mark.parametrize(
    ("rule", "shape"),
    [
        pytest.param("block", CHAIN, marks=SLOW),
        pytest.param("target_only", CHAIN, marks=SLOW),
        ("sibling", "both"),
        pytest.param("sibling", "text", marks=SLOW),
    ],
)
def test_rule_sees_the_hosts_drafts_and_what_they_were_drawn_from(
    rule: str,
    shape: str,
    is_long: bool,
    folders: Folders,
    torn: Prompts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lookup's drafts are certain: all their weight is on one token."""
    spec = spec_of(folders["EAGLE3"][1], rule, shape, min_match=2)
    host, llm, _, sources = pair_of(folders, "EAGLE3", spec, monkeypatch)
    its, mine = (watch_drafts(one, monkeypatch) for one in (host, llm))
    most = 40 if is_long else 28
    params = [replace(ALONE, seed=seed, max_tokens=most) for seed in range(51, 55)]
    params = ENDS if shape == CHAIN else params
    check(host, llm, params, prompts_of(torn, folders, "EAGLE3"))
    assert sources.rounds["both"] > 2
    assert assert_same_drafts(its, mine) > (-1 if rule == "target_only" else 20)


@ON_CPU
@pytest.mark.parametrize(
    ("rule", "shape"),
    [
        pytest.param("block", CHAIN, marks=SLOW),
        pytest.param("target_only, best drafts", CHAIN, marks=SLOW),
        ("sibling", "both"),
        pytest.param("sibling", "text", marks=SLOW),
    ],
)
def test_greedy_requests_alone_are_matched(
    rule: str, shape: str, folders: Folders, torn: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(folders["EAGLE3"][1], rule, shape)
    host, llm, rounds, sources = pair_of(folders, "EAGLE3", spec, monkeypatch)
    prompts, params = prompts_of(torn, folders, "EAGLE3", 3), [replace(LONG, max_tokens=30)] * 3
    if shape == CHAIN:
        check(host, llm, params, prompts)
    else:
        assert_same_tokens(host, llm, prompts, params)
    assert not any(key.sampling.stochastic for key in rounds.captured)
    assert not fallbacks(rounds)
    assert sources.rounds.keys() >= {"model", "both"}


@ON_CPU
@pytest.mark.parametrize("min_match", [3, 9])
def test_host_sends_counts_of_drafts_only_to_rounds_with_lookup(
    min_match: int, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there can be no match, the next round is launched before the results are known."""
    spec = spec_of(folders["EAGLE3"][1], "block", CHAIN, min_match)
    host, llm, rounds, sources = pair_of(folders, "EAGLE3", spec, monkeypatch)
    layout, pipeline = rounds.round.layout, llm.engine.pipeline
    assert pipeline is not None
    sent, early = list[list[int]](), list[Launched]()
    send, follow = layout.send_counts, pipeline._follow

    def watched_send(num_drafted: list[int]) -> None:
        sent.append(num_drafted)
        send(num_drafted)

    def watched_follow(before: Launched) -> Launched | None:
        following = follow(before)
        early.extend([] if following is None else [following])
        return following

    monkeypatch.setattr(layout, "send_counts", watched_send)
    monkeypatch.setattr(pipeline, "_follow", watched_follow)
    most = 60 if min_match == 9 else 36  # until there are matches as long
    params = [replace(one, max_tokens=most) for one in (LONG, LONG, TORN)]
    check(host, llm, params, [*PROMPTS[:2], "y"])
    with_lookup = sources.rounds["both"] + sources.rounds["text"]
    assert 0 < with_lookup <= len(sent) < rounds.counters["replays"] - 5
    assert (len(early) > 5) == (min_match == 9)
    assert not fallbacks(rounds)


COMING = [
    ("block", "EAGLE3", CHAIN),
    ("sibling", "EAGLE3", "both"),
    ("rejection", "STANDALONE", CHAIN),
    ("target_only", "MTP layers", CHAIN),
    ("target_only, best drafts", "EAGLE", CHAIN),
    ("relaxed", "EAGLE3", CHAIN),
    ("target_only", "STANDALONE", "model"),
    ("target_only, best drafts", "MTP layers", "text"),
    ("relaxed", "EAGLE3", "text"),
]
MIXED = [*ENDS, *shortened([*FEATURES["all"], *FEATURES["grammars"]])]


@ON_CPU
@pytest.mark.parametrize(
    ("rule", "name", "shape"), [slow_unless(one == COMING[1], *one) for one in COMING]
)
def test_seed_keeps_its_text_as_requests_come_and_go_between_host_and_device(
    rule: str,
    name: str,
    shape: str,
    is_long: bool,
    folders: Folders,
    torn: Prompts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """How lookup's drafts are judged does not follow from whether a model drafts for others."""
    spec = spec_of(folders[name][1], rule, shape)
    host, llm, rounds, sources = pair_of(folders, name, spec, monkeypatch)
    params = MIXED if is_long else shortened(MIXED[::2], 28)
    come_and_go(host, llm, prompts_of(torn, folders, name), params, monkeypatch)
    assert rounds.counters["replays"] > 20
    assert fallbacks(rounds) <= (set() if shape == CHAIN else {NEARLY_FULL})
    assert sources.rounds.keys() >= {"model", "both"}


@ON_CPU
@SLOW
@pytest.mark.parametrize(
    ("rule", "shape"),
    [
        *((rule, CHAIN) for rule in ("rejection", "block", "relaxed")),
        *((rule, shape) for rule in ("sibling", "relaxed") for shape in TREES),
    ],
)
def test_kernels_decide_as_the_references_do(
    rule: str, shape: str, folders: Folders, torn: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's interpreter."""
    spec = spec_of(folders["EAGLE3"][1], rule, shape, min_match=1)
    host, llm, rounds, sources = pair_of(folders, "EAGLE3", spec, monkeypatch)
    prompts, params = prompts_of(torn, folders, "EAGLE3", 2), [replace(ALONE, max_tokens=20)] * 2
    modules = [accept_block, accept_rejection, accept_relaxed, accept_sibling, accept_target_only]
    modules += [weigh_rows, sample_rows, accept_chain]
    if shape != CHAIN:
        modules += [accept_path, draw_siblings, tree_build, tree_step, tree_shape]
    check_in_interpreter(host, llm, params, prompts, modules, monkeypatch)
    assert not fallbacks(rounds)
    assert sources.rounds["both"] + sources.rounds["text"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnTheGpu:
    def pair(
        self, folders: Folders, name: str, spec: SpecConfig, overlaps: bool = True
    ) -> tuple[LLM, LLM]:
        """Without graphs, and with them."""
        graphs = {"disable_cuda_graph": False, "cuda_graph_bs": (1, 2, 4, 8)}
        graphs |= {"disable_overlap_schedule": not overlaps}
        folder = folders[name][0]
        return make(folder, spec, **FLAGS), make(folder, spec, **FLAGS | graphs)

    @pytest.mark.parametrize("overlaps", [True, False], ids=["overlap", "no overlap"])
    @pytest.mark.parametrize(("rule", "name", "shape"), ENTIRE)
    def test_seed_has_the_text_that_it_has_without_graphs(
        self, rule: str, name: str, shape: str, overlaps: bool, folders: Folders, torn: Prompts
    ) -> None:
        spec = spec_of(folders[name][1], rule, shape)
        host, llm = self.pair(folders, name, spec, overlaps)
        prompts = prompts_of(torn, folders, name)
        for count in (6, 3, 1):
            check(host, llm, ENDS[:count], prompts[:count])
        check(host, llm, [ALONE], prompts)
        for params in FEATURES.values():
            check(host, llm, shortened(params), prompts)
        rounds = llm.engine.device_rounds
        assert rounds is not None
        assert {key.model_steps for key in rounds.captured} == {None, 3, 0}
        assert_replayed(llm, 60)

    @pytest.mark.parametrize(
        ("rule", "name", "shape"),
        [
            *((rule, name, CHAIN) for rule in ("block", "relaxed") for name in NAMES[1:3]),
            *(("sibling", "EAGLE3", shape) for shape in TREES),
            *(("relaxed", "STANDALONE", shape) for shape in TREES),
        ],
    )
    def test_seed_keeps_its_text_as_requests_come_and_go(
        self,
        rule: str,
        name: str,
        shape: str,
        folders: Folders,
        torn: Prompts,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        host, llm = self.pair(folders, name, spec_of(folders[name][1], rule, shape))
        come_and_go(host, llm, prompts_of(torn, folders, name), MIXED * 2, monkeypatch)
        assert llm.engine.pipeline is not None
        assert fallbacks(llm.engine.pipeline.executor) <= {NEARLY_FULL}
