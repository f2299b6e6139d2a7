"""Rounds whose forwards are replayed one by one give what eager rounds give.

On a CPU the same code runs, its graphs being functions that are called again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine import LLM, GrammarSpec, SamplingParams, SpecConfig
from specengine.core.errors import GraphInputError
from specengine.core.sampling import SpecControl
from specengine.draft.worker import DraftWorker
from tests.draft.eagle_checkpoints import almost_bigram, oracle_eagle3
from tests.draft.mtp_reading import add_mtp
from tests.halves import slow_but
from tests.support.cpu_graphs import graphs_on_the_cpu, use_functions
from tests.support.mtp_targets import predictable

PROMPTS = ["abcabcabcabcabc", "x", "0123456789" * 4, "to be or not to be, that is to be"]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0)
LIMITED = replace(GREEDY, speculative=SpecControl(num_steps=1))
BATCHES = [
    [
        replace(GREEDY, temperature=0.8, seed=5),
        replace(GREEDY, logprobs=2),
        LIMITED,
        SamplingParams(max_tokens=12, temperature=0.0, grammar=GrammarSpec.regex("[a-f]{60}")),
    ],
    [replace(GREEDY, presence_penalty=0.7, frequency_penalty=0.2)] * 2,
]
CHAIN: dict[str, Any] = {"num_steps": 3}
TREE: dict[str, Any] = {"num_steps": 3, "eagle_topk": 2, "num_draft_tokens": 7}
TEXT: dict[str, Any] = {"num_draft_tokens": 6}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "NGRAM": ("NGRAM", TEXT | {"ngram_min_match": 1}),
    "NGRAM tree": ("NGRAM", TEXT | {"ngram_min_match": 1, "ngram_branches": 3}),
    "SUFFIX": ("SUFFIX", TEXT),
    "EAGLE3": ("EAGLE3", CHAIN),
    "EAGLE3 sampled drafts": ("EAGLE3", CHAIN | {"draft_sampling": True}),
    "EAGLE3 tree": ("EAGLE3", TREE),
    "EAGLE3 tree of samples": ("EAGLE3", TREE | {"draft_sampling": True}),
    "EAGLE3 and suffixes": (
        "EAGLE3",
        CHAIN | {"hybrid_suffix": True, "hybrid_suffix_min_match": 3, "num_draft_tokens": 8},
    ),
    "STANDALONE": ("STANDALONE", CHAIN),
    "STANDALONE tree": ("STANDALONE", TREE),
    "MTP": ("MTP", CHAIN),
}


@pytest.fixture(scope="module")
def target(small_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ragged-graphs")
    return almost_bigram(folder / "target", small_models["llama"], 0.03)


@pytest.fixture(scope="module")
def specs(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, SpecConfig]:
    folder = tmp_path_factory.mktemp("ragged-graphs-drafts")
    paths = {
        "EAGLE3": oracle_eagle3(folder / "eagle3", target, 250, focus=20.0),
        "STANDALONE": almost_bigram(folder / "standalone", target, 1.0),
    }
    return {
        name: SpecConfig(
            algorithm=algorithm,
            adaptive=False,
            draft_model_path=str(paths[algorithm]) if algorithm in paths else None,
            **shape,
        )
        for name, (algorithm, shape) in SHAPES.items()
    }


@pytest.fixture(scope="module")
def with_mtp(small_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ragged-graphs-mtp")
    add_mtp(small_models["qwen2"], folder, "mimo", 3)
    return predictable(folder, "mimo", 3, residue=0.2)


def make(target: Path, spec: SpecConfig | None, **flags: Any) -> LLM:
    return LLM(str(target), spec, **{"dtype": "float32", "max_total_tokens": 2048, **flags})


def tokens(llm: LLM, params: list[SamplingParams]) -> list[list[int]]:
    found = [one.token_ids for one in llm.generate(PROMPTS[: len(params)], params)]
    llm.engine.scheduler.check_invariant()
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="graphs are tested where there is a GPU")
@pytest.mark.parametrize(
    ("name", "in_one"),
    slow_but(
        [
            ("NGRAM tree", True),
            ("EAGLE3", False),
            ("EAGLE3 tree of samples", True),
            ("EAGLE3 and suffixes", True),
            ("STANDALONE tree", True),
            ("MTP", True),
        ],
        [*((name, True) for name in SHAPES), ("EAGLE3", False), ("EAGLE3 tree", False)],
    ),
)
def test_replayed_rounds_give_the_tokens_of_eager_rounds(
    name: str,
    in_one: bool,
    target: Path,
    with_mtp: Path,
    specs: dict[str, SpecConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_functions(monkeypatch)
    folder = with_mtp if name == "MTP" else target
    eager, replayed = make(folder, specs[name]), make(folder, specs[name])
    counters = graphs_on_the_cpu(replayed, in_one)
    for params in BATCHES:
        assert tokens(replayed, params) == tokens(eager, params)
    assert counters["verify"]["replays"] > 2
    loops = counters.get("draft loop", Counter())
    drafts = counters["draft"]["replays"] + loops["replays"]
    assert (drafts > 8) == (specs[name].algorithm in LEARNED)
    assert counters["verify"]["captures"] <= 12
    assert replayed.engine.scheduler.spec_totals.num_accepted_tokens > 0
    refused = loops["fallback: the drafter needs the host in the middle of a draft"]
    assert (refused > 2) == ("sample" in name)
    assert "draft loop" not in counters or refused > 2 or loops["replays"] > 2


LEARNED = {"EAGLE3", "STANDALONE", "MTP"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="graphs are tested where there is a GPU")
@pytest.mark.parametrize(
    ("name", "limited"),
    slow_but(
        [("EAGLE3 tree", (0, 3))],
        product(["EAGLE3 tree", "STANDALONE tree"], [(0, 3), (1, 2)]),
    ),
)
def test_stochastic_tree_is_the_same_whatever_other_requests_draft(
    name: str,
    limited: tuple[int, ...],
    target: Path,
    specs: dict[str, SpecConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Near the end of a request its trees are smaller, in a draft loop too."""
    use_functions(monkeypatch)
    spec = replace(specs[name], verify="target_only")
    eager, replayed = make(target, spec), make(target, spec)
    counters = graphs_on_the_cpu(replayed)
    for first in limited:
        params = [replace(BATCHES[0][0], seed=n, max_tokens=2 + first + 3 * n) for n in range(4)]
        params[first] = replace(params[first], speculative=LIMITED.speculative)
        pairs = [one.generate(PROMPTS[:4], params) for one in (replayed, eager)]
        for found, expected in zip(*pairs, strict=True):
            assert found.token_ids == expected.token_ids
            assert found.completions[0].spec.histogram == expected.completions[0].spec.histogram
            drafted, due = (x.completions[0].spec.num_draft_tokens for x in (found, expected))
            assert drafted == due
    assert counters["draft loop"]["replays"] > 8


@pytest.mark.parametrize("name", slow_but(["EAGLE3", "MTP"], ["EAGLE3", "STANDALONE", "MTP"]))
def test_prompts_replay_graphs_that_were_captured_ahead(
    name: str,
    target: Path,
    with_mtp: Path,
    specs: dict[str, SpecConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_functions(monkeypatch)
    folder = with_mtp if name == "MTP" else target
    eager, replayed = (make(folder, specs[name], device="cpu") for _ in range(2))
    counters = graphs_on_the_cpu(replayed)["draft"]
    drafter = replayed.engine.drafter
    captures = [*drafter.captures()]
    assert len(captures) >= 5
    for prepare in captures:
        prepare()
    assert not [*drafter.captures()]
    assert counters["captures"] == len(captures)
    for count in (1, 4):
        prompts, params = [one * 9 for one in PROMPTS[:count]], replace(GREEDY, max_tokens=1)
        expected = eager.generate(prompts, params)
        found = replayed.generate(prompts, params)
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert counters["replays"] > 1
    assert counters["captures"] == len(captures)
    assert tokens(replayed, [GREEDY] * 4) == tokens(eager, [GREEDY] * 4)


@pytest.mark.parametrize(
    ("name", "context"),
    slow_but(
        [("EAGLE3", 60), ("STANDALONE", 64)], [("EAGLE3", 60), ("EAGLE3", 140), ("STANDALONE", 64)]
    ),
)
def test_short_context_limits_the_width_of_prefill_graphs(
    name: str,
    context: int,
    target: Path,
    specs: dict[str, SpecConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Padding tokens need positions within the page table."""
    use_functions(monkeypatch)
    given = {"device": "cpu", "context_length": context}
    eager, replayed = (make(target, specs[name], **given) for _ in range(2))
    graphs_on_the_cpu(replayed)
    for count in (1, 4):
        assert tokens(replayed, [GREEDY] * count) == tokens(eager, [GREEDY] * count)
    drafter = replayed.engine.drafter
    assert isinstance(drafter, DraftWorker)
    assert drafter.runner.ragged_graphs is not None
    widths = {key.width for key in drafter.runner.ragged_graphs.cache.captured}
    assert (max(widths, default=0) >= 64) == (context >= 64)
    assert max(widths, default=0) <= context


def test_moved_page_table_is_refused_by_the_guard(
    target: Path, specs: dict[str, SpecConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_functions(monkeypatch)
    llm = make(target, specs["EAGLE3"], device="cpu")
    runner = llm.engine.parts.worker.runner
    runner.guards_graphs = True
    graphs_on_the_cpu(llm)
    tokens(llm, BATCHES[1])
    assert runner.ragged_graphs is not None
    table = runner.pools.req_to_token_pool
    table.req_to_token = table.req_to_token.clone()
    with pytest.raises(GraphInputError, match=r"captured with .*\.req_to_token at"):
        tokens(llm, BATCHES[1])


@pytest.mark.parametrize(
    "name",
    slow_but(
        ["EAGLE3", "STANDALONE tree"], ["EAGLE3", "EAGLE3 tree", "STANDALONE", "STANDALONE tree"]
    ),
)
def test_moved_buffer_of_a_draft_loop_is_refused_by_the_guard(
    name: str, target: Path, specs: dict[str, SpecConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_functions(monkeypatch)
    llm = make(target, specs[name], device="cpu")
    drafter: Any = llm.engine.drafter
    drafter.runner.guards_graphs = True
    counters = graphs_on_the_cpu(llm)
    for params in BATCHES:
        tokens(llm, params)
    assert counters["draft loop"]["replays"] > 2
    kept = "previous" if specs[name].algorithm == "STANDALONE" else "states"
    setattr(drafter, kept, getattr(drafter, kept).clone())
    with pytest.raises(GraphInputError, match=rf"captured with loops\.drafter\.{kept} at"):
        tokens(llm, BATCHES[1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnTheGpu:
    @pytest.mark.parametrize("in_one", [False, True], ids=["level by level", "in one"])
    @pytest.mark.parametrize("name", SHAPES)
    def test_graphs_give_the_tokens_of_eager_rounds(
        self, name: str, in_one: bool, target: Path, with_mtp: Path, specs: dict[str, SpecConfig]
    ) -> None:
        folder = with_mtp if name == "MTP" else target
        eager = make(folder, specs[name], disable_cuda_graph=True)
        replayed = make(folder, specs[name], cuda_graph_bs=(1, 2, 8))
        drafter = replayed.engine.parts.drafter
        if isinstance(drafter, DraftWorker) and not in_one:
            drafter.loops = None
        replayed.engine._runs_on_device = lambda *_: False  # type: ignore[method-assign]
        long = [replace(one, max_tokens=24) for one in BATCHES[0]]
        for params in [[GREEDY] * 4, long, BATCHES[1], [replace(GREEDY, max_tokens=24)]]:
            assert tokens(replayed, params) == tokens(eager, params)
        stats = replayed.engine.stats()
        assert stats.graphs["verify"].replays > 5
        assert not stats.graphs["verify"].fallbacks
        assert replayed.engine.scheduler.spec_totals.num_accepted_tokens > 0

    def test_padding_off_is_counted(self, target: Path, specs: dict[str, SpecConfig]) -> None:
        flags = {"cuda_graph_bs": (2,), "disable_cuda_graph_padding": True}
        eager = make(target, specs["EAGLE3"], disable_cuda_graph=True)
        replayed = make(target, specs["EAGLE3"], **flags)
        replayed.engine._runs_on_device = lambda *_: False  # type: ignore[method-assign]
        for params in (BATCHES[1], BATCHES[1][:1]):
            assert tokens(replayed, params) == tokens(eager, params)
        stats = replayed.engine.stats()
        assert stats.graphs["verify"].fallbacks["batch size not captured, padding off"] > 0
        assert stats.graphs["verify"].replays > 0

    def test_moved_buffer_is_refused_by_the_guard(
        self, target: Path, specs: dict[str, SpecConfig]
    ) -> None:
        llm = make(target, specs["EAGLE3"], cuda_graph_bs=(2,), debug_cuda_graph=True)
        tokens(llm, BATCHES[1])
        head = llm.engine.parts.worker.runner.model.lm_head  # type: ignore[attr-defined]
        head.weight = torch.nn.Parameter(head.weight.clone(), requires_grad=False)
        with pytest.raises(GraphInputError, match=r"captured with .*\.lm_head\.weight at"):
            tokens(llm, BATCHES[1])
