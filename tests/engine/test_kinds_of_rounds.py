"""Memory for graphs is planned before there is a drafter: for the rounds that will be made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specengine.core.config import SpecConfig
from specengine.core.registry import DRAFTERS
from specengine.engine.factories import has_two_sources
from specengine.engine.forward_graphs_build import kinds_of_rounds
from specengine.engine.proof.catalogue import with_models, without_models
from specengine.engine.proof.tiny_model import TinyModels, save_tiny_models
from specengine.engine.round.build import make_rounds
from specengine.engine.round.sampling import PLAIN
from specengine.engine.spec_options import resolve_spec
from tests.support.device_rounds import prepare_drafter
from tests.support.rounds import make, with_graphs

MANY = 256  # requests, of whose trees smaller ones have graphs too


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return save_tiny_models(tmp_path_factory.mktemp("tiny"))


def num_built(tiny: TinyModels, spec: SpecConfig | None) -> int:
    llm = make(tiny.target, spec, device="cpu")
    prepare_drafter(llm)
    parts = llm.engine.parts
    assert (parts.drafter.lookup is not None) == has_two_sources(parts.config.spec)
    if parts.drafter.drafts_on == "host":
        return 0
    chooses = parts.adaptive is not None
    given = parts.worker.runner, parts.drafter, parts.verifier, chooses
    return len(make_rounds(with_graphs(llm), *given).keys(MANY, PLAIN))


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("adaptive", [True, False])
def test_rounds_of_each_registered_drafter_are_as_many_as_were_counted(
    name: str, adaptive: bool, tiny: TinyModels
) -> None:
    for subject in (*without_models(), *with_models(tiny)):
        spec = replace(subject.spec, adaptive=adaptive)
        # The depth of sampled drafts, whose rules may judge by the depth, is never chosen.
        if spec.algorithm == name and not (subject.any_depth or spec.draft_sampling):
            counted, built = kinds_of_rounds(resolve_spec(spec)), num_built(tiny, spec)
            # Before there is a drafter, nothing says how large lookup's trees are between.
            fewest = counted - (spec.ngram_branches > 1 or spec.suffix_branches > 1)
            assert not built or fewest <= built <= counted, subject.name


@pytest.mark.parametrize(
    ("options", "counted"),
    [
        ({"adaptive": False, "num_draft_tokens": 16}, 3),
        ({"num_draft_tokens": 16}, 3),
        ({"num_draft_tokens": 4}, 2),
        ({"num_draft_tokens": 16, "ngram_branches": 2}, 3),
        ({"num_draft_tokens": 16, "hybrid_suffix": True}, 3),
    ],
    ids=str,
)
def test_rounds_of_lookup_are_counted_whether_depth_is_chosen_or_not(
    options: dict[str, Any], counted: int, tiny: TinyModels
) -> None:
    spec = SpecConfig(algorithm="NGRAM", **options)
    assert num_built(tiny, spec) == kinds_of_rounds(resolve_spec(spec)) == counted


def test_rounds_without_drafts_are_of_one_kind(tiny: TinyModels) -> None:
    assert num_built(tiny, None) == kinds_of_rounds(SpecConfig()) == 1


@pytest.mark.parametrize("nodes", [4, 8, 16])
@pytest.mark.parametrize("steps", [2, 3, 5])
def test_no_more_trees_of_a_model_are_made_than_were_counted(
    nodes: int, steps: int, tiny: TinyModels
) -> None:
    options: dict[str, Any] = {"num_steps": steps, "eagle_topk": 4, "num_draft_tokens": nodes}
    path = str(tiny.standalone)
    spec = SpecConfig(algorithm="STANDALONE", draft_model_path=path, **options)
    assert 0 < num_built(tiny, spec) <= kinds_of_rounds(resolve_spec(spec))
