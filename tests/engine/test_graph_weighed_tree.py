"""Trees under verifiers that weigh the target against the draft, in rounds on the device alone: a
seed says what it says in rounds of the host, as trees, limits and ends of requests do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.sampling import SpecControl
from specengine.engine.graph_tree import GraphTreeRound
from specengine.engine.graph_weighed_tree import GraphWeighedTreeRound
from specengine.engine.row_choices import BEST
from specengine.kernels import (
    accept_path,
    accept_sibling,
    accept_target_only,
    draw_siblings,
    tree_build,
    tree_step,
    weigh_rows,
)
from specengine.kernels.accept_sampled import Accepted, Draws, SampledRound
from tests.draft.mtp_reading import add_mtp
from tests.support.mtp_targets import TARGETS, predictable
from tests.engine.flying_world import come_and_go, let_fly
from tests.engine.test_graph_round import GREEDY, PROMPTS, SAMPLED, make
from tests.engine.test_graph_weighed import (
    CONTEXT,
    MANY,
    ON_CPU,
    check,
    fallbacks,
    flags,
    said,
)
from tests.halves import slow_but, thinned

NEARLY_FULL = "memory nearly full"  # or the context: nodes of a tree need a slot each
# algorithm, topk, levels, nodes, static
SHAPES = {
    "EAGLE, 2": ("EAGLE", 2, 3, 6, False),
    "EAGLE3, 2": ("EAGLE3", 2, 3, 8, False),
    "EAGLE3, 3": ("EAGLE3", 3, 4, 16, False),
    "EAGLE3, 4, static": ("EAGLE3", 4, 3, 12, True),
    "EAGLE3, one level": ("EAGLE3", 4, 1, 4, False),
    "EAGLE3, few nodes": ("EAGLE3", 2, 4, 4, False),
    "MTP, 2": ("MTP", 2, 3, 7, False),
}
# rule, and whether trees are sampled
RULES = {
    "of the best": ("target_only", False),
    "sibling": ("sibling", True),
    "target_only": ("target_only", True),
}
WISHES = [  # ends by max_tokens and by context, limits, every parameter, and greedy ones among them
    replace(SAMPLED[0], max_tokens=23),
    replace(GREEDY, max_tokens=20),
    replace(SAMPLED[2], max_tokens=None),
    replace(SAMPLED[3], max_tokens=30, speculative=SpecControl(num_steps=1)),
    replace(SAMPLED[4], max_tokens=2),
    replace(SAMPLED[5], max_tokens=None, speculative=SpecControl(num_steps=2)),
    replace(SAMPLED[4], max_tokens=25, seed=11, speculative=SpecControl(enabled=False)),
    replace(SAMPLED[3], max_tokens=15, seed=8, top_k=2),  # fewer tokens than siblings
]

Folders = dict[str, tuple[Path, SpecConfig]]


@pytest.fixture(scope="module")
def folders(
    target: Path,
    drafters: dict[str, str],
    small_models: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Folders:
    """Of each shape the target, and how it drafts."""
    with_mtp = tmp_path_factory.mktemp("weighed-trees")
    add_mtp(small_models[TARGETS["mimo"]], with_mtp, "mimo", 1)
    predictable(with_mtp, "mimo", 1, residue=0.2)
    found = {}
    for name, (algorithm, topk, steps, nodes, static) in SHAPES.items():
        spec = SpecConfig(
            algorithm=algorithm,
            draft_model_path=drafters.get(algorithm),
            verify="target_only",
            eagle_topk=topk,
            num_steps=steps,
            num_draft_tokens=nodes,
            static_tree=static,
        )
        found[name] = (target if algorithm in drafters else with_mtp), spec
    return found


def with_rule(spec: SpecConfig, rule: str) -> SpecConfig:
    verify, draws = RULES[rule]
    return replace(spec, verify=verify, draft_sampling=draws)


def pair_of(folders: Folders, name: str, rule: str = "of the best", **more: Any) -> tuple[LLM, LLM]:
    """The host's rounds, and those that are to fly."""
    folder, spec = folders[name]
    spec = with_rule(spec, rule)
    return make(folder, spec, **flags(**more)), make(folder, spec, **flags(**more))


def pair_on_the_gpu(folder: Path, spec: SpecConfig, overlap: bool, **more: Any) -> tuple[LLM, LLM]:
    """Without graphs, and with them."""
    more |= {"disable_radix_cache": True, "disable_overlap_schedule": not overlap}
    host = make(folder, spec, disable_cuda_graph=True, **flags(**more))
    return host, make(folder, spec, **flags(**more))


def assert_flew(llm: LLM, least: int) -> None:
    """More than so many rounds, and all but those near the context's end."""
    stats = llm.engine.stats().graphs["round"]
    assert stats.replays > least
    assert stats.fallbacks.keys() <= {NEARLY_FULL}


def check_in_the_interpreter(
    host: LLM,
    llm: LLM,
    prompts: Sequence[Any],
    params: list[SamplingParams],
    monkeypatch: pytest.MonkeyPatch,
    *more: ModuleType,
) -> None:
    """llm says what host does where Triton decides for it: what rounds of weighed trees run beside
    models, and more."""
    pytest.importorskip("triton")
    expected = [*said(host.generate(prompts, params))]
    rules = accept_target_only, accept_sibling
    for module in (weigh_rows, draw_siblings, *rules, accept_path, tree_build, tree_step, *more):
        monkeypatch.setattr(module, "use_triton", lambda backend, x: True)
    assert [*said(llm.generate(prompts, params))] == expected


@ON_CPU
@pytest.mark.parametrize(
    ("rule", "name", "overlaps"),
    thinned(2, RULES, [*((name, True) for name in SHAPES), ("EAGLE3, 2", False)]),
)
def test_seeds_say_what_they_say_on_the_host(
    rule: str, name: str, overlaps: bool, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, llm = pair_of(folders, name, rule)
    flying = let_fly(llm, monkeypatch, overlaps, most=8)
    assert isinstance(flying, GraphWeighedTreeRound)
    found = check(host, llm)
    assert fallbacks(flying) == {NEARLY_FULL}
    assert flying.counters["replays"] > 8
    assert any(form.choosing.weighs for form in flying.captured)
    totals = llm.engine.scheduler.spec_totals
    assert 10 < totals.num_accepted_tokens < totals.num_draft_tokens - 10
    lengths = [len(one.prompt_ids) + len(one.token_ids) for one in found]
    assert lengths.count(CONTEXT) == 2


@ON_CPU
@pytest.mark.parametrize(("rule", "count"), thinned(3, RULES, [1, 2, 3]))
def test_the_last_rounds_of_requests_that_end_by_themselves(
    rule: str, count: int, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody is near the context's end, every round flies: the last ones draft less."""
    host, llm = pair_of(folders, "EAGLE3, 3", rule, context_length=160)
    flying = let_fly(llm, monkeypatch, most=8)
    for seed in range(12):
        params = [replace(SAMPLED[4], seed=seed, max_tokens=3 + seed + i) for i in range(count)]
        check(host, llm, params, PROMPTS[:count])
    assert not fallbacks(flying)
    assert all(form.choosing.weighs for form in flying.captured)


@ON_CPU
def test_greedy_requests_alone_are_matched(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, llm = pair_of(folders, "EAGLE3, 2")
    flying = let_fly(llm, monkeypatch)
    found, expected = (one.generate(PROMPTS, [GREEDY] * 3) for one in (llm, host))
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert {form.choosing for form in flying.captured} == {BEST}
    assert not fallbacks(flying)


@ON_CPU
@pytest.mark.parametrize("rule", RULES)
def test_trees_of_a_batch_do_not_depend_on_each_other(
    rule: str, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule sees the nodes that the host's would, whatever the others of the batch may draft."""
    host, llm = pair_of(folders, "EAGLE3, 3", rule)
    trees: dict[LLM, dict[tuple[int, int], tuple[Any, Any]]] = {host: {}, llm: {}}
    for one in (host, llm):
        verifier = one.engine.parts.verifier
        kernel = verifier.kernel

        def judge(
            drafts: SampledRound,
            draws: Draws,
            *,
            backend: Any,
            one: LLM = one,
            kernel: Any = kernel,
        ) -> Accepted:
            for b, count in enumerate(drafts.exists_BN.sum(1).tolist()):
                columns = drafts.tokens_BN, drafts.parents_BN, drafts.depths_BN
                assert not drafts.exists_BN[b, count:].any()
                assert {tuple(x[b, count:].unique().tolist()) for x in columns[:2]} <= {(0,), ()}
                assert set(drafts.depths_BN[b, count:].tolist()) <= {-1}
                rows = drafts.draft_BNV
                if rows is not None:
                    rows = None if drafts.greedy_B[b] else rows[b, 1:count].clone()
                key = int(draws.seeds_B[b]), int(draws.positions_B[b])
                trees[one][key] = [x[b, :count].tolist() for x in columns], rows
            return kernel(drafts, draws, backend=backend)

        monkeypatch.setattr(verifier, "kernel", judge)
    let_fly(llm, monkeypatch, most=8)
    wishes = [replace(one, max_tokens=min(one.max_tokens or 40, 40)) for one in WISHES]
    check(host, llm, [replace(one, seed=number + 1) for number, one in enumerate(wishes)])
    assert len({len(nodes[0]) for nodes, _ in trees[host].values()}) > 4
    needs_rows = llm.engine.parts.verifier.needs_draft_probs
    for key, (nodes, rows) in trees[host].items():
        found, found_rows = trees[llm][key]
        assert found == nodes
        if needs_rows and rows is not None:
            torch.testing.assert_close(found_rows, rows, rtol=1e-4, atol=1e-5)


@ON_CPU
def test_a_token_behind_the_path_may_be_the_next_draft(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which stood for nothing: what the rule says is what is counted."""

    tempted = Counter[bool]()

    def judge(self: GraphWeighedTreeRound, drafts: SampledRound, draws: Draws) -> Accepted:
        ends_B = drafts.children(torch.zeros_like(drafts.roots_B)).int().argmax(1)
        below_BN = drafts.children(ends_B)
        tempted.update(below_BN.any(1).tolist())
        child_B1 = below_BN.int().argmax(1, keepdim=True)
        return Accepted(ends_B, drafts.tokens_BN.gather(1, child_B1)[:, 0])

    monkeypatch.setattr(GraphWeighedTreeRound, "judge", judge)
    _, llm = pair_of(folders, "EAGLE3, 2")
    flying = let_fly(llm, monkeypatch, most=4)
    found = llm.generate(PROMPTS, [replace(SAMPLED[0], max_tokens=21)] * 3)
    assert [one.spec.histogram for one in found] == [[0, 10]] * 3
    assert tempted[True] > 20
    assert all(form.choosing.weighs for form in flying.captured)


@ON_CPU
@pytest.mark.parametrize(("rule", "name"), thinned(2, RULES, ["EAGLE3, 3", "MTP, 2"]))
def test_requests_come_and_go_between_both_kinds_of_rounds(
    rule: str, name: str, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever runs around it, a seed says what it says alone; held back by min_tokens, too."""
    host, llm = pair_of(folders, name, rule, disable_radix_cache=True)
    flying = let_fly(llm, monkeypatch, most=8)
    held = replace(SAMPLED[1], temperature=0.9, seed=9, min_tokens=5, max_tokens=22)
    wishes = [*WISHES, replace(held, ignore_eos=False)]
    come_and_go(host, llm, [*MANY, "0a"], wishes, monkeypatch)
    assert flying.counters["replays"] > 10
    assert fallbacks(flying) <= {NEARLY_FULL}


@ON_CPU
@pytest.mark.parametrize("rule", slow_but(["sibling", "target_only"], RULES))
def test_kernels_decide_what_the_reference_does(
    rule: str, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's interpreter."""
    host, llm = pair_of(folders, "EAGLE3, 2", rule)
    flying = let_fly(llm, monkeypatch)
    wishes = SAMPLED[2], GREEDY, replace(SAMPLED[3], speculative=SpecControl(num_steps=2))
    params = [replace(one, max_tokens=7) for one in wishes]
    check_in_the_interpreter(host, llm, PROMPTS, params, monkeypatch)
    assert not fallbacks(flying)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnTheGpu:
    @pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
    @pytest.mark.parametrize("name", SHAPES)
    @pytest.mark.parametrize("rule", RULES)
    def test_graphs_change_nothing(
        self, rule: str, name: str, overlap: bool, folders: Folders
    ) -> None:
        folder, spec = folders[name]
        host, llm = pair_on_the_gpu(folder, with_rule(spec, rule), overlap)
        for count in (8, 3, 1):
            check(host, llm, WISHES[:count], MANY[:count])
        assert_flew(llm, 20)

    def test_greedy_requests_are_matched(self, folders: Folders) -> None:
        folder, spec = folders["EAGLE3, 2"]
        llm = make(folder, spec, **flags())
        assert isinstance(llm.engine.graph_round, GraphTreeRound)
        plain = make(folder, None, disable_cuda_graph=True, **flags())
        found, expected = (one.generate(PROMPTS, [GREEDY] * 3) for one in (llm, plain))
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
