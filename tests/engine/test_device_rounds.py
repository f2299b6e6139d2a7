"""Rounds on the device decide what rounds of the host decide, without graphs and in graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specengine import SamplingParams, SpecConfig, SpecControl
from specengine.core.batch import ScheduleBatch
from specengine.core.request import Req
from specengine.core.rows import RowBatch
from specengine.core.spec import VerifyResult
from specengine.draft.eagle import worker as eagle
from specengine.draft.loop_graphs import DraftLoops, LoopKey
from specengine.engine.adaptive.choose import DrafterPause
from specengine.engine.adaptive.costs import StepCosts
from specengine.engine.adaptive.state import DepthChooser
from specengine.engine.llm import Generation
from specengine.engine.pipeline import RoundPipeline
from specengine.engine.round import sampling
from specengine.engine.round.key import InFlightRound
from specengine.kernels.kv.keep_rows import keep_rows
from tests.halves import each_value, slow_but
from tests.support.device_rounds import (
    come_and_go,
    make_eager_rounds,
    make_on_device,
    prepare_drafter,
    run_on_device,
)
from tests.support.plain import plain_says
from tests.support.rounds import (
    BIASED,
    EDITED,
    GREEDY,
    NEW_TOKENS,
    NOT_READY,
    ON_CPU,
    ON_GPU,
    PROMPTS,
    SAMPLED,
    WHERE,
    WITH_LOGPROBS,
    assert_close,
    assert_same,
    assert_same_tokens,
    fallbacks,
    make,
)

# algorithm, and the shape of its drafts
CHAINS: dict[str, tuple[str, dict[str, Any]]] = {
    "EAGLE": ("EAGLE", {"num_steps": 3}),
    "EAGLE3": ("EAGLE3", {"num_steps": 3}),
    "STANDALONE": ("STANDALONE", {"num_steps": 3}),
    "MTP": ("MTP", {"num_steps": 3}),
    "MTP layers": ("MTP layers", {"num_steps": 3}),
    "NGRAM": ("NGRAM", {"ngram_min_match": 1}),
    "SUFFIX": ("SUFFIX", {"num_draft_tokens": 6}),
}


def tree_of(algorithm: str, topk: int, steps: int, nodes: int, static: bool = False) -> Any:
    shape = {"eagle_topk": topk, "num_steps": steps, "num_draft_tokens": nodes}
    return algorithm, {**shape, "static_tree": static}


TREES: dict[str, tuple[str, dict[str, Any]]] = {
    "tree of EAGLE": tree_of("EAGLE", 2, 3, 6),
    "tree": tree_of("EAGLE3", 4, 4, 16),
    "narrow tree": tree_of("EAGLE3", 2, 3, 8),
    "static tree": tree_of("EAGLE3", 4, 3, 16, static=True),
    "narrow static tree": tree_of("EAGLE3", 2, 4, 8, static=True),
    "tree of one level": tree_of("EAGLE3", 4, 1, 4),
    "tree of MTP": tree_of("MTP", 2, 3, 8),
    "tree of STANDALONE": tree_of("STANDALONE", 3, 4, 16),
    "static tree of STANDALONE": tree_of("STANDALONE", 4, 3, 12, static=True),
    "one level of STANDALONE": tree_of("STANDALONE", 4, 1, 4),
    "few nodes of STANDALONE": tree_of("STANDALONE", 2, 4, 4),
}
KINDS = CHAINS | TREES
PARAMS = {
    "greedy": [GREEDY] * 3,
    "sampled": SAMPLED[:3],
    "edited": EDITED,
    "biased": BIASED,
    "logprobs": WITH_LOGPROBS,
}
# Each kind of chain once (EAGLE-3's are EAGLE's, and one layer of MTP is drafted as the first of
# several), and of trees each kind of shape: what all trees accept, another test says.
FAST = [
    ("plain", "greedy"),
    ("EAGLE3", "biased"),
    ("STANDALONE", "edited"),
    ("MTP layers", "greedy"),
    ("NGRAM", "logprobs"),
    ("SUFFIX", "biased"),
    ("tree", "sampled"),
    ("static tree", "logprobs"),
]
FAST_TREES = [
    ("tree of EAGLE", "greedy"),
    ("narrow static tree", "greedy"),
    ("tree of MTP", "greedy"),
    ("few nodes of STANDALONE", "biased"),
]
MANY = [PROMPTS[i % 3] + str(i) for i in range(12)]
Specs = Callable[[str], tuple[Path, SpecConfig | None]]


@pytest.fixture
def spec_of(
    target: Path, drafters: dict[str, str], folders: dict[str, tuple[Path, SpecConfig]]
) -> Specs:
    """The target of a kind of drafter, and how it drafts."""

    def found(kind: str) -> tuple[Path, SpecConfig | None]:
        if kind == "plain":
            return target, None
        name, shape = KINDS[kind]
        path = drafters.get(name)
        algorithm = name.split()[0]
        spec = SpecConfig(algorithm=algorithm, adaptive=False, draft_model_path=path, **shape)
        return (folders[name][0] if algorithm == "MTP" else target), spec

    return found


def assert_plain(
    found: list[Generation], folder: Path, prompts: list[str], params: list[SamplingParams]
) -> None:
    """They are what plain decoding on the host gives."""
    expected = plain_says(folder, prompts, params, disable_cuda_graph=True)
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert_close(one.completions[0].logprobs, other.completions[0].logprobs)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(("kind", "asked"), slow_but(FAST, product(["plain", *KINDS], PARAMS)))
def test_device_rounds_emit_and_accept_what_host_rounds_do(
    kind: str, asked: str, where: str, is_long: bool, spec_of: Specs
) -> None:
    """Three requests in a round of four: one row is padding. Then on prefix hits."""
    (folder, spec), params = spec_of(kind), PARAMS[asked]
    llm, rounds = make_on_device(where, folder, spec)
    host = make(folder, spec, disable_cuda_graph=True)
    # Of penalties the device counts a round's drafts, and text is padded.
    counts = asked not in ("edited", "logprobs") and kind not in ("NGRAM", "SUFFIX", *TREES)
    for most in (NEW_TOKENS, NEW_TOKENS) if is_long else (18, 10):
        params = [replace(one, max_tokens=most) for one in params]
        found = llm.generate(PROMPTS, params)
        assert_plain(found, folder, PROMPTS, params)
        llm.engine.scheduler.check_invariant()
        if counts:
            expected = host.generate(PROMPTS, params)
            for mine, its in zip(found, expected, strict=True):
                assert mine.spec.histogram == its.spec.histogram
    assert not fallbacks(rounds)
    assert rounds.counters[f"fallback: {NOT_READY}"] <= 3
    assert rounds.counters["replays"] > 10
    if kind not in ("plain", "NGRAM", "SUFFIX"):
        assert llm.engine.scheduler.spec_totals.num_accepted_tokens > 5


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(
    "kind",
    slow_but(["NGRAM", "tree"], ["plain", "EAGLE3", "MTP layers", "NGRAM", "tree"]),
)
def test_device_rounds_without_overlap_change_no_token(
    kind: str, where: str, spec_of: Specs
) -> None:
    folder, spec = spec_of(kind)
    llm, rounds = make_on_device(where, folder, spec, overlaps=False)
    greedy = PARAMS["greedy"]
    shorter = [replace(one, max_tokens=12) for one in SAMPLED[:3]]
    for params, count in [(greedy, 1), (shorter, 3), (EDITED, 2)]:
        found = llm.generate(PROMPTS[:count], params[:count])
        assert_plain(found, folder, PROMPTS[:count], params[:count])
    assert not fallbacks(rounds)


@ON_CPU
@pytest.mark.parametrize(("kind", "asked"), each_value(1, TREES, ["biased", "greedy"]))
def test_device_trees_are_those_of_the_host(kind: str, asked: str, spec_of: Specs) -> None:
    """Rows are reversed, with one of padding, so that no order hides a mistake."""
    folder, spec = spec_of(kind)
    llm = make(folder, spec)
    rounds, engine = run_on_device(llm), llm.engine
    for i, (prompt, one) in enumerate(zip(PROMPTS, PARAMS[asked], strict=True)):
        engine.add_request(str(i), llm.tokenizer.encode(prompt), one)
    engine.step()  # the prefill
    batch = engine.scheduler.schedule()
    assert batch is not None
    assert rounds.can_run(batch)
    given, key = rounds.host_view.write(batch.reqs), rounds.plain_key(4, rounds.steps[-1])
    key = key._replace(sampling=rounds.sampling.features_of(batch.reqs))
    rounds.sampling.write(batch.reqs, given, key.sampling)
    drafter = engine.parts.drafter
    expected = drafter.draft(batch)
    rows_B = torch.cat([given, torch.zeros(1, dtype=torch.int64)]).flip(0)
    rows = RowBatch(rows_B, rounds.state.lens[rows_B], rounds.state.roots[rows_B])
    options = rounds.round.draft_options(rows, key)
    assert (options.edits is None) == (asked == "greedy")
    tree = drafter.draft_tree_rows(rows, key.num_steps, options.edits)
    for i, count in enumerate(expected.num_nodes):
        row = len(PROMPTS) - i
        assert count == tree.tokens_BN.shape[1]
        assert tree.tokens_BN[row].tolist() == expected.tokens[i, :count].tolist()
        assert tree.parents_BN[row].tolist() == expected.parents[i, :count].tolist()
        assert torch.equal(tree.depths_BN[row], tree.mask_BNN[row].sum(1) - 1)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(
    ("kind", "asked"), slow_but(FAST_TREES, product(TREES, ["greedy", "biased"]))
)
def test_device_trees_accept_what_host_trees_do(
    kind: str, asked: str, where: str, spec_of: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round by round. The last rounds of a request are smaller on the host, so that it runs
    longer there."""
    (folder, spec), params = spec_of(kind), PARAMS[asked]
    host = make(folder, spec, disable_cuda_graph=True)
    llm, rounds = make_on_device(where, folder, spec)
    mine, its = Accepted(), Accepted()
    host.engine.host_round.recorders.append(its)
    collect = rounds.collect

    def watched(in_flight: InFlightRound) -> VerifyResult:
        result = collect(in_flight)
        mine.add(in_flight.reqs, result)
        return result

    monkeypatch.setattr(rounds, "collect", watched)
    host.generate(PROMPTS, [replace(one, max_tokens=NEW_TOKENS + 16) for one in params])
    llm.generate(PROMPTS, params)
    assert mine.counts.keys() == its.counts.keys()
    for rid, found in mine.counts.items():
        expected = its.counts[rid]
        count = next(n for n in range(len(found) + 1) if sum(found[:n]) + n >= NEW_TOKENS - 1)
        assert found[:count] == expected[:count]
    assert sum(map(sum, mine.counts.values())) > 5


class Accepted:
    """How many drafts each round accepted, by request."""

    def __init__(self) -> None:
        self.counts: dict[str, list[int]] = {}

    def add(self, reqs: list[Req], result: VerifyResult) -> None:
        for req, count in zip(reqs, result.num_accepted, strict=True):
            self.counts.setdefault(req.rid, []).append(count)

    def record(self, batch: ScheduleBatch, _: object, __: object, result: VerifyResult) -> None:
        """As a RoundRecorder."""
        self.add(batch.reqs, result)


@ON_CPU
@pytest.mark.parametrize("kind", slow_but(["EAGLE3"], ["EAGLE", "EAGLE3"]))
def test_only_last_accepted_rows_run_where_rows_are_many(
    kind: str, spec_of: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []

    def keep(states: Tensor, rows: Tensor, new_TH: Tensor, chosen: Tensor) -> None:
        kept.append(len(new_TH) // len(rows))
        keep_rows(states, rows, new_TH, chosen)

    monkeypatch.setattr(eagle, "MANY_ROWS", 8)
    monkeypatch.setattr(eagle, "keep_rows", keep)
    test_device_rounds_emit_and_accept_what_host_rounds_do(kind, "greedy", "cpu", False, spec_of)
    assert 1 in kept


@pytest.mark.slow  # the fast half has test_random_workloads.py
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(
    "kind",
    ["plain", "EAGLE3", "STANDALONE", "MTP layers", "NGRAM", "tree", "tree of STANDALONE"],
)
def test_requests_come_and_go_between_host_and_device_rounds(
    kind: str, where: str, is_long: bool, spec_of: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows change their owners, and tokens counted on the device are taken over by the host."""
    folder, spec = spec_of(kind)
    host = make(folder, None, disable_cuda_graph=True)
    flags = {"max_running_requests": 4, "page_size": 16}
    llm, rounds = make_on_device(where, folder, spec, **flags)
    mixed = [*EDITED, *SAMPLED, *WITH_LOGPROBS[:2]]
    params = [replace(one, max_tokens=9 + (2 * i if is_long else i)) for i, one in enumerate(mixed)]
    come_and_go(host, llm, MANY, params, monkeypatch)
    assert not fallbacks(rounds)
    assert rounds.counters["replays"] > 10


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(
    ("kind", "overlaps"),
    slow_but(
        [("STANDALONE", True), ("EAGLE3", False), ("tree", True)],
        product(["STANDALONE", "EAGLE3", "tree"], [True, False]),
    ),
)
def test_drafts_are_counted_as_on_the_host_wherever_outputs_end(
    kind: str, overlaps: bool, where: str, is_long: bool, spec_of: Specs
) -> None:
    folder, spec = spec_of(kind)
    assert spec is not None
    if kind == "STANDALONE":
        spec = replace(spec, draft_model_path=str(folder))
    llm, rounds = make_on_device(where, folder, spec, overlaps)
    if kind == "tree":
        for count, drafted in ((2, 0), (3, spec.eagle_topk)):
            for one in llm.generate(PROMPTS, replace(GREEDY, max_tokens=count)):
                assert one.spec.num_draft_tokens == drafted, "levels that can be accepted"
        return
    host = make(folder, spec, disable_cuda_graph=True)
    for count in range(2, 14) if is_long else range(2, 9):
        assert_same(host, llm, PROMPTS, replace(GREEDY, max_tokens=count))
    totals = llm.engine.scheduler.spec_totals
    assert totals == host.engine.scheduler.spec_totals
    assert rounds.counters["replays"] > 12
    if kind == "STANDALONE":
        assert totals.num_accepted_tokens == totals.num_draft_tokens, "it drafts for itself"


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("kind", ["EAGLE3", "NGRAM"])
def test_requests_draft_no_deeper_than_they_allow(kind: str, where: str, spec_of: Specs) -> None:
    """In rows that change their owners."""
    limited = [
        (replace(GREEDY, max_tokens=20), 3),
        (replace(GREEDY, max_tokens=9, speculative=SpecControl(enabled=False)), 0),
        (replace(SAMPLED[0], max_tokens=14, speculative=SpecControl(num_steps=1)), 1),
    ]
    folder, spec = spec_of(kind)
    assert spec is not None
    if kind == "NGRAM":
        spec = replace(spec, num_draft_tokens=4)
    host = make(folder, spec, disable_cuda_graph=True)
    llm, rounds = make_on_device(where, folder, spec)
    for order in ([0, 1, 2], [1, 2, 0], [1]):
        prompts, params = [PROMPTS[i] for i in order], [limited[i][0] for i in order]
        found, expected = llm.generate(prompts, params), host.generate(prompts, params)
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
        for i, one, other in zip(order, found, expected, strict=True):
            most = limited[i][1]
            assert len(one.spec.histogram) <= most + 1
            if not most:
                assert (one.spec.num_draft_tokens, one.spec.num_accepted) == (0, 0)
            if kind == "EAGLE3":  # accepted padding counts as a draft of text
                assert one.spec.histogram == other.spec.histogram
    assert rounds.counters["replays"] > 5
    assert not fallbacks(rounds)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(
    "kind",
    slow_but(["EAGLE3", "NGRAM", "tree"], ["plain", "EAGLE3", "NGRAM", "narrow tree", "tree"]),
)
def test_requests_end_with_the_context(kind: str, where: str, spec_of: Specs) -> None:
    folder, spec = spec_of(kind)
    flags = {"context_length": 64}
    host = make(folder, None, disable_cuda_graph=True, **flags)
    llm, rounds = make_on_device(where, folder, spec, **flags)
    assert_same_tokens(host, llm, PROMPTS, replace(GREEDY, max_tokens=None))
    assert rounds.counters["replays"] > 0


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("kind", slow_but(["tree"], ["EAGLE3", "tree"]))
def test_memory_nearly_full_changes_no_token(kind: str, where: str, spec_of: Specs) -> None:
    folder, spec = spec_of(kind)
    params = [replace(GREEDY, max_tokens=20 + 6 * i) for i in range(8)]
    flags = {"max_total_tokens": 256, "page_size": 4, "context_length": 150}
    llm, rounds = make_on_device(where, folder, spec, **flags)
    assert_plain(llm.generate(MANY[:8], params), folder, MANY[:8], params)
    llm.engine.scheduler.check_invariant()
    assert rounds.counters["replays"] > 0


@pytest.mark.parametrize("where", WHERE)
def test_more_edits_than_tables_run_on_the_host(
    where: str, spec_of: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "MAX_EDITING", 1)
    folder, spec = spec_of("EAGLE3")
    llm, rounds = make_on_device(where, folder, spec)
    params = [EDITED[0], replace(EDITED[1], max_tokens=9), SAMPLED[0]]
    assert_plain(llm.generate(PROMPTS, params), folder, PROMPTS, params)
    assert rounds.counters["replays"] > 0
    assert fallbacks(rounds) == {"more requests edit their logits than there are tables for"}


@ON_CPU
def test_request_of_which_a_layer_has_seen_too_little_runs_on_the_host(spec_of: Specs) -> None:
    """What lies before its first row may be another request's."""
    folder, spec = spec_of("MTP layers")
    llm, rounds = make_on_device("cpu", folder, spec)
    worker: Any = llm.engine.parts.drafter
    llm.generate(PROMPTS[:1], GREEDY)
    llm.engine.add_request("again", llm.tokenizer.encode(PROMPTS[0]), GREEDY)
    for _ in range(2):  # what is still in flight, and the prefill
        llm.engine.step()
    batch = llm.engine.scheduler.schedule()
    assert batch is not None
    (req,) = batch.reqs
    assert req.prefix_hit_len == len(req.prompt_ids) - 1
    assert not worker.is_ready(req)
    assert not rounds.can_run(batch)
    assert rounds.counters[f"fallback: {NOT_READY}"] == 1
    loops = DraftLoops(worker, (1,), True, rounds.counters)
    assert loops._key_of(batch, 3) == NOT_READY
    worker._first[req] -= 2
    assert rounds.can_run(batch)
    assert loops._key_of(batch, 3) == LoopKey(1, 3, edited=False)


@ON_CPU
def test_rounds_that_a_paused_drafter_misses_change_no_token(spec_of: Specs) -> None:
    folder, spec = spec_of("MTP layers")
    assert spec is not None
    params = [replace(GREEDY, max_tokens=60)] * 3
    llm = make(folder, replace(spec, adaptive=True))
    prepare_drafter(llm)
    parts, rounds = llm.engine.parts, make_eager_rounds(llm, chooses=True)
    for cost_of_none in (1.0, 0.1):
        costs = StepCosts({4: {0: cost_of_none, 1: 1.01, 2: 1.02, 3: 4.0}})
        depths = DepthChooser(rounds.steps, costs)
        pipeline = RoundPipeline(rounds, parts.drafter, parts.scheduler, depths, overlaps=True)
        pipeline.depths.pause = DrafterPause(paused=4, active=3)
        llm.engine.pipeline = pipeline
        assert_plain(llm.generate(PROMPTS, params), folder, PROMPTS, params)
    keys = {(key.num_steps, key.paused) for key in rounds.captured}
    assert keys >= {(0, False), (0, True), (2, False)}


@pytest.mark.parametrize("where", [pytest.param("gpu", marks=ON_GPU)])
@pytest.mark.parametrize("kind", ["EAGLE3", "MTP layers", "NGRAM", "narrow tree"])
def test_depths_that_change_do_not_change_tokens(kind: str, where: str, spec_of: Specs) -> None:
    folder, spec = spec_of(kind)
    assert spec is not None
    host = make(folder, None, disable_cuda_graph=True)
    llm, _ = make_on_device(where, folder, replace(spec, adaptive=True))
    params = [replace(one, max_tokens=200) for one in (GREEDY, *SAMPLED[:2])]
    for count in (3, 1):
        assert_same_tokens(host, llm, PROMPTS[:count], params[:count])
    assert llm.engine.stats().depth is not None


@pytest.mark.parametrize("where", [pytest.param("gpu", marks=ON_GPU)])
@pytest.mark.parametrize("kind", ["plain", "EAGLE", "EAGLE3"])
def test_prompts_that_come_together_share_a_prefill_graph(
    kind: str, where: str, spec_of: Specs
) -> None:
    """As many as one graph serves, of many lengths, and some that the cache knows in part."""
    folder, spec = spec_of(kind)
    host = make(folder, None, disable_cuda_graph=True)
    llm = make(folder, spec)
    for count, length in ((12, 1), (64, 2), (30, 1)):
        prompts = [PROMPTS[i % 3] * length + str(i % 40) for i in range(count)]
        assert_same_tokens(host, llm, prompts, replace(GREEDY, max_tokens=6))
    stats = llm.engine.stats().graphs
    assert stats["prefill"].replays >= 3
    assert not stats["prefill"].fallbacks
    assert kind == "plain" or not stats["draft"].fallbacks
