"""Speculation leaves the prefix cache as useful as it was: as many tokens are found in it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import pytest

from specengine.core.config import EngineConfig, MemoryConfig, ModelConfig, SpecConfig
from specengine.core.sampling import SamplingParams
from specengine.engine.build import build_engine, load
from specengine.engine.loop import Engine
from specengine.engine.phases import Phases
from specengine.engine.proof.catalogue import with_models, without_models
from specengine.engine.proof.runs import Ask, complete
from specengine.engine.proof.subjects import FRESH, State
from specengine.engine.proof.tiny_model import save_tiny_models
from specengine.runner.loader.loaded_model import LoadedModel
from tests.halves import slow_but

SYSTEM = "You are a tiny model, and repeat yourself: "
USERS = ("abcabcabcabc", "hello hello hello", "1, 2, 3, 1, 2, 3", "x" * 40)
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
# Sampled drafts of no algorithm are left out: they need the few tokens of a proof.
NAMES = [
    *(f"{name} {shape}" for name in ("NGRAM", "SUFFIX") for shape in ("chain", "tree")),
    *(f"NGRAM {shape} + suffix" for shape in ("chain", "tree")),
    *(
        f"{name} {shape}"
        for name in ("STANDALONE", "EAGLE", "EAGLE3", "MTP")
        for shape in ("chain", "tree", "sampled chain", "sampled tree")
    ),
    "STANDALONE static tree",
    "MTP, a layer a step: chain",
    "STANDALONE tree + suffix",
    "EAGLE3 tree + suffix",
    "MTP, a layer a step: chain + suffix",
]
# Each drafter, a chain and a tree of each that has both, one of them sampled; by turns with either
# page size. All with both: make test-all.
FAST = [
    *(("NGRAM chain", 1), ("NGRAM tree + suffix", 16), ("SUFFIX tree", 1)),
    *(("STANDALONE chain", 16), ("STANDALONE sampled tree", 1), ("STANDALONE static tree", 16)),
    *(("EAGLE tree", 1), ("EAGLE sampled chain", 16)),
    *(("EAGLE3 chain", 1), ("EAGLE3 sampled tree", 16), ("EAGLE3 tree + suffix", 1)),
    *(("MTP tree", 16), ("MTP sampled chain", 1), ("MTP, a layer a step: chain + suffix", 16)),
]
CASES = slow_but(FAST, product(NAMES, (1, 16)))


@dataclass
class World:
    config: EngineConfig
    loaded: LoadedModel
    specs: dict[str, SpecConfig]

    def engine(self, spec: SpecConfig, page_size: int) -> Engine:
        memory = MemoryConfig(page_size=page_size, max_total_tokens=4096)
        return build_engine(replace(self.config, spec=spec, memory=memory), self.loaded)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    models = save_tiny_models(tmp_path_factory.mktemp("tiny"))
    config = EngineConfig(model=ModelConfig(model=str(models.target), dtype="float32"))
    loaded = load(config, Phases())
    subjects = [*without_models(), *with_models(models)]
    return World(config, loaded, {one.name: one.spec for one in subjects})


def conversations(engine: Engine) -> tuple[list[list[int]], int]:
    """Three turns of several users behind one system prompt, each turn behind all that was said
    before; the answers, and how many prompt tokens were found."""
    encode = engine.parts.tokenizer
    texts = [list(encode(SYSTEM + user)["input_ids"]) for user in USERS]
    said: list[list[int]] = []
    for turn in range(3):
        answers = complete(engine, [Ask(text, GREEDY) for text in texts], State(FRESH)).outputs
        said += answers
        more = list(encode(f" And {turn}?")["input_ids"])
        texts = [[*text, *answer, *more] for text, answer in zip(texts, answers, strict=True)]
    return said, engine.stats().num_cached_tokens


@pytest.fixture(scope="module")
def plain(world: World) -> dict[int, tuple[list[list[int]], int]]:
    return {size: conversations(world.engine(SpecConfig(), size)) for size in (1, 16)}


@pytest.mark.parametrize(("name", "page_size"), CASES)
def test_as_much_is_found_as_without_speculation(
    name: str, page_size: int, world: World, plain: dict[int, tuple[list[list[int]], int]]
) -> None:
    engine = world.engine(replace(world.specs[name], adaptive=False), page_size)
    assert conversations(engine) == plain[page_size]
    assert engine.stats().spec.num_drafts > 0


def test_the_workload_shares_prefixes(
    world: World, plain: dict[int, tuple[list[list[int]], int]]
) -> None:
    engine = world.engine(SpecConfig(), 1)
    conversations(engine)
    assert engine.stats().prefix_hit_rate > 0.5
    assert 0.8 * plain[1][1] < plain[16][1] < plain[1][1]
