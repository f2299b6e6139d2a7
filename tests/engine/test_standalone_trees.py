"""Trees of a smaller model in rounds on the device alone: they are the host's, and tokens are those
of plain decoding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.engine.flying_world import come_and_go, let_fly
from tests.engine.test_graph_limits import LIMITS, PARAMS
from tests.engine.test_graph_round import BIASED, EDITED, GREEDY, NEW_TOKENS, PROMPTS, SAMPLED, make
from tests.engine.test_graph_round import let_fly as allow
from tests.engine.test_graph_tree import ByHand, Counts, check_logprobs, same_tree
from tests.engine.test_graph_weighed import MANY, ON_CPU, fallbacks, flags
from torch import Tensor

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.batch import ForwardBatch
from specengine.core.sampling import SpecControl
from specengine.engine import graph_tree
from specengine.engine.adaptive.estimate import smaller_sizes
from specengine.engine.flights import Flights
from specengine.engine.graph_tree import GraphTreeRound
from specengine.engine.proof.any_depth import AnyDepth
from specengine.kernels import accept_tree, tree_build, tree_step
from tests.halves import thinned
from tests.support.plain import plain_says

# topk, levels, nodes, static
SHAPES = {
    "2": (2, 3, 6, False),
    "3": (3, 4, 16, False),
    "4, static": (4, 3, 12, True),
    "one level": (4, 1, 4, False),
    "few nodes": (2, 4, 4, False),
}
NEARLY_FULL = "memory nearly full"

Folders = dict[str, tuple[Path, SpecConfig]]


def specs_of(folders: Folders) -> dict[str, SpecConfig]:
    return {
        name: replace(
            folders["STANDALONE"][1],
            adaptive=False,
            eagle_topk=topk,
            num_steps=steps,
            num_draft_tokens=nodes,
            static_tree=static,
        )
        for name, (topk, steps, nodes, static) in SHAPES.items()
    }


@pytest.fixture(scope="module")
def specs(folders: Folders) -> dict[str, SpecConfig]:
    return specs_of(folders)


def pair_of(target: Path, spec: SpecConfig, **more: Any) -> tuple[LLM, LLM]:
    """The host's rounds, and those that are to fly."""
    host, llm = (make(target, spec, **flags(**more)) for _ in range(2))
    allow(llm)
    return host, llm


@ON_CPU
@pytest.mark.parametrize(("name", "overlaps"), thinned(2, SHAPES, [True, False]))
def test_tokens_are_those_of_plain_decoding(
    name: str,
    overlaps: bool,
    target: Path,
    specs: dict[str, SpecConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wherever they end."""
    _, llm = pair_of(target, specs[name])
    flying = let_fly(llm, monkeypatch, overlaps)
    assert type(flying) is GraphTreeRound
    wishes = [GREEDY, *SAMPLED[2:4], replace(GREEDY, logit_bias={5: 2.0, 9: -3.0})]
    for count in (1, 2, 4):
        for length in (2, 3, 9, 40):
            params = [replace(one, max_tokens=length + n) for n, one in enumerate(wishes[:count])]
            found = llm.generate(MANY[:count], params)
            expected = plain_says(target, MANY[:count], params, **flags())
            assert [one.token_ids for one in found] == [one.token_ids for one in expected]
            llm.engine.scheduler.check_invariant()
    assert flying.counters.keys() == {"captures", "replays"}, "nothing took the host's round"
    totals = llm.engine.scheduler.spec_totals
    assert 20 < totals.num_accepted_tokens < totals.num_draft_tokens


@ON_CPU
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("params", [[GREEDY] * 3, BIASED], ids=["greedy", "biased"])
def test_trees_are_those_of_the_host(
    name: str,
    params: list[SamplingParams],
    target: Path,
    specs: dict[str, SpecConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In as many places as are asked for."""
    llm = make(target, specs[name], device="cpu")
    allow(llm)
    hand = ByHand(llm, params)
    expected, rows = hand.drafter.draft(hand.batch), hand.row_batch()
    edits, ends = hand.round.draft_edits(rows, hand.choosing), list[Tensor]()
    new_row_batch = hand.drafter.runner.new_row_batch

    def watched(*given: Any) -> ForwardBatch:
        ends.append((batch := new_row_batch(*given)).seq_lens)
        return batch

    monkeypatch.setattr(hand.drafter.runner, "new_row_batch", watched)
    tree = hand.drafter.draft_tree_rows(rows, hand.round.steps[-1], edits)
    for i in range(len(PROMPTS)):
        same_tree(tree, len(PROMPTS) - i, expected, i)
    most = torch.stack(ends).amax(0) - rows.lens_B
    assert most[1:].unique().tolist() == [hand.drafter.row_slots], "but for padding"


@ON_CPU
@pytest.mark.parametrize("name", SHAPES)
def test_rounds_accept_what_the_host_does(
    name: str, target: Path, specs: dict[str, SpecConfig]
) -> None:
    host, llm = pair_of(target, specs[name])
    hand, counts = ByHand(llm, [GREEDY] * 3), Counts()
    found, accepted = hand.generate()
    host.engine.round.recorders.append(counts)
    # The last rounds of a request may be smaller.
    more = hand.drafter.max_nodes
    expected = host.generate(PROMPTS, replace(GREEDY, max_tokens=NEW_TOKENS + more))
    assert found == [one.token_ids[:NEW_TOKENS] for one in expected]
    for mine, its in zip(accepted, counts.accepted.values(), strict=True):
        rounds = next(n for n in range(len(mine) + 1) if sum(mine[:n]) + n >= NEW_TOKENS - 1)
        assert mine[:rounds] == its[:rounds]


@ON_CPU
@pytest.mark.parametrize("params", [SAMPLED[:3], EDITED], ids=["sampled", "edited"])
def test_tokens_are_chosen_as_requests_want(
    params: list[SamplingParams],
    target: Path,
    specs: dict[str, SpecConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, (_, llm) = make(target, None, **flags()), pair_of(target, specs["3"])
    flying = let_fly(llm, monkeypatch)
    found, expected = (one.generate(PROMPTS, params) for one in (llm, plain))
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    check_logprobs(llm, target)
    assert flying.counters.keys() == {"captures", "replays"}


@ON_CPU
def test_limits_are_kept(
    target: Path, specs: dict[str, SpecConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, llm = pair_of(target, specs["3"])
    flying = let_fly(llm, monkeypatch)
    for order in ([0, 1, 2], [1, 2, 0], [1]):
        found, expected = (
            one.generate([PROMPTS[i] for i in order], [PARAMS[i] for i in order])
            for one in (llm, host)
        )
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
        for i, one in zip(order, found, strict=True):
            assert LIMITS[i] >= 3 or len(one.spec.histogram) <= LIMITS[i] + 1
    assert flying.counters.keys() == {"captures", "replays"}


@ON_CPU
@pytest.mark.parametrize("name", ["2", "3"])
def test_requests_come_and_go_between_both_kinds_of_rounds(
    name: str, target: Path, specs: dict[str, SpecConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, llm = pair_of(target, specs[name])
    flying = let_fly(llm, monkeypatch, most=8)
    wishes = [replace(one, max_tokens=11 + 4 * n) for n, one in enumerate([*SAMPLED, *EDITED])]
    wishes[2] = replace(wishes[2], max_tokens=None, speculative=SpecControl(num_steps=2))
    come_and_go(host, llm, MANY, wishes, monkeypatch)
    assert flying.counters["replays"] > 20
    assert fallbacks(flying) <= {NEARLY_FULL}


@ON_CPU
def test_depths_and_sizes_that_change_change_no_token(
    target: Path, specs: dict[str, SpecConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None among them."""
    plain, (_, llm) = make(target, None, **flags()), pair_of(target, specs["3"])
    monkeypatch.setattr(graph_tree, "_MANY", 1)
    let_fly(llm, monkeypatch)
    parts, steps = llm.engine.parts, [0, 1, 2, 4]
    flying = GraphTreeRound(parts.worker, cast(Any, parts.drafter), steps, [1, 2, 4])
    flying.sizes = smaller_sizes(steps, flying.drafter.num_tree_nodes)
    depths = AnyDepth(steps, flying.sizes)
    llm.engine.flights = Flights(flying, parts.drafter, parts.scheduler, depths, True)
    for params in ([replace(GREEDY, max_tokens=40)] * 3, SAMPLED[:3], EDITED):
        found, expected = (one.generate(PROMPTS, params) for one in (llm, plain))
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert flying.counters.keys() == {"captures", "replays"}
    assert {form.num_steps for form in flying.captured} == {*steps}
    assert len({form.num_nodes for form in flying.captured}) > 3
    assert llm.engine.scheduler.spec_totals.num_accepted_tokens > 20


@ON_CPU
def test_kernels_decide_what_the_reference_does(
    target: Path, specs: dict[str, SpecConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's interpreter."""
    pytest.importorskip("triton")
    host, llm = pair_of(target, specs["2"])
    let_fly(llm, monkeypatch)
    params = [replace(one, max_tokens=8) for one in (GREEDY, SAMPLED[2])]
    expected = [one.token_ids for one in host.generate(PROMPTS[:2], params)]
    for module in (accept_tree, tree_build, tree_step):
        monkeypatch.setattr(module, "use_triton", lambda backend, x: True)
    assert [one.token_ids for one in llm.generate(PROMPTS[:2], params)] == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnTheGpu:
    @pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
    @pytest.mark.parametrize("name", SHAPES)
    def test_graphs_change_nothing(
        self, name: str, overlap: bool, target: Path, specs: dict[str, SpecConfig]
    ) -> None:
        eager = make(target, specs[name], disable_cuda_graph=True)
        more = {"disable_overlap_schedule": not overlap, "cuda_graph_bs": (1, 2, 8)}
        llm = make(target, specs[name], **more)
        for params in ([GREEDY] * 3, SAMPLED[:3], EDITED):
            for count in (1, 3, 2):
                expected = eager.generate(PROMPTS[:count], params[:count])
                found = llm.generate(PROMPTS[:count], params[:count])
                assert [one.token_ids for one in found] == [one.token_ids for one in expected]
                llm.engine.scheduler.check_invariant()
        stats = llm.engine.stats().graphs["round"]
        assert stats.replays > 20
        assert not stats.fallbacks
        check_logprobs(llm, target)

    def test_depths_that_change_do_not_change_tokens(
        self, target: Path, specs: dict[str, SpecConfig]
    ) -> None:
        eager = make(target, None, disable_cuda_graph=True)
        llm = make(target, replace(specs["3"], adaptive=True))
        params = replace(GREEDY, max_tokens=200)
        for count in (3, 1):
            expected = [one.token_ids for one in eager.generate(PROMPTS[:count], params)]
            assert [one.token_ids for one in llm.generate(PROMPTS[:count], params)] == expected
        assert llm.engine.stats().depth is not None
