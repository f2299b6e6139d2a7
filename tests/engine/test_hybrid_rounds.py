"""A model's drafts beside suffix matches in rounds on the device: tokens are plain decoding's, and
what is drafted and accepted is what it is in rounds of the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, product
from pathlib import Path
from typing import Any, cast

import pytest
from torch import Tensor

from specengine import LLM, GrammarSpec, SamplingParams, SpecConfig, SpecControl
from specengine.core.spec_stats import DepthChoice
from specengine.draft.hybrid import HybridDrafter
from specengine.draft.standalone.worker import StandaloneWorker
from specengine.engine.adaptive.acceptance import HybridAcceptance, RoundObservation
from specengine.engine.adaptive.costs import RunningCosts, StepCosts
from specengine.engine.adaptive.state import DepthChooser
from specengine.engine.forward_graphs_build import kinds_of_rounds
from specengine.engine.launched import Launched
from specengine.engine.pipeline import RoundPipeline
from specengine.engine.round.executor import RoundExecutor
from specengine.engine.round.key import RoundPlan
from specengine.engine.round.sampling import PLAIN
from specengine.kernels.native import suffix
from tests.halves import each_value, slow_but
from tests.support.device_rounds import come_and_go, make_on_device
from tests.support.draft_kv import assert_same_kv
from tests.support.hybrid import (
    LONG,
    NAMES,
    NODES,
    PASSAGE,
    PROMPTS,
    TREE_CASES,
    Drafted,
    Folders,
    Prompts,
    Sources,
    compare_drafted,
    hybrid,
    kind_of,
    make,
    source_of,
    trees,
    watched_rounds,
)
from tests.support.plain import plain_says
from tests.support.rounds import (
    EDITED,
    ON_CPU,
    SAMPLED,
    WHERE,
    assert_same,
    assert_same_tokens,
    fallbacks,
)

SURE = replace(LONG, temperature=0.15, top_k=3, seed=21)
TORN = replace(LONG, temperature=3.0, top_k=2, seed=21)
CHAIN_PARAMS = {
    "greedy": [LONG] * 4,
    "sampled": [SURE, replace(SAMPLED[0], max_tokens=50), LONG, replace(SURE, seed=22)],
    "limited": [
        replace(LONG, speculative=SpecControl(num_steps=1)),
        replace(SURE, max_tokens=31),
        replace(LONG, speculative=SpecControl(enabled=False)),
        replace(LONG, max_tokens=43, speculative=SpecControl(num_steps=5)),
    ],
}
TREE_PARAMS = {
    "greedy": [LONG] * 4,
    "mixed": [
        replace(LONG, speculative=SpecControl(num_steps=1)),
        replace(TORN, max_tokens=45),
        replace(SAMPLED[0], max_tokens=50, speculative=SpecControl(num_steps=5)),
        replace(LONG, speculative=SpecControl(enabled=False)),
    ],
}
GRAMMAR = GrammarSpec.regex("[a-c ]{30}(to be or not ){4}")
FEATURES = {
    "edits": [
        replace(LONG, frequency_penalty=-0.8, logit_bias={5: 2.0, 9: -3.0}),
        replace(SURE, presence_penalty=0.4, min_tokens=9, stop_token_ids=(7,)),
        replace(EDITED[1], max_tokens=40),
        replace(LONG, repetition_penalty=0.9),
    ],
    "logprobs": [replace(LONG, logprobs=2), replace(SURE, logprobs=0), LONG, SURE],
    "grammars": [replace(LONG, grammar=GRAMMAR), replace(SURE, grammar=GRAMMAR), SURE, LONG],
}
# Drafter, nodes of the deepest match, parameters: as deep as the model drafts, and deeper.
# Rounds of EAGLE-3 are those of EAGLE; all trees have limits, and some sampled.
FAST = [("EAGLE", 8, "greedy"), ("MTP layers", 4, "sampled")]
FAST_TREES = TREE_CASES[2:4]  # a kind for a drafter; other tests have matches of MTP's layers
EVERY = [(name, nodes, one) for name in NAMES for nodes in (4, 8) for one in CHAIN_PARAMS]


COMING = [
    ("EAGLE3", None, 3),
    ("EAGLE3", None, 8),
    ("STANDALONE", None, 7),
    ("MTP layers", None, 3),
    ("EAGLE3", "both", 16),
    ("STANDALONE", "model", 3),
    ("MTP layers", "text", 3),
]


def on_device(
    where: str,
    folder: Path,
    spec: SpecConfig,
    monkeypatch: pytest.MonkeyPatch,
    overlaps: bool = True,
    **flags: Any,
) -> tuple[LLM, RoundExecutor, Sources]:
    """where: as to make_on_device."""
    llm, rounds = make_on_device(where, folder, spec, overlaps, **flags)
    sources = Sources()
    sources.watch(rounds, monkeypatch)
    assert source_of(rounds)
    return llm, rounds, sources


def flags_of(where: str) -> dict[str, Any]:
    """On a GPU a prefix hit is rounded otherwise than a whole prompt."""
    return {"disable_radix_cache": True} if where == "gpu" else {}


def ending_by(params: Sequence[SamplingParams], most: int) -> list[SamplingParams]:
    """Those without drafts in half as many tokens: each of theirs is a round of all."""
    limits = [most // 2 if one.speculative.max_depth == 0 else most for one in params]
    pairs = zip(params, limits, strict=True)
    return [replace(one, max_tokens=min(one.max_tokens or most, most)) for one, most in pairs]


def assert_plain(llm: LLM, folder: Path, prompts: list[Any], params: list[SamplingParams]) -> None:
    found = llm.generate(prompts, params)
    expected = plain_says(folder, prompts, params, disable_cuda_graph=True)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    llm.engine.scheduler.check_invariant()


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(("name", "nodes", "asked"), slow_but(FAST, EVERY))
def test_hybrid_chains_emit_and_accept_what_host_rounds_do(
    name: str,
    nodes: int,
    asked: str,
    where: str,
    is_long: bool,
    folders: Folders,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (folder, spec), flags = folders[name], flags_of(where)
    spec = hybrid(spec, nodes)
    host = make(folder, spec, **flags)
    llm, rounds, sources = on_device(where, folder, spec, monkeypatch, **flags)
    batches = ((4, 60), (1, 40), (2, 24)) if is_long else ((4, 44), (1, 20))
    for count, most in batches:  # with captures, and on prefix hits
        prompts, params = PROMPTS[:count], CHAIN_PARAMS[asked][:count]
        params = params if is_long else ending_by(params, most)
        found = assert_same(host, llm, prompts, params)
        plain = plain_says(folder, prompts, params, disable_cuda_graph=True)
        assert [one.token_ids for one in found] == [one.token_ids for one in plain]
    assert not fallbacks(rounds)
    assert llm.engine.scheduler.spec_totals == host.engine.scheduler.spec_totals
    if asked == "greedy":
        assert sources.rounds.keys() == {"model", "both", "text"}
        assert min(sources.accepted["model"], sources.accepted["text"]) > 20
        assert {key.num_steps for key in sources.keys} == {3, nodes - 1}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(
    ("name", "kind", "asked"),
    slow_but(
        [(*case, "mixed") for case in FAST_TREES],
        [(*case, asked) for case in TREE_CASES for asked in TREE_PARAMS],
    ),
)
def test_hybrid_trees_emit_and_accept_what_host_rounds_do(
    name: str,
    kind: str,
    asked: str,
    where: str,
    is_long: bool,
    folders: Folders,
    torn: Prompts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (folder, spec), flags = folders[name], flags_of(where)
    spec = trees(spec, kind)
    host = make(folder, spec, **flags)
    llm, rounds, sources = on_device(where, folder, spec, monkeypatch, **flags)
    its, mine = Drafted(), Drafted()
    mine.watch(llm, monkeypatch)
    host.engine.host_round.recorders.append(its)
    for count, most in ((4, 26), (1, 20)) if is_long else ((4, 20),):
        prompts, params = torn[folder][:count], TREE_PARAMS[asked][:count]
        params = params if is_long else ending_by(params, most)
        found, _ = (one.generate(prompts, params) for one in (llm, host))
        plain = plain_says(folder, prompts, params, disable_cuda_graph=True)
        assert [one.token_ids for one in found] == [one.token_ids for one in plain]
        assert compare_drafted(mine, its, found) > 3 * count
        mine.counts.clear()
        its.counts.clear()
        llm.engine.scheduler.check_invariant()
    assert not fallbacks(rounds)
    if asked == "greedy":
        assert sources.rounds.keys() == {"model", "both", "text"}
        assert min(sources.accepted["model"], sources.accepted["text"]) > 20
        assert {key.num_steps for key in sources.keys} == {3, NODES - 1}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(("shape", "corpus"), each_value(1, ["chains", "trees"], [True, False]))
def test_hybrid_rounds_without_drafts_ahead_are_those_of_the_host(
    shape: str,
    corpus: bool,
    where: str,
    is_long: bool,
    folders: Folders,
    torn: Prompts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (folder, spec), flags = folders["EAGLE3"], flags_of(where)
    given = {"suffix_shared_corpus": True, "suffix_corpus_tokens": 500} if corpus else {}
    spec = hybrid(spec, **given) if shape == "chains" else trees(spec, "both", **given)
    given_long = LONG if is_long else replace(LONG, max_tokens=36 if corpus else 28)
    host = make(folder, spec, **flags)
    llm, rounds, sources = on_device(where, folder, spec, monkeypatch, overlaps=corpus, **flags)
    assert llm.engine.pipeline is not None
    assert llm.engine.pipeline._prefetch is None
    its, mine = Drafted(), Drafted()
    mine.watch(llm, monkeypatch)
    host.engine.host_round.recorders.append(its)
    if shape == "chains":
        for count in (1, 3):
            assert_same(host, llm, PROMPTS[:count], [given_long] * count)
    else:
        found = assert_same_tokens(host, llm, torn[folder][:3], [given_long] * 3)
        assert compare_drafted(mine, its, found) > 9
    assert not fallbacks(rounds)
    assert sources.rounds["text" if shape == "chains" else "both"] > 1


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(
    ("name", "kind", "asked"),
    slow_but(
        [
            ("STANDALONE", None, "logprobs"),
            ("EAGLE3", "both", "grammars"),
            ("STANDALONE", "text", "edits"),
        ],
        product(("EAGLE3", "STANDALONE"), (None, "both", "text"), FEATURES),
    ),
)
def test_hybrid_rounds_serve_every_sampling_feature(
    name: str,
    kind: str | None,
    asked: str,
    where: str,
    folders: Folders,
    torn: Prompts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (folder, spec), flags = folders[name], flags_of(where)
    spec = hybrid(spec) if kind is None else trees(spec, kind)
    llm, rounds, sources = on_device(where, folder, spec, monkeypatch, **flags)
    assert_plain(
        llm,
        folder,
        PROMPTS if kind is None else torn[folder],
        ending_by(FEATURES[asked], 34 if asked == "grammars" else 30),
    )
    assert not fallbacks(rounds)
    assert min(sources.accepted["model"], sources.accepted["text"]) > 5


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.slow  # the fast half has test_random_workloads.py, and trees that are judged
@pytest.mark.parametrize(("name", "kind", "min_match"), COMING)
def test_requests_come_and_go_between_host_and_device_hybrid_rounds(
    name: str,
    kind: str | None,
    min_match: int,
    where: str,
    is_long: bool,
    folders: Folders,
    torn: Prompts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """min_match: with long ones, some rounds of the model follow at once."""
    folder, spec = folders[name]
    given: dict[str, Any] = {"hybrid_suffix_min_match": min_match, "adaptive": where == "gpu"}
    spec = hybrid(spec, **given) if kind is None else trees(spec, kind, **given)
    flags: dict[str, Any] = {"max_running_requests": 4}
    flags["max_total_tokens"] = 2048 if kind is None else 4096
    llm, rounds, sources = on_device(where, folder, spec, monkeypatch, **flags)
    used = CHAIN_PARAMS if kind is None else TREE_PARAMS
    params = [*(one for some in used.values() for one in some), *FEATURES["grammars"]]
    prompts = [*PROMPTS, PASSAGE] if kind is None else torn[folder]
    if where == "cpu" and not is_long:
        params = ending_by(params, 24)
    come_and_go(make(folder, None), llm, prompts, params, monkeypatch)
    assert rounds.counters["replays"] > 30
    assert not fallbacks(rounds)
    if where == "cpu":
        assert sources.rounds.keys() >= {"model", "both"}


@ON_CPU
@pytest.mark.parametrize(
    ("name", "is_compiled"),
    slow_but([("EAGLE3", False)], product(("EAGLE3", "STANDALONE"), (True, False))),
)
def test_rounds_of_the_model_follow_at_once_where_no_match_can_be_long_enough(
    name: str,
    is_compiled: bool,
    is_long: bool,
    folders: Folders,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rounds in flight may emit four tokens each; what is drafted is what it would be."""
    if not is_compiled:
        monkeypatch.setattr(suffix, "is_compiled", lambda: False)
    folder, spec = folders[name]
    spec = hybrid(spec, hybrid_suffix_min_match=9)
    host, llm = make(folder, spec), make(folder, spec)
    rounds, sources = watched_rounds(llm, monkeypatch)
    pipeline, drafter = llm.engine.pipeline, llm.engine.drafter
    assert pipeline is not None
    assert isinstance(drafter, HybridDrafter)
    follow, followed = pipeline._follow, Counter[int]()

    def watched(before: Launched) -> Launched | None:
        following = follow(before)
        if following is not None and following.in_flight.key.num_steps:
            assert all(drafter.suffix.match_length(req) < 5 for req in following.in_flight.reqs)
            assert following.drafting == 0.0
            followed[len(following.in_flight.reqs)] += 1
        return following

    monkeypatch.setattr(pipeline, "_follow", watched)
    for count, most in ((4, 36), (1, 36), (2, 60)):
        params = [replace(LONG, max_tokens=90 if is_long else most)] * count
        assert_same(host, llm, [*PROMPTS[1:], "y"][:count], params)
    assert not fallbacks(rounds)
    assert followed.keys() >= {1, 2}
    assert sources.accepted["text"] > 20
    assert not drafter.suffix._texts, "of requests that have ended"


@ON_CPU
@pytest.mark.parametrize("name", slow_but(["EAGLE3"], ["EAGLE3", "STANDALONE"]))
def test_the_model_drafts_only_where_a_request_has_no_match(
    name: str, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As deep as it can; and nothing is sent where no request has a match."""
    folder, spec = folders[name]
    llm = make(folder, hybrid(spec))
    rounds, sources = watched_rounds(llm, monkeypatch)
    source, asked, sends = source_of(rounds), list[int](), list[list[int]]()
    draft_rows, send = source.model.drafter.draft_rows, source.lookup.send

    def watched(rows: Any, num_steps: int, picks: Any = None) -> Tensor:
        asked.append(num_steps)
        return draft_rows(rows, num_steps, picks)

    def sending(proposal: Any, levels: list[int]) -> RoundPlan:
        sends.append(proposal.num_drafted)
        return send(proposal, levels)

    monkeypatch.setattr(source.model.drafter, "draft_rows", watched)
    monkeypatch.setattr(source.lookup, "send", sending)
    llm.generate(PROMPTS, [LONG] * 4)
    llm.generate(PROMPTS[0], LONG)
    captured = sum(key.model_steps != 0 for key in rounds.captured)
    assert set(asked) == {3}
    assert len(asked) == captured + sources.rounds["model"] + sources.rounds["both"]
    with_text = sources.rounds["text"] + sources.rounds["both"]
    assert with_text <= len(sends) <= with_text + len(rounds.captured), "again after a capture"
    assert all(map(any, sends))
    assert sources.rounds["text"] > 1


@dataclass(frozen=True)
class Observed:
    """A RoundObservation, as far as tests read it."""

    num_steps: int
    num_drafted: Sequence[int]
    limits: Sequence[int]
    from_lookup: Sequence[bool]


def steered(
    llm: LLM, rounds: RoundExecutor, chosen: Iterator[int], monkeypatch: pytest.MonkeyPatch
) -> list[Observed]:
    """From now on depths are those. Returns what is observed."""
    costs = RunningCosts(StepCosts({1: {0: 1.0, rounds.steps[-1]: 1.5}}))
    depths = DepthChooser(rounds.steps, costs, model_steps=3, pads=True)
    decisions = (DepthChoice(depth, "as the test wants", None) for depth in chosen)
    monkeypatch.setattr(depths, "choose", lambda size: next(decisions))
    seen, observe = list[Observed](), depths.observe

    def observed(one: RoundObservation) -> None:
        assert one.limits is not None
        assert max(one.limits) <= one.num_steps
        from_lookup = one.from_lookup or [False] * one.batch_size
        seen.append(Observed(one.num_steps, one.num_drafted, one.limits, from_lookup))
        observe(one)

    monkeypatch.setattr(depths, "observe", observed)
    parts = llm.engine.parts
    llm.engine.pipeline = RoundPipeline(rounds, parts.drafter, parts.scheduler, depths, True)
    return seen


@ON_CPU
def test_no_chain_is_deeper_than_the_depth_that_was_chosen(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is learned is told that depth, and the source of each draft."""
    folder, spec = folders["EAGLE3"]
    llm = make(folder, hybrid(spec))
    rounds, sources = watched_rounds(llm, monkeypatch)
    rounds.steps = [0, 1, 2, 3, 7]
    seen = steered(llm, rounds, cycle([7, 7, 2, 0, 3, 1, 0, 0, 7]), monkeypatch)
    for count in (3, 1):
        assert_plain(llm, folder, PROMPTS[:count], [LONG] * count)
    kinds = set[tuple[int, str]]()
    for one in seen:
        found, limits, num_steps = one.from_lookup, one.limits, one.num_steps
        assert all(mark or limit <= 3 for mark, limit in zip(found, limits, strict=True))
        if num_steps:
            kinds.add((num_steps, "text" if all(found) else "both" if any(found) else "model"))
    some = {(depth, kind) for depth in (2, 3, 7) for kind in ("model", "both")}
    assert kinds >= some | {(7, "text")}
    shallow = [one for one in sources.keys if kind_of(one) == "both" and one.num_steps in (1, 2)]
    assert shallow
    assert all(one.model_steps == one.num_steps for one in shallow)
    assert {one.num_steps for one in seen if max(one.limits)} == {1, 2, 3, 7}
    assert {key.num_steps for key in sources.keys} == {0, 1, 2, 3, 7}
    assert not fallbacks(rounds)


@ON_CPU
@pytest.mark.parametrize(
    ("kind", "nodes"),
    slow_but([("text", NODES)], [(None, 4), (None, 8), ("model", NODES), ("text", NODES)]),
)
def test_start_and_background_captures_are_all_that_rounds_need(
    kind: str | None,
    nodes: int,
    is_long: bool,
    folders: Folders,
    torn: Prompts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever depth is chosen, which requests have a match, and whether any samples; and no token
    changes with the depth."""
    folder, spec = folders["EAGLE3"]
    spec = hybrid(spec, nodes) if kind is None else trees(spec, kind)
    llm = make(folder, spec)
    rounds, sources = watched_rounds(llm, monkeypatch)
    rounds.steps = sorted({0, 2, 3, nodes - 1} | ({1} if is_long else set()))
    rounds.capture()
    seen = steered(llm, rounds, cycle([*rounds.steps, 3, 2]), monkeypatch)
    while llm.engine.use_idle_moment():
        pass
    captures, keys = rounds.counters["captures"], rounds.keys(1, PLAIN)
    assert captures == len(rounds.captured) == 2 * len(keys) * 3
    assert len(keys) <= kinds_of_rounds(replace(spec, adaptive=True)), "memory is kept for these"
    prompts, drawn = (PROMPTS, SURE) if kind is None else (torn[folder], TORN)
    for count, most in ((4, 30), (2, 16), (1, 20)):
        for params in ([LONG] * count, [drawn] * count):
            given = params if is_long else ending_by(params, most)
            assert_plain(llm, folder, prompts[:count], given)
    assert rounds.counters["captures"] == captures
    assert sources.rounds.keys() == {"model", "both", "text"}
    assert {key.num_steps for key in sources.keys} == {*rounds.steps}
    assert any(any(one.from_lookup) for one in seen)
    source = source_of(rounds)
    for one in seen:
        pairs = zip(one.num_drafted, one.from_lookup, strict=True)
        own = [count for count, is_lookup in pairs if not is_lookup]
        is_tree = kind is not None and one.num_steps > 0
        assert not is_tree or max(own, default=0) < source._model_num_nodes(one.num_steps)
    assert not fallbacks(rounds)


@ON_CPU
@pytest.mark.parametrize("name", slow_but(["EAGLE3"], ["EAGLE3", "STANDALONE"]))
def test_depths_chosen_by_cost_learn_from_either_source(
    name: str, folders: Folders, torn: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, spec = folders[name]
    llm = make(folder, trees(spec, "both", adaptive=True))
    rounds, sources = watched_rounds(llm, monkeypatch)
    rounds.steps = [0, 1, 2, 3, NODES - 1]
    depths, parts = DepthChooser(rounds.steps, model_steps=3, pads=True), llm.engine.parts
    llm.engine.pipeline = RoundPipeline(rounds, parts.drafter, parts.scheduler, depths, True)
    for asked in (LONG, TORN, LONG):
        params = [replace(asked, max_tokens=28)] * 3
        assert_plain(llm, folder, torn[folder][:3], params)
    acceptance = depths.acceptance
    assert isinstance(acceptance, HybridAcceptance)
    assert acceptance.model.smallest.tried[0] > 0
    assert acceptance.lookup.smallest.tried[0] > 0
    assert 0.0 < acceptance.lookup_share < 1.0
    assert depths.kept(3) is not None
    assert None not in {depths.costs.of(4, one) for one in rounds.steps}
    assert len({key.num_steps for key in sources.keys}) > 2
    assert not fallbacks(rounds)


@ON_CPU
@pytest.mark.parametrize("name", slow_but(["EAGLE3"], ["EAGLE3", "STANDALONE"]))
def test_hybrid_trees_run_on_the_host_where_nodes_would_lie_past_the_context(
    name: str, folders: Folders, torn: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, spec = folders[name]
    context = {"context_length": 300}
    llm = make(folder, trees(spec, "both"), **context)
    rounds, _ = watched_rounds(llm, monkeypatch)
    params = [replace(one, max_tokens=None) for one in (LONG, TORN, LONG)]
    one, other = torn[folder][0], torn[folder][2]
    prompts = [one, other[:280], one[:240]]
    found = assert_same_tokens(make(folder, None, **context), llm, prompts, params)
    assert {len(one.prompt_ids) + len(one.token_ids) for one in found} == {300}
    assert fallbacks(rounds) == {"memory nearly full"}
    assert rounds.counters["replays"] > 10


@ON_CPU
@pytest.mark.parametrize(("kind", "nodes"), [("model", 5), ("text", NODES)])
def test_smaller_model_has_its_kv_whatever_the_source_of_drafts(
    kind: str, nodes: int, folders: Folders, torn: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but that of the last two tokens: what a prompt of the same text would leave. nodes: where
    all of a short draft is accepted, its last two tokens have not been run."""
    folder, spec = folders["STANDALONE"]
    llm, host = make(folder, trees(spec, kind, nodes)), make(folder, spec)
    _, sources = watched_rounds(llm, monkeypatch, overlaps=False)
    drafter = cast(HybridDrafter, llm.engine.drafter).inner
    for n in (0, 2):
        llm.engine.add_request(str(n), torn[folder][n][-100:], replace(LONG, max_tokens=150))
    reqs = [*llm.engine.choices]
    for _ in range(16):
        for _ in ("launched", "collected"):
            llm.engine.step()
        if any(req.is_finished for req in reqs):
            break
        assert_same_kv(cast(StandaloneWorker, drafter), reqs, host)
    assert sources.rounds.keys() == {"model", "both", "text"}
