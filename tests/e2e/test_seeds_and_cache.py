"""What others left in the prefix cache changes no text of a seed, though a stochastic rule looks at
drafts, and drafts at the draft model's own KV in the pages that are shared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from specengine.core.config import EngineConfig, MemoryConfig, ModelConfig, SpecConfig
from specengine.core.sampling import SamplingParams
from specengine.engine.build import build_engine, load
from specengine.engine.loop import Engine
from specengine.engine.phases import Phases
from specengine.engine.proof.catalogue import with_models
from specengine.engine.proof.runs import Ask, complete
from specengine.engine.proof.subjects import FRESH, State
from specengine.engine.proof.tiny_model import save_tiny_models
from specengine.runner.loader.loaded_model import LoadedModel
from tests.halves import each_value, slow_but

SHARED = "You are a tiny model, and say what comes to mind. "  # 50 tokens
ENDINGS = ("a cat", "the dog", "more, more")
LETTERS = "abcdef"  # few, so that random drafts are often right
CASES = [
    ("EAGLE sampled chain", "rejection"),
    ("EAGLE sampled tree", "sibling"),
    ("EAGLE3 sampled chain", "block"),
    ("EAGLE3 tree", "target_only"),
    ("MTP sampled chain", "rejection"),
    ("MTP, a layer a step: sampled chain", "block"),
]


class World:
    def __init__(self, config: EngineConfig, loaded: LoadedModel, specs: dict[str, SpecConfig]):
        self.config = config
        self.loaded = loaded
        self.specs = specs

    def engine(self, name: str, verify: str, page_size: int) -> Engine:
        spec = replace(self.specs[name], verify=verify, adaptive=False)
        memory = MemoryConfig(page_size=page_size, max_total_tokens=4096)
        return build_engine(replace(self.config, spec=spec, memory=memory), self.loaded)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    models = save_tiny_models(tmp_path_factory.mktemp("tiny"))
    config = EngineConfig(model=ModelConfig(model=str(models.target), dtype="float32"))
    loaded = load(config, Phases())
    return World(config, loaded, {one.name: one.spec for one in with_models(models)})


def ask(engine: Engine, ending: str) -> Ask:
    encode, seed = engine.parts.tokenizer, ENDINGS.index(ending)
    letters = dict.fromkeys(encode(LETTERS)["input_ids"], 100.0)
    params = SamplingParams(max_tokens=13, logit_bias=letters, seed=seed, ignore_eos=True)
    return Ask(list(encode(SHARED + ending)["input_ids"]), params)


def texts(engine: Engine, endings: Sequence[str]) -> list[list[int]]:
    """One request after another, so that each finds what the ones before it left."""
    runs = [complete(engine, [ask(engine, one)], State(FRESH)) for one in endings]
    return [run.outputs[0] for run in runs]


# Each algorithm, rule, shape and size of pages.
FAST = [(*CASES[1], 2), (*CASES[3], 1), (*CASES[4], 1), (*CASES[5], 2)]


@pytest.mark.parametrize(
    ("name", "verify", "page_size"),
    slow_but(FAST, [(*one, size) for one in CASES for size in (1, 2)]),
)
def test_a_seed_says_the_same_whatever_is_cached(
    name: str, verify: str, page_size: int, world: World
) -> None:
    alone = [texts(world.engine(name, verify, page_size), [one])[0] for one in ENDINGS]
    engine = world.engine(name, verify, page_size)
    assert texts(engine, ENDINGS) == alone
    assert texts(engine, ENDINGS[::-1]) == alone[::-1], "with their own text in the cache"
    asks = [ask(engine, one) for one in ENDINGS]
    assert complete(engine, asks, State(FRESH)).outputs == alone, "sharing pages at one time"
    stats = engine.stats()
    assert stats.num_cached_tokens > 0.7 * stats.num_prompt_tokens
    assert 0 < stats.spec.num_accepted_tokens < stats.spec.num_draft_tokens


@pytest.mark.parametrize(
    ("name", "page_size"),
    each_value(1, ["EAGLE sampled chain", "MTP, a layer a step: sampled chain"], [1, 2]),
)
def test_it_costs_no_more_than_the_tokens_that_were_seen(
    name: str, page_size: int, world: World
) -> None:
    """Each request that parts from what is cached loses so many; none does where the rule only
    matches."""
    block, match = (world.engine(name, verify, page_size) for verify in ("block", "match"))
    for engine in (block, match):
        texts(engine, ENDINGS)
    lookahead = block.scheduler.ledger.cache.lookahead
    assert lookahead == (1 if "EAGLE" in name else 3)
    lost = -(-lookahead // page_size) * page_size * (len(ENDINGS) - 1)
    found, most = (engine.stats().num_cached_tokens for engine in (block, match))
    assert most - lost <= found < most
