"""Recurrent state follows what is accepted, cached, retracted and aborted, on the host's rounds and
on the device's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from specengine import LLM, SamplingParams, SpecConfig
from specengine.kernels.delta import delta_chunks_triton, delta_prompt_triton, delta_rule
from specengine.kernels.delta.types import StatePaths
from specengine.memory.state_pool import StatePool
from tests.draft import eagle_checkpoints as checkpoints
from tests.e2e.near_ties import assert_same_but_for_ties
from tests.engine.state_mutants import STATE_MUTANTS, StateMutant
from tests.halves import slow_but, thinned
from tests.support.device_rounds import run_on_device

FAMILY = "qwen3next"
PROMPTS = ["The quick brown fox", "x", "to be or not to be, that is the question: to be " * 2]
GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)


def lookup(**options: Any) -> SpecConfig:
    """Drafts that are right once a text has been said before."""
    return SpecConfig(
        algorithm="NGRAM",
        adaptive=False,
        ngram_min_match=1,
        ngram_shared_corpus=True,
        num_draft_tokens=6,
        **options,
    )


CHAIN, TREE = lookup(), lookup(ngram_branches=3)
SPECS = {"plain": None, "chain": CHAIN, "tree": TREE}


def make(folder: Path, spec: SpecConfig | None = None, **flags: Any) -> LLM:
    """On the CPU, where device rounds run without graphs, also beside a GPU."""
    given = {"device": "cpu", "dtype": "float32", "max_total_tokens": 4096}
    return LLM(str(folder), spec, **given | flags)


def texts(llm: LLM, prompts: list[str] | None = None) -> list[list[int]]:
    found = [one.token_ids for one in llm.generate(prompts or PROMPTS, GREEDY)]
    llm.engine.scheduler.check_invariant()
    return found


@pytest.fixture(scope="module")
def target(small_models: dict[str, Path]) -> Path:
    return small_models[FAMILY]


@pytest.fixture(scope="module")
def alone(target: Path) -> list[list[int]]:
    """Each prompt by itself, without speculation, without the prefix cache."""
    llm = make(target, disable_radix_cache=True)
    return [texts(llm, [prompt])[0] for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("name", "on_device"),
    slow_but(
        [("plain", False), ("chain", True), ("tree", False), ("tree", True)],
        product(SPECS, [False, True]),
    ),
)
def test_what_was_said_before_is_accepted_and_changes_nothing(
    name: str, on_device: bool, target: Path, alone: list[list[int]]
) -> None:
    llm = make(target, SPECS[name])
    if on_device:
        run_on_device(llm)
    assert [texts(llm), texts(llm)] == [alone, alone]
    accepted = llm.engine.scheduler.spec_totals.num_accepted_tokens
    assert accepted == 0 if name == "plain" else accepted > 20


@pytest.mark.parametrize("topk", [1, 3], ids=["chain", "tree"])
def test_random_eagle3_changes_no_token_on_the_device(
    topk: int, target: Path, alone: list[list[int]], tmp_path: Path
) -> None:
    draft = checkpoints.eagle3(tmp_path / "draft", target)
    given = {"draft_model_path": str(draft), "num_steps": 3, "eagle_topk": topk}
    spec = SpecConfig(algorithm="EAGLE3", adaptive=False, num_draft_tokens=4 * topk, **given)
    llm = make(target, spec)
    run_on_device(llm)
    assert texts(llm) == alone
    assert llm.engine.scheduler.spec_totals.num_draft_tokens > 0


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")
@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
def test_triton_kernels_in_device_rounds_change_nothing(
    spec: SpecConfig, target: Path, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    llm = make(target, spec)
    run_on_device(llm)
    monkeypatch.setattr(delta_rule, "use_triton", lambda backend, x: True)
    short = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    for _ in range(2):
        found = llm.generate(PROMPTS[:2], short)
        assert [one.token_ids for one in found] == [one[:4] for one in alone[:2]]
    assert llm.engine.scheduler.spec_totals.num_accepted_tokens > 0


@pytest.mark.parametrize(
    ("mutant", "name", "on_device"),
    thinned(2, STATE_MUTANTS, ["chain", "tree"], [False, True]),
    ids=lambda value: value.name if isinstance(value, StateMutant) else None,
)
def test_wrong_rollback_is_noticed(
    mutant: StateMutant,
    name: str,
    on_device: bool,
    target: Path,
    alone: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drafts are wrong the first time, and right the second."""
    llm = make(target, SPECS[name], disable_radix_cache=True)
    if on_device:
        run_on_device(llm)
    keep = StatePool.keep_paths

    def spoilt(pool: StatePool, paths: StatePaths) -> None:
        keep(pool, mutant.spoil(paths))

    monkeypatch.setattr(StatePool, "keep_paths", spoilt)
    assert texts(llm) != alone or texts(llm) != alone


FLAGS: dict[str, dict[str, Any]] = {
    "pages of 1": {},
    "pages of 16": {"page_size": 16},
    "chunks": {"chunked_prefill_size": 16},
    "mixed chunks": {"chunked_prefill_size": 16, "enable_mixed_chunk": True},
    "few snapshots": {"max_state_snapshots": 1},
    "no snapshots": {"max_state_snapshots": 0},
}


@pytest.mark.parametrize(
    "name", slow_but(["pages of 16", "mixed chunks", "few snapshots", "no snapshots"], FLAGS)
)
def test_cached_prefixes_go_on_from_snapshots(
    name: str, target: Path, alone: list[list[int]]
) -> None:
    """The first time, what prompts share is found: the second, each whole prompt; the third, what
    follows on a prompt."""
    llm = make(target, CHAIN, **FLAGS[name])
    for _ in range(2):
        assert texts(llm) == alone
    snapshots, scheduler = llm.engine.scheduler.ledger.snapshots, llm.engine.scheduler
    assert snapshots is not None
    has_any = bool(snapshots.count)
    assert bool(snapshots.num_kept) == bool(scheduler.num_cached_tokens) == has_any
    longer = [prompt + " and then" for prompt in PROMPTS]
    plain = make(target, disable_radix_cache=True)
    assert texts(llm, longer) == texts(plain, longer)


def test_third_request_finds_what_two_have_shared(target: Path) -> None:
    """Prompts that part: KV alone does not tell where a state was; the second leaves one there."""
    shared = "Here is a long system prompt that all of them begin with. "
    prompts = [shared + tail for tail in ("One", "Another question", "A third, longer question")]
    llm, plain = make(target), make(target, disable_radix_cache=True)
    found = [llm.generate([prompt], GREEDY)[0] for prompt in prompts]
    assert [one.num_cached_tokens for one in found[:2]] == [0, 0]
    assert found[2].num_cached_tokens >= len(shared)
    assert [one.token_ids for one in found] == texts(plain, prompts)


@pytest.mark.parametrize("name", slow_but(["plain", "tree"], SPECS))
def test_retracted_requests_say_the_same(name: str, target: Path) -> None:
    prompts = [f"{i}{i}{i}" for i in range(8)]
    expected = texts(make(target, disable_radix_cache=True), prompts)
    tight = make(target, SPECS[name], max_total_tokens=100)
    tight.engine.scheduler.admission.demand.share = 0.0
    for _ in range(2):
        assert texts(tight, prompts) == expected
    assert tight.engine.scheduler.num_retractions > 0


def test_aborted_request_leaves_its_row_clean(target: Path, alone: list[list[int]]) -> None:
    llm = make(target, CHAIN, max_running_requests=2, chunked_prefill_size=16)
    run_on_device(llm, sizes=(1, 2))
    ids = llm.tokenizer.encode(PROMPTS[2])
    for steps in (1, 3, 9):  # amid its prompt, behind it, amid its output
        llm.engine.add_request("gone", ids, GREEDY)
        for _ in range(steps):
            llm.engine.step()
        llm.engine.abort("gone")
        llm.engine.scheduler.check_invariant()
        assert texts(llm) == alone


def test_choices_of_one_prompt_are_those_of_separate_requests(target: Path) -> None:
    sampled = {"max_tokens": 16, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    llm, plain = make(target, TREE), make(target, disable_radix_cache=True)
    found, expected = (
        one.generate([PROMPTS[2]], SamplingParams(n=3, **sampled))[0] for one in (llm, plain)
    )
    pairs = zip(found.completions, expected.completions, strict=True)
    assert all(one.token_ids == other.token_ids for one, other in pairs)
    assert llm.engine.scheduler.ledger.snapshots.num_kept > 0


@pytest.mark.parametrize("where", ["collect", "_launch", "host"])
def test_step_that_fails_moves_no_state_on_twice(
    where: str, target: Path, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(target, CHAIN)
    owner, method = (
        (llm.engine.host_round, "run") if where == "host" else (run_on_device(llm), where)
    )
    calls, call = 0, getattr(owner, method)

    def fail_every_fifth(*given: Any) -> Any:
        nonlocal calls
        calls, done = calls + 1, call(*given)
        if calls % 5 == 0:
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr(owner, method, fail_every_fifth)
    for number, prompt in enumerate(PROMPTS):
        llm.engine.add_request(str(number), llm.tokenizer.encode(prompt), GREEDY)
    found, num_lost = dict[str, list[int]](), 0
    while llm.engine.has_work:
        try:
            found |= {one.rid: one.token_ids for one in llm.engine.step()}
        except KeyboardInterrupt:
            num_lost += 1
    assert num_lost > 1
    assert found == {str(number): text for number, text in enumerate(alone)}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", SPECS)
def test_graphs_on_a_gpu_change_nothing(name: str, target: Path) -> None:
    """Float32: rounds in graphs against eager ones, and these against the reference kernels."""
    eager = {"device": "cuda", "disable_cuda_graph": True, "disable_radix_cache": True}
    expected = texts(make(target, **eager))
    llm = make(target, SPECS[name], device="cuda", cuda_graph_bs=(1, 2, 4))
    assert [texts(llm), texts(llm)] == [expected, expected]
    rounds = llm.engine.stats().graphs["round"]
    assert rounds.replays > 0
    assert rounds.fallbacks == {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_rule, "use_triton", lambda backend, x: False)
        assert texts(make(target, **eager)) == expected


def counted(form: ModuleType, calls: list[ModuleType]) -> Callable[..., Tensor]:
    """Its function for prompts. calls: takes the form at each call."""

    def extend(*args: Any) -> Tensor:
        calls.append(form)
        made: Tensor = form.extend(*args)
        return made

    return extend


LONG = [[3 + (7 * place + number) % 200 for place in range(120 * number)] for number in (1, 2, 4)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_prompts_in_chunks_on_a_gpu_change_no_text_but_for_ties(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16, prompts of some chunks, cut in the middle and going on from snapshots."""
    asked = replace(GREEDY, max_tokens=48, logprobs=8)
    found, calls = [], []
    for form in (delta_prompt_triton, delta_chunks_triton):
        monkeypatch.setattr(delta_rule, "_in_triton", lambda *_, form=form: counted(form, calls))
        llm = make(target, device="cuda", dtype="bfloat16", chunked_prefill_size=256)
        calls.clear()  # the first engine of a process also compiles ahead
        found.append([one for _ in range(2) for one in llm.generate(LONG, asked, progress=False)])
        assert llm.engine.stats().num_cached_tokens > 0  # of the second time
        assert calls.count(form) > 2
    assert_same_but_for_ties(found[1], found[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_prompts_in_chunks_on_a_gpu_are_as_near_to_float32_as_token_by_token(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearly: in chunks keys, queries and what a chunk gives are kept in bfloat16. Rounded so in
    PyTorch, the median is 1.12 times that of tokens one by one; a few texts part far from it."""
    asked = replace(GREEDY, max_tokens=1, prompt_logprobs=1)

    def logprobs(dtype: str, extend: Any) -> Tensor:
        """Of each token of the prompts, given those before it."""
        monkeypatch.setattr(delta_rule, "_in_triton", lambda *_: extend)
        llm = make(target, device="cuda", dtype=dtype, disable_radix_cache=True)
        done = llm.generate(LONG, asked, progress=False)
        return torch.tensor([one.logprob for text in done for one in text.prompt_logprobs if one])

    exact = logprobs("float32", None)  # by PyTorch
    in_steps = logprobs("bfloat16", delta_prompt_triton.extend) - exact
    in_chunks = logprobs("bfloat16", delta_chunks_triton.extend) - exact
    assert in_steps.abs().max() > 0
    assert not torch.equal(in_chunks, in_steps)
    assert in_chunks.abs().median() < 1.5 * in_steps.abs().median()
