"""What a replay tells is what a run of that setting does, through the real engine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.errors import ConfigError
from specengine.core.grammar import GrammarSpec
from specengine.core.spec_stats import SpecStats
from specengine.draft.replay.requests import read_requests
from specengine.draft.replay.settings import Recorded, ReplaySetting
from specengine.draft.trace.reader import Trace
from specengine.engine.outputs import add_stats
from specengine.lab.accept.bootstrap import draw_prompts, ratio
from specengine.lab.replay.estimate import Row, replay
from tests.draft import eagle_checkpoints as checkpoints
from tests.e2e.test_identity_neural import noisy

pytestmark = pytest.mark.slow

PROMPTS = ["abcabcabcabc", "x", "to be or not to be, that is " * 2, "0123456789" * 4, "hello hello"]
TREE: dict[str, Any] = {"num_steps": 3, "eagle_topk": 3, "num_draft_tokens": 22}
CHAIN: dict[str, Any] = {"num_steps": 4}


@pytest.fixture(scope="module")
def target(small_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay") / "target"
    return checkpoints.almost_bigram(folder, small_models["llama"], 0.03)


@pytest.fixture(scope="module")
def drafts(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("drafts")
    return {
        "STANDALONE": str(noisy(root / "standalone", target)),
        "EAGLE3": str(checkpoints.oracle_eagle3(root / "eagle3", target, 250, focus=20.0)),
    }


@dataclass
class World:
    """stats, rounds and texts: of the latest run; the latter two a request."""

    target: Path
    drafts: dict[str, str]
    folder: Path
    stats: SpecStats = field(default_factory=SpecStats)
    rounds: list[int] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)

    def run(self, algorithm: str, shape: dict[str, Any], temperature: float, **flags: Any) -> LLM:
        spec = SpecConfig(
            algorithm=algorithm,
            adaptive=False,
            draft_model_path=self.drafts.get(algorithm),
            **shape,
        )
        # A round in the air drafts as deep as ever where a text ends; the recorded ones do not.
        flags = {"disable_cuda_graph": True, "max_total_tokens": 4096} | flags
        llm = LLM(str(self.target), spec, dtype="float32", **flags)
        choices = 2 if shape.get("draft_sampling") else 1
        params = [
            SamplingParams(max_tokens=48, temperature=temperature, seed=seed, n=choices)
            for seed in range(len(PROMPTS))
        ]
        self.stats, self.rounds, self.texts = SpecStats(), [], []
        for one in llm.generate(PROMPTS, params):
            for choice in one.completions:
                add_stats(self.stats, choice.spec)
                self.rounds.append(choice.spec.num_rounds)
                self.texts.append(choice.token_ids)
        llm.engine.scheduler.check_invariant()
        return llm

    def record(
        self, algorithm: str, shape: dict[str, Any], temperature: float, positions: bool = True
    ) -> Trace:
        path = self.folder / "trace"
        flags = {"trace": str(path), "trace_every_position": positions}
        llm = self.run(algorithm, shape, temperature, **flags)
        [recorder] = llm.engine.host_round.recorders
        recorder.close()  # type: ignore[attr-defined]
        return Trace.read(path)


@pytest.fixture
def world(target: Path, drafts: dict[str, str], tmp_path: Path) -> World:
    return World(target, drafts, tmp_path)


def told(trace: Trace, **changes: Any) -> Row:
    setting = ReplaySetting(**{**vars(Recorded.of(trace.header).setting), **changes})
    Recorded.of(trace.header).check(setting)
    [row] = replay(trace, [setting])
    return row


@pytest.mark.parametrize("temperature", [0.0, 0.3])
@pytest.mark.parametrize("algorithm", ["NGRAM", "SUFFIX"])
def test_text_drafts_are_told_exactly(world: World, algorithm: str, temperature: float) -> None:
    trace = world.record(algorithm, {"num_draft_tokens": 8}, temperature)
    for count in (8, 3):
        row = told(trace, num_draft_tokens=count)
        world.run(algorithm, {"num_draft_tokens": count}, temperature)
        assert row.is_exact
        assert row.rounds == world.stats.num_rounds
        assert row.tau.value == pytest.approx(world.stats.mean_acceptance_length)


@pytest.mark.parametrize("temperature", [0.0, 0.3])
@pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE"])
def test_chains_of_a_model_are_told_exactly(
    world: World, algorithm: str, temperature: float
) -> None:
    trace = world.record(algorithm, CHAIN, temperature)
    for steps in (4, 2):
        row = told(trace, num_steps=steps, num_draft_tokens=steps + 1)
        world.run(algorithm, {"num_steps": steps}, temperature)
        assert row.is_exact
        assert row.rounds == world.stats.num_rounds
        assert row.tau.value > 1.02
        drafted = world.stats.num_draft_tokens / world.stats.num_rounds
        assert row.nodes == pytest.approx(1 + drafted)


@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE"])
def test_trees_are_told(world: World, algorithm: str, is_static: bool) -> None:
    """Fewer nodes exactly; fewer branches where the trace holds what they would have drafted."""
    static = {"static_tree": is_static}
    trace = world.record(algorithm, TREE | static, 0.0)
    for shape in ({"num_draft_tokens": 22}, {"num_draft_tokens": 7}):
        row = told(trace, **shape)
        world.run(algorithm, TREE | static | shape, 0.0)
        assert row.is_exact
        assert row.rounds == world.stats.num_rounds
    row = told(trace, topk=2, num_draft_tokens=6)
    world.run(algorithm, TREE | static | {"eagle_topk": 2, "num_draft_tokens": 6}, 0.0)
    assert row.tau.value == pytest.approx(world.stats.mean_acceptance_length, rel=0.03)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_sampled_chains_are_told(world: World, rule: str) -> None:
    sampled = {"draft_sampling": True}
    trace = world.record("EAGLE3", CHAIN | sampled, 1.0)
    row = told(trace, num_steps=3, num_draft_tokens=4, verify=rule)
    world.run("EAGLE3", {"num_steps": 3, "verify": rule} | sampled, 1.0)
    assert not row.is_exact
    assert_near(row, world)


def test_sampled_trees_are_told(world: World) -> None:
    sampled = {"draft_sampling": True}
    trace = world.record("STANDALONE", TREE | sampled, 1.0)
    row = told(trace, topk=2, num_draft_tokens=6, verify="sibling")
    shape = {"eagle_topk": 2, "num_draft_tokens": 6, "verify": "sibling"}
    world.run("STANDALONE", TREE | sampled | shape, 1.0)
    assert_near(row, world)


def assert_near(row: Row, world: World) -> None:
    """Within 3%, or within the interval of the difference: the run is another sample of texts."""
    rounds = np.array(world.rounds)
    tokens = np.array([len(text) - 1 for text in world.texts])
    run = ratio(tokens, rounds, draw_prompts(np.zeros(len(rounds)), 500, seed=0))
    width = np.hypot(row.tau.high - row.tau.low, run.high - run.low) / 2
    assert abs(row.tau.value - run.value) <= max(0.03 * run.value, width)


@pytest.mark.parametrize("shape", [CHAIN, TREE])
def test_recording_changes_no_token(world: World, shape: dict[str, Any]) -> None:
    world.run("EAGLE3", shape, 0.3)
    plain = world.texts
    trace = world.record("EAGLE3", shape, 0.3)
    assert world.texts == plain
    assert [one.text for one in read_requests(trace)] == [text[1:] for text in plain]


def test_rounds_as_they_ran_tell_their_own_setting(world: World) -> None:
    trace = world.record("EAGLE3", TREE, 0.0, positions=False)
    row = told(trace)
    assert row.is_exact
    assert row.rounds == world.stats.num_rounds
    assert row.tau.value == pytest.approx(world.stats.mean_acceptance_length)
    fewer = told(trace, num_draft_tokens=7)
    assert not fewer.is_exact
    assert 1.0 < fewer.tau.value < row.tau.value


def test_a_smaller_vocabulary_accepts_less(world: World) -> None:
    trace = world.record("EAGLE3", TREE, 0.0)
    order = world.folder / "order.npy"
    np.save(order, np.arange(250))
    sizes = [replace(Recorded.of(trace.header).setting, vocabulary=n) for n in (1, 120, 250)]
    taus = [row.tau.value for row in replay(trace, sizes, vocabulary=order)]
    assert taus == sorted(taus)
    assert taus[0] < taus[1]
    assert taus[2] == told(trace).tau.value, "as many as the draft has"


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_target_probabilities_are_the_targets(world: World, temperature: float) -> None:
    """After each node's parent, as transformers has them: at temperature 1 for greedy requests."""
    import transformers

    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(world.target)
    tokenizer = transformers.AutoTokenizer.from_pretrained(world.target)
    trace = world.record("EAGLE3", TREE, temperature)
    request = read_requests(trace)[0]
    prompt = tokenizer(PROMPTS[0])["input_ids"] + world.texts[0][: request.first]
    draft = request.drafts[request.first]
    checked = 0
    for node in range(1, len(draft.tokens)):
        path: list[int] = []
        parent = draft.parents[node]
        while parent > 0:
            path.insert(0, draft.tokens[parent])
            parent = draft.parents[parent]
        with torch.no_grad():
            logits = loaded(torch.tensor([prompt + path])).logits[0, -1]
        probs = (logits / (temperature or 1.0)).softmax(-1)
        assert draft.target_probs[node] == pytest.approx(probs[draft.tokens[node]].item(), rel=1e-3)
        checked += 1
    assert checked == 21


def test_requests_under_a_grammar_are_left_out(world: World) -> None:
    pytest.importorskip("llguidance")
    path = world.folder / "trace"
    spec = SpecConfig(algorithm="NGRAM", adaptive=False)
    llm = LLM(str(world.target), spec, dtype="float32", max_total_tokens=2048, trace=str(path))
    free = SamplingParams(max_tokens=8, temperature=0.0)
    bound = SamplingParams(max_tokens=8, temperature=0.0, grammar=GrammarSpec("regex", "[ab]{6}"))
    llm.generate(["abab", "abab"], [free, bound])
    assert [one["rid"] for one in Trace.read(path).requests] == ["offline-1#0"]


def test_a_trace_without_drafts_is_refused(world: World) -> None:
    with pytest.raises(ConfigError, match="choose how to draft"):
        LLM(str(world.target), trace=str(world.folder / "trace"), max_total_tokens=1024)
    assert not (world.folder / "trace").exists()
