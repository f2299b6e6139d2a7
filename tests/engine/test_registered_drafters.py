"""Each registered drafter, in each shape that it declares: on the host, in device rounds, and what
sends it from there to the host. A new one needs nothing here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specengine import LLM, SpecConfig
from specengine.core.registry import DRAFTERS
from specengine.engine.llm import Generation
from specengine.engine.proof.catalogue import with_models, without_models
from specengine.engine.proof.subjects import Subject
from specengine.engine.proof.tiny_model import TinyModels, save_tiny_models
from specengine.engine.round.build import HostRoundsError
from specengine.runner.fallbacks import ROUND_NEEDS_HOST
from tests.support.device_rounds import make_eager_rounds, prepare_drafter, run_on_device
from tests.support.rounds import EDITED, GREEDY, PROMPTS, SAMPLED, make

# The models are random: where few tokens can be said, their drafts are often right.
FEW = dict.fromkeys((40, 41, 42), 60.0)
PARAMS = [
    replace(GREEDY, logit_bias=FEW),
    SAMPLED[0],
    EDITED[0],
    replace(SAMPLED[3], logit_bias=FEW),
    GREEDY,
    replace(SAMPLED[4], logit_bias=FEW),
]
TEXTS = [*PROMPTS[:3], "abcabcabcabc", *PROMPTS[:2]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return save_tiny_models(tmp_path_factory.mktemp("tiny"))


def subjects_of(name: str, tiny: TinyModels, is_long: bool) -> list[Subject]:
    """Of those beside suffix matches, every third where a run is not to be long."""
    every = [*without_models(), *with_models(tiny)]
    found = [one for one in every if one.spec.algorithm == name and not one.any_depth]
    assert found, f"nothing to test {name} with: it needs a checkpoint in TinyModels"
    if is_long:
        return found
    alone = [one for one in found if not one.spec.hybrid_suffix]
    return alone + [one for one in found if one.spec.hybrid_suffix][::3]


def made(tiny: TinyModels, spec: SpecConfig | None) -> LLM:
    return make(tiny.target, spec and replace(spec, adaptive=False), device="cpu")


def said(llm: LLM) -> list[Generation]:
    params = [replace(one, max_tokens=8) for one in PARAMS]
    found = llm.generate(TEXTS, params)
    llm.engine.scheduler.check_invariant()
    return found


def tokens(found: list[Generation]) -> list[list[int]]:
    return [one.token_ids for one in found]


def accepted(found: list[Generation]) -> list[list[int]]:
    """Rounds by accepted tokens. Of penalties, device rounds count the drafts of the round."""
    every = zip(found, PARAMS, strict=True)
    return [one.spec.histogram for one, params in every if not params.has_penalties]


@pytest.fixture(scope="module")
def plain(tiny: TinyModels) -> list[list[int]]:
    return tokens(said(made(tiny, None)))


@pytest.mark.parametrize(
    "name",
    [
        *DRAFTERS,
        *(pytest.param(one, id=f"{one}, all", marks=pytest.mark.slow) for one in DRAFTERS),
    ],
)
def test_registered_drafter_matches_plain_decoding_on_the_host_and_in_device_rounds(
    name: str, is_long: bool, tiny: TinyModels, plain: list[list[int]]
) -> None:
    """Drafts that are matched change no token, and those that a stochastic rule judges
    are judged alike in both. A model drafts the same chains in both."""
    for subject in subjects_of(name, tiny, is_long):
        host, llm = made(tiny, subject.spec), made(tiny, subject.spec)
        drafter, expected = host.engine.drafter, said(host)
        assert drafter.emits_probs or tokens(expected) == plain, subject.name
        assert host.engine.stats().spec.num_accepted_tokens > 0, subject.name
        prepare_drafter(llm)
        if llm.engine.drafter.drafts_on == "host":
            with pytest.raises(HostRoundsError, match=ROUND_NEEDS_HOST):
                make_eager_rounds(llm)
            continue
        rounds = run_on_device(llm, sizes=(1, 2, 4, 8))
        found = said(llm)
        assert tokens(found) == tokens(expected), subject.name
        assert rounds.counters["replays"] > 5, subject.name
        has_chains = drafter.lookup is None and not drafter.proposes_tree
        if has_chains and llm.engine.drafter.drafts_on == "device":
            assert accepted(found) == accepted(expected), subject.name
