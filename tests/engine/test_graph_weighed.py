"""Chains under verifiers that weigh drafts, in rounds on the device alone: a seed says what it says
in rounds of the host, as drafts, limits and ends of requests do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.sampling import SpecControl
from specengine.engine.graph_round import GraphRound
from specengine.engine.graph_weighed import GraphWeighedRound
from specengine.engine.llm import Generation
from specengine.engine.row_choices import BEST
from specengine.kernels import accept_block, accept_chain, weigh_rows
from specengine.kernels.accept_sampled import Accepted, Draws, SampledRound
from tests.engine.flying_world import come_and_go, let_fly
from tests.engine.test_graph_mtp import SEEN_TOO_LITTLE
from tests.engine.test_graph_round import GREEDY, PROMPTS, SAMPLED, make
from tests.halves import thinned

ON_CPU = pytest.mark.skipif(
    torch.cuda.is_available(), reason="graphs are tested where there is a GPU"
)
RULES = ["rejection", "block", "target_only"]
CONTEXT = 96
MANY = [*PROMPTS, "ab", "The lazy dog", "01" * 30, "y z", "The quick brown fox"]
WISHES = [  # ends by max_tokens and by context, limits, every parameter, and greedy ones among them
    replace(SAMPLED[0], max_tokens=23),
    replace(GREEDY, max_tokens=20),
    replace(SAMPLED[2], max_tokens=None),
    replace(SAMPLED[3], max_tokens=30, speculative=SpecControl(num_steps=1)),
    replace(SAMPLED[4], max_tokens=2),
    replace(SAMPLED[5], max_tokens=None),
    replace(SAMPLED[4], max_tokens=25, seed=11, speculative=SpecControl(enabled=False)),
    replace(SAMPLED[6], max_tokens=9),
]


def flags(**more: Any) -> dict[str, Any]:
    return {"context_length": CONTEXT, "max_running_requests": 8} | more


def let_drafters_fly(llm: LLM) -> None:
    if hasattr(llm.engine.drafter, "flies"):
        llm.engine.drafter.flies = True


def said(outputs: list[Generation]) -> Iterator[Any]:
    for one in outputs:
        (found,) = one.completions
        yield (
            found.token_ids,
            found.finish_reason,
            found.spec.histogram,
            found.spec.num_draft_tokens,
        )


def check(
    host: LLM, llm: LLM, params: list[SamplingParams] = WISHES, prompts: list[str] = MANY
) -> list[Generation]:
    found, expected = llm.generate(prompts, params), host.generate(prompts, params)
    assert [*said(found)] == [*said(expected)]
    llm.engine.scheduler.check_invariant()
    return found


def fallbacks(flying: GraphRound) -> set[str]:
    names = (name for name in flying.counters if name.startswith("fallback: "))
    return {name.removeprefix("fallback: ") for name in names} - {SEEN_TOO_LITTLE}


@ON_CPU
@pytest.mark.parametrize(
    ("rule", "name", "overlaps"),
    thinned(
        2,
        [*RULES, "sibling", "greedy drafts"],
        [
            *((name, True) for name in ("EAGLE", "EAGLE3", "MTP", "MTP layers", "STANDALONE")),
            *((name, False) for name in ("EAGLE3", "STANDALONE")),
        ],
    ),
)
def test_seeds_say_what_they_say_on_the_host(
    rule: str,
    name: str,
    overlaps: bool,
    folders: dict[str, tuple[Path, SpecConfig]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, spec = folders[name]
    drawn = rule != "greedy drafts"
    spec = replace(spec, verify=rule if drawn else "target_only", draft_sampling=drawn)
    host, llm = make(folder, spec, **flags()), make(folder, spec, **flags())
    let_drafters_fly(llm)
    flying = let_fly(llm, monkeypatch, overlaps, most=8)
    assert isinstance(flying, GraphWeighedRound)
    found = check(host, llm)
    assert not fallbacks(flying)
    assert flying.counters["replays"] > 20
    assert any(form.choosing.weighs for form in flying.captured)
    totals = llm.engine.scheduler.spec_totals
    assert 10 < totals.num_accepted_tokens < totals.num_draft_tokens - 10
    lengths = [len(one.prompt_ids) + len(one.token_ids) for one in found]
    assert lengths.count(CONTEXT) == 2


def spec_of(folders: dict[str, tuple[Path, SpecConfig]], rule: str = "block") -> SpecConfig:
    return replace(folders["EAGLE3"][1], verify=rule, draft_sampling=True)


@ON_CPU
@pytest.mark.parametrize("name", ["EAGLE", "EAGLE3", "MTP"])
def test_seeds_go_on_from_answers_in_the_cache(
    name: str, folders: dict[str, tuple[Path, SpecConfig]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a drafter keeps of them is what it keeps on the host."""
    folder, spec = folders[name]
    spec = replace(spec, verify="block", draft_sampling=True)
    host, llm = make(folder, spec), make(folder, spec)
    let_fly(llm, monkeypatch)
    params, texts = SAMPLED[:3], [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    for turn in range(3):
        found, expected = llm.generate(texts, params), host.generate(texts, params)
        assert [*said(found)] == [*said(expected)]
        assert not turn or min(one.num_cached_tokens for one in found) > 20
        pairs = zip(texts, found, strict=True)
        texts = [[*text, *one.token_ids, 7 + turn] for text, one in pairs]


@ON_CPU
def test_greedy_requests_alone_are_matched(
    folders: dict[str, tuple[Path, SpecConfig]], target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, host = (make(target, spec_of(folders), **flags()) for _ in range(2))
    flying = let_fly(llm, monkeypatch)
    check(host, llm, [GREEDY] * 3, PROMPTS)
    assert {form.choosing for form in flying.captured} == {BEST}
    assert not fallbacks(flying)


@ON_CPU
def test_a_token_behind_the_path_may_be_the_next_draft(
    folders: dict[str, tuple[Path, SpecConfig]], target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which stood for nothing: what the rule says is what is counted."""

    def judge(self: GraphWeighedRound, drafts: SampledRound, draws: Draws) -> Accepted:
        ends_B = drafts.exists_BN[:, 2].long()
        return Accepted(ends_B, drafts.tokens_BN.gather(1, ends_B[:, None] + 1)[:, 0])

    monkeypatch.setattr(GraphWeighedRound, "judge", judge)
    llm = make(target, spec_of(folders), **flags())
    flying = let_fly(llm, monkeypatch, most=8)
    found = llm.generate(PROMPTS, [replace(SAMPLED[0], max_tokens=20)] * 3)
    assert [one.spec.histogram for one in found] == [[1, 9]] * 3
    assert all(form.choosing.weighs for form in flying.captured)


@ON_CPU
@pytest.mark.parametrize(
    ("rule", "name"), thinned(3, RULES, ["EAGLE3", "MTP layers", "STANDALONE"])
)
def test_requests_come_and_go_between_both_kinds_of_rounds(
    rule: str,
    name: str,
    folders: dict[str, tuple[Path, SpecConfig]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever runs around it, a seed says what it says alone; held back by min_tokens, too."""
    folder, spec = folders[name]
    spec, given = replace(spec, verify=rule, draft_sampling=True), flags(disable_radix_cache=True)
    host, llm = make(folder, spec, **given), make(folder, spec, **given)
    let_drafters_fly(llm)
    flying = let_fly(llm, monkeypatch, most=8)
    held = replace(SAMPLED[1], temperature=0.9, seed=9, min_tokens=5, max_tokens=22)
    wishes = [*WISHES, replace(held, ignore_eos=False)]
    come_and_go(host, llm, [*MANY, "0a"], wishes, monkeypatch)
    assert flying.counters["replays"] > 20
    assert not fallbacks(flying)


@ON_CPU
def test_kernels_decide_what_the_reference_does(
    folders: dict[str, tuple[Path, SpecConfig]], target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's interpreter."""
    pytest.importorskip("triton")
    llm, host = (make(target, spec_of(folders), **flags()) for _ in range(2))
    let_fly(llm, monkeypatch)
    params = [replace(one, max_tokens=7) for one in (SAMPLED[2], GREEDY, SAMPLED[3])]
    expected = [*said(host.generate(PROMPTS, params))]
    for module in (weigh_rows, accept_block, accept_chain):
        monkeypatch.setattr(module, "use_triton", lambda backend, x: True)
    assert [*said(llm.generate(PROMPTS, params))] == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnTheGpu:
    @pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
    @pytest.mark.parametrize("name", ["EAGLE", "EAGLE3", "MTP layers", "STANDALONE"])
    @pytest.mark.parametrize("rule", [*RULES, "greedy drafts"])
    def test_graphs_change_nothing(
        self, rule: str, name: str, overlap: bool, folders: dict[str, tuple[Path, SpecConfig]]
    ) -> None:
        folder, spec = folders[name]
        drawn = rule != "greedy drafts"
        spec = replace(spec, verify=rule if drawn else "target_only", draft_sampling=drawn)
        given = flags(disable_radix_cache=True, disable_overlap_schedule=not overlap)
        host, llm = (
            make(folder, spec, disable_cuda_graph=True, **given),
            make(folder, spec, **given),
        )
        for count in (8, 3, 1):
            check(host, llm, WISHES[:count], MANY[:count])
        stats = llm.engine.stats().graphs["round"]
        assert stats.replays > 20
        assert stats.fallbacks.keys() <= {SEEN_TOO_LITTLE}

    def test_the_model_that_comes_with_the_engine(self) -> None:
        spec = SpecConfig(algorithm="EAGLE3", draft_sampling=True, verify="block", num_steps=4)
        given: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 4096}
        host, llm = LLM("tiny", spec, disable_cuda_graph=True, **given), LLM("tiny", spec, **given)
        params = [replace(one, max_tokens=60) for one in SAMPLED]
        check(host, llm, params, MANY[: len(params)])
        assert not llm.engine.stats().graphs["round"].fallbacks
