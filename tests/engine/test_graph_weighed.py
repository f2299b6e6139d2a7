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
from tests.draft.eagle_checkpoints import almost_bigram
from tests.draft.mtp_reading import add_mtp
from tests.e2e.test_identity_mtp import TARGETS, predictable
from tests.engine.flying_world import let_fly
from tests.engine.test_graph_mtp import SEEN_TOO_LITTLE
from tests.engine.test_graph_round import GREEDY, PROMPTS, SAMPLED, make

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


@pytest.fixture(scope="module")
def folders(
    target: Path,
    drafters: dict[str, str],
    small_models: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[Path, SpecConfig]]:
    """Of each drafter the target, and how it drafts."""
    found, folder = {}, tmp_path_factory.mktemp("weighed")
    unsure = almost_bigram(folder / "standalone", target, 6.0)  # says other things, now and then
    for name, path in (drafters | {"STANDALONE": str(unsure)}).items():
        spec = SpecConfig(algorithm=name, draft_model_path=path, num_steps=3)
        found[name] = target, spec
    for name, form, layers in (("MTP", "deepseek", 1), ("MTP layers", "mimo", 3)):
        folder = tmp_path_factory.mktemp(f"weighed-{layers}")
        add_mtp(small_models[TARGETS[form]], folder, form, layers)
        predictable(folder, form, layers, residue=0.2)
        found[name] = folder, SpecConfig(algorithm="MTP", num_steps=3)
    return found


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
    ("name", "overlaps"),
    [
        *((name, True) for name in ("EAGLE", "EAGLE3", "MTP", "MTP layers", "STANDALONE")),
        *((name, False) for name in ("EAGLE3", "STANDALONE")),
    ],
)
@pytest.mark.parametrize("rule", [*RULES, "sibling", "greedy drafts"])
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
