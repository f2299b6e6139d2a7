"""Long prompts that run a few layers at a time beside rounds change no token and no draft, whatever
happens to them on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.errors import ConfigError
from specengine.core.request import Req, ReqState
from specengine.engine.adaptive.acceptance import RoundObservation
from specengine.engine.outputs import RequestOutput
from specengine.engine.round.key import RoundKey
from specengine.engine.split_build import join_pipeline
from specengine.engine.split_job import SplitJob
from specengine.engine.split_prefill import SplitPrefills
from specengine.runner.fallbacks import HOOKED
from specengine.runner.layer_hooks import AddedHook
from specengine.runner.split_streams import SplitStreams
from specengine.scheduler.split_policy import SplitPrefillPolicy
from tests.halves import each_value
from tests.support.device_rounds import run_on_device

GREEDY = SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True)
FLAGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_total_tokens": 2048}
PDMUX: dict[str, Any] = {"enable_pdmux": True, "pdmux_min_tokens": 24}
LAYERS = [1, 2, 3]
Arrivals = dict[int, list[tuple[str, list[int]]]]


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(1, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


# Two that decode; two long ones at once; one more while those are under way, and a short one.
ARRIVALS: Arrivals = {
    0: [("a", prompt(1, 7)), ("b", prompt(2, 11))],
    2: [("c", prompt(3, 60)), ("d", prompt(4, 45))],
    3: [("e", prompt(5, 50)), ("f", prompt(6, 5))],
}
ALGORITHMS = ["plain", "NGRAM", "SUFFIX", "EAGLE", "EAGLE3", "STANDALONE", "MTP", "MTP layers"]


def make(folder: Path, spec: SpecConfig | None, **flags: Any) -> LLM:
    if spec is not None:
        spec = replace(spec, adaptive=False)
    return LLM(str(folder), spec, **(FLAGS | flags))


def split_of(llm: LLM) -> SplitPrefills:
    assert llm.engine.split is not None
    return llm.engine.split


def request(llm: LLM, rid: str) -> Req:
    return next(req for req, choice in llm.engine.choices.items() if choice.rid == rid)


def step_until_split(llm: LLM, rid: str) -> None:
    while request(llm, rid) not in llm.engine.scheduler.queues.split:
        llm.engine.step()


def play(
    llm: LLM,
    arrivals: Arrivals,
    sampling: SamplingParams = GREEDY,
    amid: Callable[[LLM, int], None] = lambda llm, step: None,
) -> dict[str, RequestOutput]:
    """Runs what arrives at these steps. amid: called before each step."""
    done, step, engine = dict[str, RequestOutput](), 0, llm.engine
    while engine.has_work or step <= max(arrivals):
        for rid, ids in arrivals.get(step, []):
            engine.add_request(rid, ids, sampling)
        amid(llm, step)
        done |= {one.rid: one for one in engine.step() if one.finish_reason is not None}
        engine.scheduler.check_invariant()
        step += 1
    return done


def told(done: dict[str, RequestOutput]) -> dict[str, Any]:
    """What a request says, and what was drafted and accepted for it in each round."""
    return {
        rid: (one.token_ids, one.spec.num_rounds, one.spec.num_draft_tokens, one.spec.histogram)
        for rid, one in done.items()
    }


def rounds_beside(llm: LLM) -> list[int]:
    """Grows by the number of requests of each round while a prompt is under way."""
    found, split, commit = list[int](), split_of(llm), llm.engine.scheduler.commit_round

    def watched(reqs: list[Req], result: Any) -> None:
        if split.is_busy:
            found.append(len(reqs))
        commit(reqs, result)

    llm.engine.scheduler.commit_round = watched  # type: ignore[method-assign]
    return found


@pytest.fixture(scope="session")
def subjects_of(
    folders: dict[str, tuple[Path, SpecConfig]], target: Path
) -> dict[str, tuple[Path, SpecConfig | None]]:
    lookups = {
        name: (target, SpecConfig(algorithm=name, num_draft_tokens=5))
        for name in ("NGRAM", "SUFFIX")
    }
    return {**folders, **lookups, "plain": (target, None)}


@pytest.fixture(scope="session")
def expected(
    subjects_of: dict[str, tuple[Path, SpecConfig | None]],
) -> Callable[[str], dict[str, Any]]:
    """Of whole prompts, by drafter."""
    known = dict[str, dict[str, Any]]()

    def find(name: str) -> dict[str, Any]:
        if name not in known:
            known[name] = told(play(make(*subjects_of[name]), ARRIVALS))
        return known[name]

    return find


@pytest.mark.parametrize(("name", "layers"), each_value(1, ALGORITHMS, LAYERS))
def test_any_number_of_layers_a_call_gives_the_same_tokens_and_drafts(
    name: str,
    layers: int,
    subjects_of: dict[str, tuple[Path, SpecConfig | None]],
    expected: Callable[[str], dict[str, Any]],
) -> None:
    llm = make(*subjects_of[name], **PDMUX, pdmux_layers=layers)
    beside = rounds_beside(llm)
    assert told(play(llm, ARRIVALS)) == expected(name)
    stats = llm.engine.stats().split
    assert stats is not None
    assert (stats.num_prefills, stats.num_prompts) == (2, 4)  # the short one came with a long one
    assert stats.num_calls == stats.num_prefills * -(-3 // layers)
    assert beside or layers == 3, "no round ran while a prompt was under way"


@pytest.mark.parametrize("name", ["plain", "EAGLE3", "NGRAM"])
def test_device_rounds_run_beside_prompts(
    name: str,
    subjects_of: dict[str, tuple[Path, SpecConfig | None]],
    expected: Callable[[str], dict[str, Any]],
) -> None:
    llm = make(*subjects_of[name], **PDMUX, pdmux_layers=1)
    rounds = run_on_device(llm, sizes=(1, 2, 4, 8))
    beside = rounds_beside(llm)
    found = told(play(llm, ARRIVALS))
    assert {rid: one[0] for rid, one in found.items()} == {
        rid: one[0] for rid, one in expected(name).items()
    }
    assert beside
    assert rounds.counters["replays"] > 0


def test_chunks_of_a_prompt_are_split_one_after_another(
    subjects_of: dict[str, tuple[Path, SpecConfig | None]],
    expected: Callable[[str], dict[str, Any]],
) -> None:
    llm = make(*subjects_of["EAGLE3"], **PDMUX, pdmux_layers=1, chunked_prefill_size=32)
    assert told(play(llm, ARRIVALS)) == expected("EAGLE3")
    assert split_of(llm).counters["prefills"] >= 4


def test_seeds_and_logprobs_are_those_of_whole_prompts(
    subjects_of: dict[str, tuple[Path, SpecConfig | None]],
) -> None:
    sampling = SamplingParams(
        max_tokens=10, temperature=0.9, seed=3, logprobs=2, prompt_logprobs=1, ignore_eos=True
    )
    folder, spec = subjects_of["EAGLE3"]
    whole = play(make(folder, spec), ARRIVALS, sampling)
    split = play(make(folder, spec, **PDMUX, pdmux_layers=1), ARRIVALS, sampling)
    assert told(split) == told(whole)
    for rid, one in whole.items():
        for kind in ("all_logprobs", "prompt_logprobs"):
            pairs = zip(getattr(one, kind), getattr(split[rid], kind), strict=True)
            for a, b in pairs:
                assert (a is None) == (b is None)
                assert a is None or b is None or abs(a.logprob - b.logprob) < 1e-4


def test_prefix_cache_serves_split_prompts_and_takes_them_in(
    subjects_of: dict[str, tuple[Path, SpecConfig | None]],
) -> None:
    """The second comes while the first is under way, and waits for it; the third comes later."""
    head = prompt(9, 80)
    arrivals: Arrivals = {
        0: [("r", prompt(1, 6))],
        1: [("x", head + prompt(10, 30))],
        3: [("y", head + prompt(11, 40))],
        9: [("z", head + prompt(12, 35))],
    }
    folder, spec = subjects_of["EAGLE3"]
    whole = play(make(folder, spec), arrivals)
    split = play(make(folder, spec, **PDMUX, pdmux_layers=1), arrivals)
    assert told(split) == told(whole)
    cached = {rid: one.num_cached_tokens for rid, one in split.items()}
    assert cached == {"r": 0, "x": 0, "y": 80, "z": 80}


@pytest.mark.parametrize("rids", [("c",), ("c", "d")])
def test_aborted_prompts_give_their_pages_back_and_write_none_of_them(
    rids: tuple[str, ...],
    subjects_of: dict[str, tuple[Path, SpecConfig | None]],
    expected: Callable[[str], dict[str, Any]],
) -> None:
    """What comes next is given the same pages, and the other prompt of the forward goes on."""
    llm = make(*subjects_of["EAGLE3"], **PDMUX, pdmux_layers=1, disable_radix_cache=True)
    free, later = llm.engine.stats().num_free_slots, prompt(5, 50)
    arrivals = {**ARRIVALS, 3: [], 4: [("e", later), ("f", ARRIVALS[3][1][1])]}

    def leave(llm: LLM, step: int) -> None:
        if step != 4:
            return
        held = llm.engine.scheduler.num_free_slots
        for rid in rids:
            assert request(llm, rid) in llm.engine.scheduler.queues.split
            llm.engine.abort(rid)
        lengths = sum(len(ids) for rid, ids in ARRIVALS[2] if rid in rids)
        assert llm.engine.scheduler.num_free_slots >= held + lengths

    found = told(play(llm, arrivals, amid=leave))
    assert found == {rid: one for rid, one in expected("EAGLE3").items() if rid not in rids}
    assert llm.engine.stats().num_free_slots == free
    assert split_of(llm).counters["left"] == len(rids)
    assert not split_of(llm).jobs


def test_layers_to_come_of_a_prompt_that_left_write_to_slot_0() -> None:
    """A prompt that is given its slots may have run these layers before."""
    lens, slots = [2, 3, 1], torch.tensor([4, 5, 6, 7, 8, 9])
    reqs = [Req(f"r{length}", [1] * length, GREEDY) for length in lens]
    batch: Any = SimpleNamespace(reqs=reqs)
    on_device: Any = SimpleNamespace(out_cache_loc=slots, extend_lens_cpu=lens)
    scheduler: Any = SimpleNamespace(queues=SimpleNamespace(split=dict.fromkeys(reqs, batch)))
    given: Any = None, scheduler, SimpleNamespace(), None, SplitStreams(), None
    split = SplitPrefills(*given, jobs=[SplitJob(batch, on_device, [0, 1, 2])])
    del scheduler.queues.split[reqs[1]]
    split.settle()
    assert slots.tolist() == [4, 5, 0, 0, 0, 9]
    assert [job.kept for job in split.jobs] == [[0, 2]]


def test_a_prompt_of_higher_priority_goes_first(
    subjects_of: dict[str, tuple[Path, SpecConfig | None]],
) -> None:
    llm = make(*subjects_of["plain"], **PDMUX, pdmux_layers=1)
    engine, first = llm.engine, dict[str, int]()
    engine.add_request("r", prompt(1, 6), GREEDY)
    engine.step()
    engine.add_request("low", prompt(3, 90), replace(GREEDY, priority=5))
    step_until_split(llm, "low")
    engine.add_request("high", prompt(4, 60), replace(GREEDY, priority=1))
    step = 0
    while engine.has_work:
        for one in engine.step():
            first.setdefault(one.rid, step)
        step += 1
    assert first["high"] < first["low"]
    assert split_of(llm).counters["prefills"] == 2


def test_a_prompt_that_leaves_before_its_first_layer_takes_no_other_with_it(
    subjects_of: dict[str, tuple[Path, SpecConfig | None]],
) -> None:
    """It waits, together with another, behind a forward of higher priority."""
    folder, spec = subjects_of["EAGLE3"]
    whole = play(make(folder, spec), {0: [("y", prompt(11, 50))]})
    llm = make(folder, spec, **PDMUX, pdmux_layers=1)
    engine, later = llm.engine, replace(GREEDY, priority=3)
    engine.add_request("r", prompt(1, 6), GREEDY)
    engine.step()
    engine.add_request("first", prompt(9, 70), GREEDY)
    step_until_split(llm, "first")
    for rid, ids in (("x", prompt(10, 40)), ("y", prompt(11, 50))):
        engine.add_request(rid, ids, later)
    step_until_split(llm, "y")
    (job,) = [one for one in split_of(llm).jobs if len(one.batch.reqs) == 2]
    assert job.on_device.split_index == 0
    engine.abort("x")
    done = play(llm, {0: []})
    assert done["y"].token_ids == whole["y"].token_ids
    assert done.keys() == {"r", "first", "y"}


def test_short_prompts_do_not_wait_for_long_ones_under_way(
    subjects_of: dict[str, tuple[Path, SpecConfig | None]],
) -> None:
    """One may be under way, and another long one waits."""
    llm = make(*subjects_of["plain"], **PDMUX, pdmux_layers=1)
    split_of(llm).prompts.most = 1
    engine, order = llm.engine, list[str]()
    engine.add_request("r", prompt(1, 6), replace(GREEDY, max_tokens=60))
    engine.step()
    engine.add_request("x", prompt(20, 60), GREEDY)
    step_until_split(llm, "x")
    engine.add_request("z", prompt(22, 60), GREEDY)
    engine.add_request("short", prompt(23, 9), GREEDY)
    while engine.has_work:
        order += [one.rid for one in engine.step() if one.rid not in order]
        engine.scheduler.check_invariant()
    assert order.index("short") < order.index("x") < order.index("z")
    assert split_of(llm).counters["prefills"] == 2


def test_without_kv_a_split_prompt_is_retracted_and_begins_anew(
    subjects_of: dict[str, tuple[Path, SpecConfig | None]],
) -> None:
    """Admission that keeps nothing free lets memory run short while prompts are under way."""
    sampling = replace(GREEDY, max_tokens=60)
    arrivals: Arrivals = {
        0: [(f"r{i}", prompt(20 + i, 6)) for i in range(4)],
        6: [("x", prompt(30, 50))],
        40: [("y", prompt(31, 40)), ("z", prompt(32, 45))],
    }

    def admit_all(llm: LLM, step: int) -> None:
        llm.engine.scheduler.admission.demand.share = 0.0

    folder, spec = subjects_of["EAGLE3"]
    whole = play(make(folder, spec, context_length=100), arrivals, sampling)
    flags = {"max_total_tokens": 170, "context_length": 100, "pdmux_layers": 1}
    small = make(folder, spec, **PDMUX, **flags)
    done = play(small, arrivals, sampling, amid=admit_all)
    assert {rid: one.token_ids for rid, one in done.items()} == {
        rid: one.token_ids for rid, one in whole.items()
    }
    assert small.engine.scheduler.num_retractions > 0
    assert small.engine.stats().num_free_slots == small.engine.stats().num_slots
    assert split_of(small).counters["left"] > 0


def test_a_call_that_fails_lets_its_prompts_begin_anew(
    subjects_of: dict[str, tuple[Path, SpecConfig | None]],
    expected: Callable[[str], dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = make(*subjects_of["EAGLE3"], **PDMUX, pdmux_layers=1)
    split = split_of(llm)
    run, calls = split.runner.split_layers, [0]

    def failing(*given: Any) -> Any:
        calls[0] += 1
        found = run(*given)
        if calls[0] in (2, 4):
            raise RuntimeError("a device that fails")
        return found

    monkeypatch.setattr(split.runner, "split_layers", failing)
    step = llm.engine.step
    failures = [0]

    def tolerant() -> list[RequestOutput]:
        try:
            return step()
        except RuntimeError:
            failures[0] += 1
            return []

    monkeypatch.setattr(llm.engine, "step", tolerant)
    found = play(llm, ARRIVALS)
    assert failures == [2]
    assert {rid: one.token_ids for rid, one in found.items()} == {
        rid: one[0] for rid, one in expected("EAGLE3").items()
    }


def test_new_weights_abandon_prompts_under_way(
    subjects_of: dict[str, tuple[Path, SpecConfig | None]],
    expected: Callable[[str], dict[str, Any]],
) -> None:
    folder, spec = subjects_of["EAGLE3"]
    llm = make(folder, spec, **PDMUX, pdmux_layers=1)

    def replace_weights(llm: LLM, step: int) -> None:
        if step == 4:
            assert split_of(llm).is_busy
            llm.engine.update_weights(str(folder))
            assert not split_of(llm).jobs
            assert not llm.engine.scheduler.queues.split

    found = play(llm, ARRIVALS, amid=replace_weights)
    assert {rid: one.token_ids for rid, one in found.items()} == {
        rid: one[0] for rid, one in expected("EAGLE3").items()
    }


def test_hook_sees_prompts_whole_that_were_under_way_and_split_again_without_it(
    subjects_of: dict[str, tuple[Path, SpecConfig | None]],
    expected: Callable[[str], dict[str, Any]],
) -> None:
    folder, spec = subjects_of["EAGLE3"]
    llm = make(folder, spec, **PDMUX, pdmux_layers=1)
    seen, hooks = list[int](), list[AddedHook]()

    def look(llm: LLM, step: int) -> None:
        split = split_of(llm)
        if step == 4:
            assert split.is_busy
            hooks.append(llm.add_layer_hook("layers.0", lambda one: seen.extend(one.tokens_T)))
            assert not split.jobs
        elif step == 5:
            assert not split.jobs
            assert split.counters[f"fallback: {HOOKED}"] == 1
            hooks[0].remove()

    found = play(llm, ARRIVALS, amid=look)
    assert {token for _, ids in ARRIVALS[2] for token in ids} <= {int(token) for token in seen}
    assert {rid: one.token_ids for rid, one in found.items()} == {
        rid: one[0] for rid, one in expected("EAGLE3").items()
    }
    llm.engine.flush_cache()
    calls = split_of(llm).counters["calls"]
    play(llm, ARRIVALS)
    assert split_of(llm).counters["calls"] > calls


def test_rounds_of_many_requests_are_no_prompts_that_run_whole(
    subjects_of: dict[str, tuple[Path, SpecConfig | None]],
) -> None:
    folder, _ = subjects_of["plain"]
    llm = make(folder, None, enable_pdmux=True, pdmux_min_tokens=4)
    play(llm, {0: [(str(number), prompt(number, 3)) for number in range(6)]})
    assert not [name for name in split_of(llm).counters if name.startswith("fallback")]


FAMILIES = ["qwen3next", "deepseekv2", "gemma2", "gptoss", "qwen3moe", "llama4"]


@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_every_kind_of_layer_run_split(
    family: str, small_models: dict[str, Path]
) -> None:
    """State, latent attention, windows, experts; with a prompt that leaves on the way."""
    spec = SpecConfig(algorithm="NGRAM", num_draft_tokens=4, ngram_min_match=1)

    def leave(llm: LLM, step: int) -> None:
        if step == 5:
            llm.engine.abort("c")

    found = [
        {
            rid: one.token_ids
            for rid, one in play(
                make(small_models[family], spec, **f), ARRIVALS, amid=leave
            ).items()
            if rid != "c"  # it may end before it leaves
        }
        for f in ({}, {**PDMUX, "pdmux_layers": 1})
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_quantised_weights_run_split(quantization: str, small_models: dict[str, Path]) -> None:
    flags = {
        "quantization": quantization,
        "dtype": "bfloat16" if quantization == "int8" else "float32",
    }
    found = [
        told(play(make(small_models["llama"], None, **flags, **f), {0: [("x", prompt(3, 60))]}))
        for f in ({}, {**PDMUX, "pdmux_layers": 1})
    ]
    assert found[0] == found[1]


def test_with_nothing_beside_it_a_prompt_runs_in_one_call(
    subjects_of: dict[str, tuple[Path, SpecConfig | None]],
) -> None:
    llm = make(*subjects_of["plain"], **PDMUX)
    llm.engine.add_request("x", prompt(3, 60), GREEDY)
    while not llm.engine.step():
        pass
    assert split_of(llm).counters["calls"] == 1


def test_short_prompts_run_whole(subjects_of: dict[str, tuple[Path, SpecConfig | None]]) -> None:
    llm = make(*subjects_of["plain"], enable_pdmux=True)
    play(llm, {0: [("a", prompt(1, 7))], 2: [("b", prompt(2, 20))]})
    assert not split_of(llm).counters["prefills"]


def test_rounds_beside_prompts_teach_no_costs(
    subjects_of: dict[str, tuple[Path, SpecConfig | None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is accepted in them counts, what they took does not."""
    llm = make(*subjects_of["EAGLE3"], **PDMUX, pdmux_layers=1)
    rounds = run_on_device(llm)
    pipeline, split = llm.engine.pipeline, split_of(llm)
    assert pipeline is not None
    join_pipeline(split, pipeline)
    seen = dict[bool, list[bool]]()

    def observe(observation: RoundObservation) -> None:
        seen.setdefault(split.is_busy, []).append(observation.seconds is not None)

    chooser = SimpleNamespace(
        observe=observe,
        observe_host=lambda *given: None,
        skipped=lambda *given: None,
        kept=lambda size: None,
        choose=lambda size: pipeline.depths._deepest,
        set_context_length=lambda *given: False,
        resolved=lambda choice: choice,
    )
    monkeypatch.setattr(pipeline.depths, "chooser", chooser)
    play(llm, ARRIVALS)
    assert rounds.counters["replays"] > 0
    assert not any(seen[True])
    assert all(seen[False])


def test_rounds_take_the_graphs_of_the_share_that_prompts_have(
    subjects_of: dict[str, tuple[Path, SpecConfig | None]],
    expected: Callable[[str], dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU the streams of a GPU are pretended: a call is done when it is next asked."""
    llm = make(*subjects_of["EAGLE3"], **PDMUX, pdmux_layers=1)
    rounds, split = run_on_device(llm, sizes=(1, 2, 4, 8)), split_of(llm)
    assert llm.engine.pipeline is not None
    monkeypatch.setattr(split, "streams", PretendedStreams())
    policy = SplitPrefillPolicy(3, (0.5,), layers=1, turns=False)
    monkeypatch.setattr(split, "policy", policy)
    monkeypatch.setattr(split, "lanes", rounds.lanes)
    rounds.lanes.streams = {0.5: None}  # type: ignore[dict-item]
    join_pipeline(split, llm.engine.pipeline)
    launched, launch = list[float | None](), rounds._launch

    def watched(reqs: Any, plan: Any, key: RoundKey) -> Any:
        launched.append(key.share)
        return launch(reqs, plan, key)

    monkeypatch.setattr(rounds, "_launch", watched)
    found = told(play(llm, ARRIVALS))
    assert {rid: one[0] for rid, one in found.items()} == {
        rid: one[0] for rid, one in expected("EAGLE3").items()
    }
    assert set(launched) == {None, 0.5}
    assert rounds.lanes.share is None
    assert not rounds.lanes.num_on_all


def test_rounds_that_need_all_sms_leave_prompts_no_share(
    subjects_of: dict[str, tuple[Path, SpecConfig | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(*subjects_of["plain"], **PDMUX)
    rounds, split = run_on_device(llm), split_of(llm)
    assert llm.engine.pipeline is not None
    monkeypatch.setattr(split, "streams", PretendedStreams())
    monkeypatch.setattr(split, "policy", SplitPrefillPolicy(3, (0.5,)))
    rounds.lanes.streams = {0.5: None}  # type: ignore[dict-item]

    def fails(*given: Any) -> None:
        raise RuntimeError("a cluster that has no room")

    monkeypatch.setattr(rounds, "graph", fails)
    join_pipeline(split, llm.engine.pipeline)
    monkeypatch.undo()
    assert not rounds.lanes.streams
    reason = split.no_shares
    assert reason is not None
    play(llm, {0: [("x", prompt(3, 60))]})
    stats = llm.engine.stats().split
    assert stats is not None
    assert stats.fallbacks == {reason: 1}


class LateCall:
    """Done when it was asked three times, or waited for."""

    seconds = 0.001

    def __init__(self, in_turn: bool = False) -> None:
        self.left, self.in_turn = 3, in_turn

    @property
    def is_readable(self) -> bool:
        return self.in_turn or self.is_done

    @property
    def is_done(self) -> bool:
        self.left -= 1
        return self.left < 0

    def wait(self) -> None:
        self.left = 0


class PretendedStreams(SplitStreams):
    """Of a GPU: what is launched is not done yet, and joined before what it used is given away."""

    most_calls = 2
    shares = (0.5,)

    def launch(self, share: float | None, run: Callable[[], Any]) -> tuple[Any, Any]:
        return run(), LateCall()

    def take_turn(self, run: Callable[[], Any]) -> tuple[Any, Any]:
        return run(), LateCall(in_turn=True)

    stay = take_turn


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"enable_mixed_chunk": True}, "--enable-mixed-chunk"),
        ({"prefill_attention_backend": "flashinfer"}, "flashinfer"),
        ({"chunked_prefill_size": 8}, "--pdmux-min-tokens"),
    ],
)
def test_what_does_not_go_together_is_refused(
    flags: dict[str, Any], said: str, small_models: dict[str, Path]
) -> None:
    with pytest.raises(ConfigError, match=said):
        make(small_models["llama"], None, **PDMUX, **flags)


def test_options_without_pdmux_are_refused(small_models: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="enable-pdmux"):
        make(small_models["llama"], None, pdmux_layers=2)


def test_prompts_under_way_are_counted_as_running(
    subjects_of: dict[str, tuple[Path, SpecConfig | None]],
) -> None:
    llm = make(*subjects_of["plain"], **PDMUX, pdmux_layers=1)
    llm.engine.add_request("r", prompt(1, 6), GREEDY)
    llm.engine.step()
    llm.engine.add_request("x", prompt(3, 60), GREEDY)
    step_until_split(llm, "x")
    assert request(llm, "x").state is ReqState.PREFILLING
    stats = llm.engine.stats()
    assert stats.split is not None
    assert (stats.num_running, stats.num_waiting, stats.split.num_under_way) == (2, 0, 1)
    play(llm, {0: []})
