"""Two and four ranks against one: the same tokens, drafts and accepted counts, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from specengine import SamplingParams, SpecConfig
from specengine.core.errors import ConfigError
from specengine.core.grammar import GrammarSpec
from specengine.core.parallel import Link
from specengine.engine.loop import Engine
from specengine.engine.parallel.lead import LeadEngine
from tests.support.ranks import Group, same_on_all, told

TEXTS = ["Once upon a time there was a", "The red fox and the red", "One day, Lily went to"]
GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
SAMPLED = [
    SamplingParams(max_tokens=8, temperature=0.8, top_p=0.9, seed=seed, ignore_eos=True)
    for seed in range(2)
]
CHAIN = {"num_steps": 3, "adaptive": False}
TREE = {"num_steps": 3, "adaptive": False, "eagle_topk": 3, "num_draft_tokens": 8}
NO_MODEL = {"adaptive": False}
FIXED = [
    ("EAGLE3", CHAIN),
    ("EAGLE3", TREE),
    ("MTP", CHAIN),
    ("NGRAM", NO_MODEL),
    ("STANDALONE", CHAIN),
    ("SUFFIX", NO_MODEL),
    ("EAGLE3", TREE | {"static_tree": True}),
    ("EAGLE3", CHAIN | {"draft_sampling": True, "verify": "rejection"}),
    ("EAGLE3", TREE | {"draft_sampling": True, "verify": "sibling"}),
    ("EAGLE3", CHAIN | {"verify": "relaxed"}),
    ("EAGLE3", {"num_steps": 3, "adaptive": False, "hybrid_suffix": True}),
]


@pytest.fixture(scope="module")
def two(link: Link) -> Group:
    return Group("tiny", 2, link)


@pytest.fixture(scope="module")
def four() -> Iterator[Group]:
    """More ranks than there are heads of keys and values."""
    group = Group("tiny", 4)
    yield group
    group.end()


def prompts(group: Group) -> list[list[int]]:
    return [list(group.one.tokenizer(text)["input_ids"]) for text in TEXTS]


def check(group: Group, algorithm: str | None, fields: dict[str, Any], where: str) -> None:
    flags: dict[str, Any] = {}
    if algorithm == "STANDALONE":  # has two heads
        flags["draft_tp_size"] = 1
    spec = None if algorithm is None else SpecConfig(algorithm=algorithm, **fields)
    given = prompts(group)
    params = [GREEDY] * len(given) + SAMPLED
    found = same_on_all(group.pair(spec, where, **flags), [*given, *given[:2]], params)
    assert spec is None or any(accepted for *_, accepted in found[: len(given)])


def ids_of(given: tuple[str, dict[str, Any]]) -> str:
    algorithm, fields = given
    return "-".join([algorithm, *(k for k in fields if k not in CHAIN), str(fields.get("verify"))])


def test_two_ranks_give_the_tokens_of_one(two: Group) -> None:
    check(two, None, {}, "host")
    check(two, "EAGLE3", CHAIN, "host")
    check(two, "EAGLE3", TREE, "device")
    check(two, "MTP", CHAIN, "device")
    check(two, "NGRAM", NO_MODEL, "device")


@pytest.mark.slow
@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("given", FIXED, ids=ids_of)
def test_four_ranks_give_the_tokens_of_one(
    four: Group, where: str, given: tuple[str, dict[str, Any]]
) -> None:
    check(four, *given, where)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("given", FIXED, ids=ids_of)
def test_two_ranks_draft_and_judge_as_one(
    two: Group, where: str, given: tuple[str, dict[str, Any]]
) -> None:
    check(two, *given, where)


def choose_on_rank_0(engine: Engine) -> None:
    """Another rank that chooses by its own clock ends."""

    def fail(*given: Any) -> Any:
        raise AssertionError("chosen by a rank that is not the first")

    choosers = [*engine.choosers()]
    assert choosers
    if engine.parts.link.communicator.rank:
        for one in choosers:
            one.choose = fail  # type: ignore[method-assign]


@pytest.mark.parametrize("where", ["host", "device_by_turns"])
def test_ranks_draft_as_deep_as_rank_0_chooses(two: Group, where: str) -> None:
    """By the clock, which differs between ranks. Greedy tokens do not depend on it; that ranks do
    not part does."""
    spec = SpecConfig(algorithm="EAGLE3", num_steps=4)
    one, several = two.pair(spec, where)
    several.engine.call("tests.engine.parallel.test_ranks_agree:choose_on_rank_0")
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    expected, found = (llm.generate(prompts(two), params) for llm in (one, several))
    assert [x.token_ids for x in found] == [x.token_ids for x in expected]
    depths = found[0].spec.depth_histogram
    assert sum(1 for count in depths if count) > 1, depths


def test_grammars_logprobs_and_penalties_are_the_same_on_two_ranks(two: Group) -> None:
    wanted = [
        SamplingParams(max_tokens=10, temperature=0, grammar=GrammarSpec.regex("[a-z ]+[.]")),
        SamplingParams(max_tokens=8, temperature=0.7, seed=3, repetition_penalty=1.3, n=2),
        SamplingParams(max_tokens=6, temperature=0, logprobs=2, logit_bias={300: 4.0}),
    ]
    for where, shape in {"host": CHAIN, "device": TREE}.items():
        pair = two.pair(SpecConfig(algorithm="EAGLE3", **shape), where)
        same_on_all(pair, prompts(two), wanted)
        one, several = (llm.generate(prompts(two)[:1], wanted[2])[0] for llm in pair)
        pairs = zip(one.completions[0].logprobs, several.completions[0].logprobs, strict=True)
        for expected, found in pairs:
            assert found.logprob == pytest.approx(expected.logprob, abs=1e-4)


def test_forwards_in_pieces_and_mixed_batches_are_the_same_on_two_ranks(two: Group) -> None:
    """Packed products are summed over ranks once."""
    flags: dict[str, Any] = {"chunked_prefill_size": 8, "enable_mixed_chunk": True}
    whole, _ = two.pair(None, **flags)
    expected = told(whole.generate(prompts(two), GREEDY))
    flags |= {"cuda_graph_mode": "piecewise", "piecewise_cuda_graph_tokens": (8,)}
    pair = two.pair(None, **flags)
    assert same_on_all(pair, prompts(two), GREEDY) == expected
    for llm in pair:
        assert llm.engine.stats().graphs["piecewise"].replays > 5
    with pytest.raises(ConfigError, match="hooks"):
        pair[1].add_layer_hook("layers.*", print)
    with pytest.raises(ConfigError, match="--enable-sleep-mode"):
        pair[1].sleep()


def test_prefixes_are_cached_and_aborted_requests_freed_on_two_ranks(two: Group) -> None:
    pair = two.pair(SpecConfig(algorithm="EAGLE3", **CHAIN), chunked_prefill_size=16)
    long = [(7 * i * i + 3 * i) % 3000 + 5 for i in range(50)]
    for llm in pair:
        llm.engine.add_request("gone", long, GREEDY)
        for _ in range(6):
            llm.engine.step()
        llm.engine.abort("gone")
    same_on_all(pair, [[*long, 9], [*long, 11, 4]], GREEDY)
    one, several = (llm.generate([[*long, 9, 9]], GREEDY)[0] for llm in pair)
    assert several.num_cached_tokens == one.num_cached_tokens >= len(long)
    assert several.token_ids == one.token_ids


def test_all_that_callers_do_is_told_to_other_ranks() -> None:
    """A new method of Engine that changes it needs one in LeadEngine."""
    telling = {
        *("add_request", "add_embedding", "abort", "give_up", "flush_cache", "advance"),
        *("use_idle_moment", "update_weights", "finish_rounds", "sleep", "wake"),
    }
    reading = {"stats", "choosers", "check", "call_if_stopped", "close", "take_changed"}
    reading |= {"has_work", "device_rounds", "step"}
    public = {name for name in vars(Engine) if not name.startswith("_")}
    assert public == telling | reading
    assert telling <= {*vars(LeadEngine)}


def test_operator_ends_requests_and_flushes_on_two_ranks(two: Group) -> None:
    pair = two.pair(None)
    for llm in pair:
        llm.engine.add_request("kept", [5, 9, 7, 11], GREEDY)
        llm.engine.add_request("ended", [8, 8, 4], GREEDY)
        llm.engine.step()
        assert llm.engine.give_up(["ended"]) == 1
        while llm.engine.has_work:
            llm.engine.step()
    one, several = (llm.engine.flush_cache() for llm in pair)
    assert one == several > 0
    same_on_all(pair, prompts(two), GREEDY)


@pytest.mark.slow
def test_two_ranks_evict_alike(two: Group) -> None:
    """Memory for two requests, so that prefixes are evicted and requests retracted."""
    pair = two.pair(None, max_total_tokens=70, context_length=60)
    given = [[5 + number] * 12 for number in range(4)]
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    same_on_all(pair, given, params)
    assert pair[1].engine.stats().num_retractions > 0
