"""Trees of text under target_only, in rounds on the device alone: a seed says what it says on the
host, for the rule sees the host's trees, whatever larger ones were there before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine import LLM, SpecConfig
from specengine.core.sampling import SpecControl
from specengine.engine.graph_weighed_tree import GraphWeighedTreeRound
from specengine.engine.row_choices import BEST
from specengine.kernels import accept_path, accept_target_only, tree_shape, weigh_rows
from specengine.kernels.accept_sampled import Accepted, Draws, SampledRound
from tests.engine.flying_world import come_and_go, let_fly
from tests.engine.test_graph_round import GREEDY, SAMPLED, make
from tests.engine.test_graph_weighed import MANY, ON_CPU, check, fallbacks, flags, said
from tests.engine.test_graph_weighed_tree import NEARLY_FULL
from tests.halves import thinned

TEXT: dict[str, Any] = {"adaptive": False, "verify": "target_only"}
SPECS = {
    "NGRAM": SpecConfig(
        algorithm="NGRAM", ngram_branches=2, ngram_min_match=1, num_draft_tokens=12, **TEXT
    ),
    "SUFFIX": SpecConfig(
        algorithm="SUFFIX", suffix_branches=2, suffix_factor=6.0, num_draft_tokens=16, **TEXT
    ),
}
SPECS["hybrid"] = replace(SPECS["NGRAM"], hybrid_suffix=True, hybrid_suffix_min_match=3)
SPECS["corpus"] = replace(SPECS["NGRAM"], ngram_shared_corpus=True)  # which nobody drafts ahead
CONTEXT = 230
# Between two tokens everywhere, so that text goes on now like this and now like that.
TORN = replace(GREEDY, temperature=9.0, top_k=2, max_tokens=130)
DRAWN = replace(GREEDY, temperature=3.0, top_k=2, max_tokens=48)
ENDS = [  # by max_tokens and by context, limits, and greedy ones among those that sample
    replace(DRAWN, seed=31),
    replace(GREEDY, max_tokens=41),
    replace(DRAWN, seed=32, max_tokens=None),
    replace(DRAWN, seed=33, speculative=SpecControl(num_steps=1)),
    replace(SAMPLED[4], max_tokens=2),
    replace(DRAWN, seed=34, max_tokens=None, speculative=SpecControl(num_steps=4)),
    replace(DRAWN, seed=35, max_tokens=33, speculative=SpecControl(enabled=False)),
    replace(TORN, seed=36, max_tokens=37),
]


@pytest.fixture(scope="module")
def prompts(target: Path) -> list[Any]:
    """What the target has said; and two of which nothing is drafted at first."""
    llm = make(target, None, **given())
    torn = llm.generate(MANY[:6], [replace(TORN, seed=seed) for seed in range(6)])
    return [*(one.token_ids for one in torn), *MANY[6:]]


def given(**more: Any) -> dict[str, Any]:
    return flags(context_length=CONTEXT, **more)


def pair_of(name: str, target: Path) -> tuple[LLM, LLM]:
    """The host's rounds, and those that are to fly."""
    return make(target, SPECS[name], **given()), make(target, SPECS[name], **given())


@ON_CPU
@pytest.mark.parametrize(("name", "overlaps"), thinned(2, SPECS, [True, False]))
def test_seeds_say_what_they_say_on_the_host(
    name: str, overlaps: bool, target: Path, prompts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, llm = pair_of(name, target)
    flying = let_fly(llm, monkeypatch, overlaps, most=8)
    assert isinstance(flying, GraphWeighedTreeRound)
    found = check(host, llm, ENDS, prompts)
    assert fallbacks(flying) == {NEARLY_FULL}
    lengths = [len(one.prompt_ids) + len(one.token_ids) for one in found]
    assert lengths.count(CONTEXT) == 2
    flying.counters.clear()
    for count in (1, 2, 4, 8):  # what larger rounds have left stands behind
        params = [replace(one, seed=40 + count, max_tokens=50) for one in ENDS[:count]]
        check(host, llm, params, prompts[:count])
    assert flying.counters.keys() <= {"captures", "replays"}, "nothing took the host's round"
    weighed = {form.num_steps for form in flying.captured if form.choosing.weighs}
    assert weighed == {*flying.steps}
    totals = llm.engine.scheduler.spec_totals
    assert totals == host.engine.scheduler.spec_totals
    assert 100 < totals.num_accepted_tokens < totals.num_draft_tokens - 100


@ON_CPU
@pytest.mark.parametrize("name", SPECS)
def test_the_rule_sees_the_trees_of_the_host(
    name: str, target: Path, prompts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, llm = pair_of(name, target)
    trees: dict[LLM, dict[tuple[int, int], Any]] = {host: {}, llm: {}}
    for one in (host, llm):
        verifier: Any = one.engine.parts.verifier

        def judge(
            drafts: SampledRound,
            draws: Draws,
            *,
            backend: Any,
            one: LLM = one,
            kernel: Any = verifier.kernel,
        ) -> Accepted:
            for b, count in enumerate(drafts.exists_BN.sum(1).tolist()):
                columns = drafts.tokens_BN, drafts.parents_BN, drafts.depths_BN
                assert not drafts.exists_BN[b, count:].any()
                assert [{*x[b, count:].tolist()} - {0, -1} for x in columns[1:]] == [set()] * 2
                key = int(draws.seeds_B[b]), int(draws.positions_B[b])
                trees[one][key] = [x[b, :count].tolist() for x in columns]
            found: Accepted = kernel(drafts, draws, backend=backend)
            return found

        monkeypatch.setattr(verifier, "kernel", judge)
    let_fly(llm, monkeypatch, most=8)
    params = [replace(one, max_tokens=40, seed=n + 1) for n, one in enumerate(ENDS)]
    check(host, llm, params, prompts)
    drafted = {key: nodes for key, nodes in trees[host].items() if len(nodes[0]) > 1}
    assert {key: trees[llm][key] for key in drafted} == drafted
    assert len(drafted) > 50
    chains = [parents == [0, *range(len(parents) - 1)] for _, parents, _ in drafted.values()]
    assert chains.count(False) > 3, "some branch"


@ON_CPU
@pytest.mark.parametrize("name", ["NGRAM", "SUFFIX"])
def test_greedy_requests_alone_are_matched(
    name: str, target: Path, prompts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, llm = pair_of(name, target)
    flying = let_fly(llm, monkeypatch)
    check(host, llm, [GREEDY] * 3, prompts[:3])
    assert {form.choosing for form in flying.captured} == {BEST}
    assert not fallbacks(flying)


@ON_CPU
@pytest.mark.parametrize("name", ["NGRAM", "SUFFIX"])
def test_requests_come_and_go(
    name: str, target: Path, prompts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, llm = pair_of(name, target)
    flying = let_fly(llm, monkeypatch, most=8)
    come_and_go(host, llm, prompts, ENDS, monkeypatch)
    assert flying.counters["replays"] > 20
    assert fallbacks(flying) <= {NEARLY_FULL}


@ON_CPU
def test_kernels_decide_what_the_reference_does(
    target: Path, prompts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's interpreter."""
    pytest.importorskip("triton")
    host, llm = pair_of("NGRAM", target)
    flying = let_fly(llm, monkeypatch)
    params = [replace(one, max_tokens=7) for one in (ENDS[0], GREEDY, ENDS[3])]
    expected = [*said(host.generate(prompts[:3], params))]
    for module in (weigh_rows, accept_target_only, accept_path, tree_shape):
        monkeypatch.setattr(module, "use_triton", lambda backend, x: True)
    assert [*said(llm.generate(prompts[:3], params))] == expected
    assert not fallbacks(flying)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnTheGpu:
    @pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
    @pytest.mark.parametrize("name", SPECS)
    def test_graphs_change_nothing(
        self, name: str, overlap: bool, target: Path, prompts: list[Any]
    ) -> None:
        more = given(disable_radix_cache=True, disable_overlap_schedule=not overlap)
        host = make(target, SPECS[name], disable_cuda_graph=True, **more)
        llm = make(target, SPECS[name], **more)
        for count in (8, 3, 1):
            check(host, llm, ENDS[:count], prompts[:count])
        stats = llm.engine.stats().graphs["round"]
        assert stats.replays > 40
        assert stats.fallbacks.keys() <= {NEARLY_FULL}
