"""Edits of logits, logprobs and grammars under verifiers that weigh drafts, in rounds on the device
alone: a seed says what it says in rounds of the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine import LLM, GrammarSpec, SamplingParams, SpecConfig
from specengine.core.sampling import SpecControl
from specengine.draft.loop_graphs import DraftLoops, LoopDrafter, LoopKey
from specengine.engine.llm import Generation
from specengine.engine.row_choices import Choosing
from specengine.kernels import accept_block, accept_chain, edit_rows, weigh_rows
from tests.engine.flying_world import come_and_go, let_fly
from tests.engine.test_graph_mtp import SEEN_TOO_LITTLE
from tests.engine.test_graph_round import GREEDY, SAMPLED, assert_close, make
from tests.engine.test_graph_weighed import MANY, ON_CPU, fallbacks, flags, let_drafters_fly
from tests.halves import thinned

RULES = ["rejection", "block", "target_only", "sibling", "greedy drafts"]
LIKELY = dict.fromkeys(range(68, 100), 6.0)  # bytes of letters: several stand after each other
LETTERS = GrammarSpec.regex("[a-c ]{4,30}")
ASCII = GrammarSpec.regex("[ -}]{9,70}")
WISHES = {
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
            stop_token_ids=tuple(range(60, 120)),
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
        replace(SAMPLED[0], max_tokens=25, grammar=LETTERS, ignore_eos=False),
        replace(SAMPLED[2], max_tokens=None),
        replace(GREEDY, max_tokens=20, grammar=LETTERS, ignore_eos=False),
        replace(SAMPLED[4], max_tokens=30, grammar=GrammarSpec.regex("(ab|cd|[xyz]){12,30}")),
        replace(
            SAMPLED[5],
            max_tokens=40,
            grammar=GrammarSpec.choice(["The quick", "The quick brown fox", "yes"]),
            min_tokens=12,
        ),
        replace(SAMPLED[3], seed=8, max_tokens=60, grammar=ASCII),
        replace(SAMPLED[0], seed=9, max_tokens=40, grammar=ASCII),
    ],
}
WISHES["all"] = [
    replace(WISHES["edits"][0], logprobs=1),
    replace(WISHES["grammars"][0], frequency_penalty=0.7, logprobs=2),
    *WISHES["edits"][1:3],
    WISHES["grammars"][5],
    replace(SAMPLED[4], max_tokens=17),
]
ALSO = {
    "edits": Choosing(samples=True, edits=True, weighs=True),
    "logprobs": Choosing(samples=True, logprobs=True, weighs=True),
    "grammars": Choosing(samples=True, masks=True, weighs=True),
    "all": Choosing(True, True, True, True, True),
}


def spec_of(rule: str, spec: SpecConfig) -> SpecConfig:
    drawn = rule != "greedy drafts"
    return replace(spec, verify=rule if drawn else "target_only", draft_sampling=drawn)


def said(outputs: list[Generation]) -> Iterator[Any]:
    for one in outputs:
        (found,) = one.completions
        spec = found.spec
        yield found.token_ids, found.finish_reason, spec.histogram, spec.num_draft_tokens


def check(
    host: LLM,
    llm: LLM,
    params: list[SamplingParams],
    prompts: Sequence[str | list[int]] = MANY,
) -> list[Generation]:
    prompts = [prompts[i % len(prompts)] for i in range(len(params))]
    found, expected = llm.generate(prompts, params), host.generate(prompts, params)
    assert [*said(found)] == [*said(expected)]
    for one, other, wish in zip(found, expected, params, strict=True):
        told = [each.completions[0].logprobs for each in (one, other)]
        assert [len(each) for each in told] == [
            0 if wish.logprobs is None else len(one.token_ids)
        ] * 2
        assert_close(*told)
    llm.engine.scheduler.check_invariant()
    return found


@ON_CPU
@pytest.mark.parametrize(
    ("rule", "name", "overlaps", "wish"),
    thinned(
        3,
        [
            *((rule, "EAGLE3", True) for rule in RULES),
            *((rule, "STANDALONE", True) for rule in ("rejection", "greedy drafts")),
            *((rule, "MTP layers", True) for rule in ("block", "target_only")),
            *((rule, "EAGLE3", False) for rule in ("block", "greedy drafts")),
        ],
        WISHES,
    ),
)
def test_wishes_fly(
    rule: str,
    name: str,
    overlaps: bool,
    wish: str,
    folders: dict[str, tuple[Path, SpecConfig]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, given = folders[name]
    spec = spec_of(rule, given)
    host, llm = make(folder, spec, **flags()), make(folder, spec, **flags())
    let_drafters_fly(llm)
    flying = let_fly(llm, monkeypatch, overlaps, most=8)
    check(host, llm, WISHES[wish])
    assert not fallbacks(flying)
    assert flying.counters["replays"] > 10
    assert ALSO[wish] in {form.choosing for form in flying.captured if form.num_steps}
    totals = llm.engine.scheduler.spec_totals
    assert 1 < totals.num_accepted_tokens < totals.num_draft_tokens - 10


@ON_CPU
@pytest.mark.parametrize(
    ("wish", "is_drafted"),
    [
        (replace(SAMPLED[0], logit_bias=LIKELY), True),
        (replace(SAMPLED[0], presence_penalty=0.3), False),
        (replace(SAMPLED[0], min_tokens=5), False),
        (replace(GREEDY, presence_penalty=0.3), True),
    ],
    ids=["bias", "a penalty", "min_tokens", "greedy"],
)
def test_loops_of_the_host_draft_what_seeds_follow_from(
    wish: SamplingParams, is_drafted: bool, folders: dict[str, tuple[Path, SpecConfig]]
) -> None:
    """In their graphs, edits are those of the round's root."""
    folder, given = folders["EAGLE3"]
    llm = make(folder, spec_of("greedy drafts", given), **flags())
    llm.engine.add_request("it", llm.tokenizer.encode(MANY[0]), wish)
    llm.engine.step()
    batch = llm.engine.scheduler.schedule()
    assert batch is not None
    assert isinstance(llm.engine.drafter, LoopDrafter)
    form = LoopKey(1, 3, edited=True)
    for weighed in (True, False):
        loops = DraftLoops(llm.engine.drafter, (1,), True, Counter(), weighed)
        assert (loops._key_of(batch, 3) == form) == (is_drafted or not weighed)


@ON_CPU
@pytest.mark.parametrize(
    ("rule", "name"),
    [
        ("block", "EAGLE3"),
        ("target_only", "STANDALONE"),
        ("greedy drafts", "EAGLE3"),
        ("rejection", "MTP layers"),
    ],
)
def test_those_with_wishes_come_and_go(
    rule: str,
    name: str,
    folders: dict[str, tuple[Path, SpecConfig]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, given = folders[name]
    spec, more = spec_of(rule, given), flags(disable_radix_cache=True)
    host, llm = make(folder, spec, **more), make(folder, spec, **more)
    let_drafters_fly(llm)
    flying = let_fly(llm, monkeypatch, most=8)
    wishes = [one for params in WISHES.values() for one in params]
    come_and_go(host, llm, MANY, wishes, monkeypatch)
    assert flying.counters["replays"] > 20
    assert not fallbacks(flying)


@ON_CPU
def test_kernels_decide_what_the_reference_does(
    folders: dict[str, tuple[Path, SpecConfig]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's interpreter."""
    pytest.importorskip("triton")
    folder, given = folders["EAGLE3"]
    llm, host = (make(folder, spec_of("block", given), **flags()) for _ in range(2))
    let_fly(llm, monkeypatch)
    params = [replace(one, max_tokens=8) for one in WISHES["all"][:3]]
    expected = [*said(host.generate(MANY[:3], params))]
    for module in (weigh_rows, accept_block, accept_chain, edit_rows):
        monkeypatch.setattr(module, "use_triton", lambda backend, x: True)
    assert [*said(llm.generate(MANY[:3], params))] == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnTheGpu:
    @pytest.mark.parametrize(
        ("name", "overlap"),
        [("EAGLE3", True), ("EAGLE3", False), ("STANDALONE", True), ("MTP layers", True)],
    )
    @pytest.mark.parametrize("rule", RULES)
    def test_graphs_change_nothing(
        self, rule: str, name: str, overlap: bool, folders: dict[str, tuple[Path, SpecConfig]]
    ) -> None:
        folder, given = folders[name]
        spec = spec_of(rule, given)
        more = flags(disable_radix_cache=True, disable_overlap_schedule=not overlap)
        host = make(folder, spec, disable_cuda_graph=True, **more)
        llm = make(folder, spec, **more)
        for params in WISHES.values():
            check(host, llm, params)
        stats = llm.engine.stats().graphs["round"]
        assert stats.replays > 40
        assert stats.fallbacks.keys() <= {SEEN_TOO_LITTLE}
