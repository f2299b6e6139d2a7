"""Mixed requests in too little memory, a fifth of them aborted: nothing is lost, miscounted or
said differently. `benchmarks/serving/soak.py` does the same with thousands."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from specengine.core.config import EngineConfig, ModelConfig
from specengine.engine.build import load
from specengine.engine.phases import Phases
from specengine.engine.proof.catalogue import with_models, without_models
from specengine.engine.proof.soak import Soak, soak
from specengine.engine.proof.subjects import CROWDED, FRESH, PLAIN, State, Subject
from specengine.engine.proof.tiny_model import save_tiny_models
from specengine.engine.proof.workload import Workload
from specengine.runner.loader.loaded_model import LoadedModel
from tests.halves import slow_but

REQUESTS = 16


@dataclass
class World:
    config: EngineConfig
    loaded: LoadedModel
    subjects: dict[str, Subject]
    plain: Soak

    def run(self, name: str, state: State) -> Soak:
        return run(self.subjects[name], self.config, self.loaded, state)


def run(subject: Subject, config: EngineConfig, loaded: LoadedModel, state: State) -> Soak:
    workload = Workload(loaded.tokenizer, aborted=0.2, seed=3)
    return soak(subject.build(config, state, loaded, []), workload, REQUESTS, state)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    models = save_tiny_models(tmp_path_factory.mktemp("tiny"))
    config = EngineConfig(model=ModelConfig(model=str(models.target), dtype="float32"))
    loaded = load(config, Phases())
    subjects = {one.name: one for one in [*without_models(), *with_models(models)]}
    return World(config, loaded, subjects, run(PLAIN, config, loaded, State(FRESH)))


def _other_pages(name: str, page_size: int) -> object:
    return pytest.param(name, page_size, marks=pytest.mark.slow)


LAYER_A_STEP = "MTP, a layer a step: chain + suffix"


@pytest.mark.parametrize(
    ("name", "page_size"),
    [
        ("NGRAM tree", 16),
        _other_pages("STANDALONE tree", 1),
        ("EAGLE3 chain", 16),
        (LAYER_A_STEP, 1),
        _other_pages("NGRAM tree", 1),
        _other_pages("STANDALONE tree", 16),
        _other_pages("EAGLE3 chain", 1),
        _other_pages(LAYER_A_STEP, 16),
    ],
)
def test_nothing_is_lost_or_changed(name: str, page_size: int, world: World) -> None:
    done = world.run(name, State(CROWDED, page_size))
    assert [check for check in done.checks(name, world.plain) if not check.passed] == []
    assert {"length", "stop"} <= done.reasons.keys()


@pytest.mark.parametrize(
    "name",
    slow_but(["STANDALONE sampled tree"], ["STANDALONE sampled tree", "EAGLE sampled chain"]),
)
def test_nothing_is_lost_of_sampled_drafts(name: str, world: World) -> None:
    done = world.run(name, State(CROWDED))
    assert [check for check in done.checks(name) if not check.passed] == []


def test_what_is_lost_shows() -> None:
    checks = list(Soak(lost_slots=2, remembered=1, num_retractions=5).checks("s"))
    assert [check.passed for check in checks] == [False, False, True]
    assert checks[1].statistic == 3
    changed = Soak(outputs={("a", 0): [1, 2]}), Soak(outputs={("a", 0): [1, 3]})
    *_, last = changed[0].checks("s", changed[1])
    assert not last.passed
