"""The round that runs on the device alone: what it decides is what the other round decides.

On a CPU the same code runs without a graph, and attention in plain PyTorch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specengine import LLM, GrammarSpec, SamplingParams, SpecConfig
from specengine.core.errors import GraphInputError
from specengine.core.request import TokenLogprob
from specengine.core.spec import RowDrafter
from specengine.draft.eagle import worker as eagle
from specengine.draft.standalone.worker import StandaloneWorker
from specengine.engine import row_choices
from specengine.engine.graph_round import GraphRound
from specengine.engine.row_choices import Choosing
from specengine.kernels.keep_rows import keep_rows
from tests.support.device_lengths import DeviceLengths

PROMPTS = ["The quick brown fox", "x", "0123456789" * 4]
NEW_TOKENS = 24
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, temperature=0.0)


@pytest.fixture(scope="module")
def drafts(drafters: dict[str, str]) -> dict[str, SpecConfig | None]:
    specs: dict[str, SpecConfig | None] = {
        "plain": None,
        "NGRAM": SpecConfig(algorithm="NGRAM", adaptive=False, ngram_min_match=1),
        "SUFFIX": SpecConfig(algorithm="SUFFIX", adaptive=False, num_draft_tokens=6),
    }
    for name, path in drafters.items():
        specs[name] = SpecConfig(algorithm=name, adaptive=False, draft_model_path=path, num_steps=3)
    return specs


def make(target: Path, spec: SpecConfig | None, **flags: object) -> LLM:
    return LLM(str(target), spec, dtype="float32", max_total_tokens=2048, **flags)


def assert_close(found: list[TokenLogprob], expected: list[TokenLogprob]) -> None:
    assert [one.token for one in found] == [one.token for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]


def let_fly(llm: LLM) -> None:
    """Before any request."""
    if isinstance(llm.engine.drafter, StandaloneWorker):
        llm.engine.drafter.flies = True


def on_the_cpu(llm: LLM) -> GraphRound:
    drafter = llm.engine.drafter
    assert isinstance(drafter, RowDrafter)
    worker = llm.engine.parts.worker
    backend = DeviceLengths(torch.device("cpu"))
    for runner in (worker.runner, getattr(drafter, "runner", worker.runner)):
        runner.attn_backend = backend
    assert drafter.row_steps is not None
    return GraphRound(worker, drafter, [drafter.row_steps], [4])


SAMPLED = [  # every parameter of those that fly, and a greedy one among them
    replace(GREEDY, temperature=0.8, top_p=0.95, seed=1),
    GREEDY,
    replace(GREEDY, temperature=1.3, top_k=20, min_p=0.02, seed=2),
    replace(GREEDY, temperature=0.6, top_k=7, top_p=0.7, seed=-3),
    replace(GREEDY, temperature=1.0, seed=4),
    replace(GREEDY, temperature=2.0, min_p=0.1, seed=2**62),
    replace(GREEDY, temperature=1.0, top_k=1, seed=6),
]

EDITED = [
    replace(GREEDY, frequency_penalty=0.8, presence_penalty=-0.2, logit_bias={5: 2.0, 9: -3.0}),
    replace(
        GREEDY, temperature=0.9, repetition_penalty=1.4, seed=5, min_tokens=9, stop_token_ids=(7,)
    ),
    replace(GREEDY, temperature=0.7, top_p=0.9, seed=6),
]

BIASED = [replace(GREEDY, logit_bias=dict.fromkeys(range(3, 40, 3), 9.0)), GREEDY, GREEDY]
TOLD = [replace(GREEDY, logprobs=3), replace(EDITED[1], logprobs=0), SAMPLED[0]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="graphs are tested where there is a GPU")
@pytest.mark.parametrize(
    "params",
    [[GREEDY] * 3, SAMPLED[:3], EDITED, BIASED, TOLD],
    ids=["greedy", "sampled", "edited", "biased", "logprobs"],
)
@pytest.mark.parametrize("name", ["plain", "EAGLE", "EAGLE3", "STANDALONE"])
def test_rounds_without_the_host(
    name: str, params: list[SamplingParams], target: Path, drafts: dict[str, SpecConfig | None]
) -> None:
    spec = drafts[name]
    expected = make(target, None, device="cpu").generate(PROMPTS, params)
    by_hand = make(target, spec, device="cpu")
    let_fly(by_hand)
    engine = by_hand.engine
    lengths = [one.spec.histogram for one in make(target, spec).generate(PROMPTS, params)]
    for i, (prompt, wish) in enumerate(zip(PROMPTS, params, strict=True)):
        engine.add_request(str(i), by_hand.tokenizer.encode(prompt), wish)
    engine.step()  # the prefill
    batch = engine.scheduler.schedule()
    assert batch is not None
    flying = on_the_cpu(by_hand)
    assert flying.can_run(batch)
    state, choosing = flying.state, Choosing.of(batch.reqs)
    rows = torch.tensor([*(req.req_pool_idx or 0 for req in batch.reqs), 0])
    flying.choices.write(batch.reqs, rows[:-1], choosing)
    for req in batch.reqs:
        assert req.req_pool_idx is not None
        state.lens[req.req_pool_idx], state.roots[req.req_pool_idx] = req.kv_len, req.last_token
        assert engine.scheduler.ledger.reserve(req, 200)
    found = [list(req.output_ids) for req in batch.reqs]
    accepted: list[list[int]] = [[] for _ in batch.reqs]
    told = [list(req.logprobs) for req in batch.reqs]
    flying.logprobs.prepare()
    while min(map(len, found)) < NEW_TOKENS:
        flying.run(rows, flying.steps[-1], choosing)
        outcome = state.outcomes[int(state.turn), : len(found)]
        for i, row in enumerate(outcome.tolist()):
            accepted[i].append(row[0])
            found[i] += row[1 : row[0] + 2]
        if choosing.logprobs:
            flying.logprobs.send(0)
            new = [one[-counts[-1] - 1 :] for one, counts in zip(found, accepted, strict=True)]
            read = flying.logprobs.read(0, batch.reqs, flying.steps[-1] + 1, new)
            for one, more in zip(told, read, strict=True):
                one += more
    for one, result in zip(told, expected, strict=True):
        assert_close(one[:NEW_TOKENS], result.completions[0].logprobs)
    assert [one[:NEW_TOKENS] for one in found] == [one.token_ids for one in expected]
    if spec is not None:
        assert sum(map(sum, accepted)) > 5, "drafts were accepted"
    # Penalties count the drafts of a round where the host drafts.
    if spec is not None and params is not EDITED:
        for counts, histogram in zip(accepted, lengths, strict=True):
            rounds = sum(histogram) - 1  # the last one may be cut short
            assert all(counts[:rounds].count(k) <= n for k, n in enumerate(histogram))


@pytest.mark.skipif(torch.cuda.is_available(), reason="graphs are tested where there is a GPU")
@pytest.mark.parametrize("name", ["EAGLE", "EAGLE3"])
def test_of_many_rows_those_that_stand_go_on(
    name: str,
    target: Path,
    drafts: dict[str, SpecConfig | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(eagle, "_MANY_ROWS", 8)
    kept: list[int] = []

    def keep(states: Tensor, rows: Tensor, new_TH: Tensor, chosen: Tensor) -> None:
        kept.append(len(new_TH) // len(rows))
        keep_rows(states, rows, new_TH, chosen)

    monkeypatch.setattr(eagle, "keep_rows", keep)
    test_rounds_without_the_host(name, [GREEDY] * 3, target, drafts)
    assert set(kept) == {1}


@pytest.mark.skipif(torch.cuda.is_available(), reason="graphs are tested where there is a GPU")
def test_a_buffer_that_moved_is_noticed(target: Path, drafts: dict[str, SpecConfig | None]) -> None:
    flying = on_the_cpu(make(target, drafts["EAGLE3"], device="cpu"))
    flying.runner.guards_graphs = True
    guard = flying.runner.guard_of(rounds=flying)
    assert guard is not None
    guard.check()
    weights = flying.drafter.runner.model.fc  # type: ignore[attr-defined]
    weights.bias = torch.nn.Parameter(torch.zeros(64), requires_grad=False)
    with pytest.raises(
        GraphInputError, match=r"captured with rounds\.drafter\..*model\.fc\.bias at None"
    ):
        guard.check()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnTheGpu:
    @pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
    @pytest.mark.parametrize("name", ["plain", "EAGLE", "EAGLE3", "STANDALONE", "NGRAM", "SUFFIX"])
    def test_graphs_change_nothing(
        self, name: str, overlap: bool, target: Path, drafts: dict[str, SpecConfig | None]
    ) -> None:
        eager = make(target, drafts[name], disable_cuda_graph=True)
        flags = {"disable_overlap_schedule": not overlap, "cuda_graph_bs": (1, 2, 8)}
        flying = make(target, drafts[name], **flags)
        for count in (1, 3, 2):
            expected = eager.generate(PROMPTS[:count], GREEDY)
            found = flying.generate(PROMPTS[:count], GREEDY)
            assert [one.token_ids for one in found] == [one.token_ids for one in expected]
            assert [one.spec.histogram for one in found] == [one.spec.histogram for one in expected]
            flying.engine.scheduler.check_invariant()
        assert flying.engine.graph_round is not None
        assert flying.engine.graph_round.counters["replays"] > 10

    @pytest.mark.parametrize("name", ["EAGLE3", "NGRAM"])
    def test_depths_that_change_do_not_change_tokens(
        self, name: str, target: Path, drafts: dict[str, SpecConfig | None]
    ) -> None:
        spec = drafts[name]
        assert spec is not None
        eager = make(target, None, disable_cuda_graph=True)
        flying = make(target, replace(spec, adaptive=True))
        params = replace(GREEDY, max_tokens=200)
        for count in (3, 1):
            expected = [one.token_ids for one in eager.generate(PROMPTS[:count], params)]
            assert [one.token_ids for one in flying.generate(PROMPTS[:count], params)] == expected
        assert flying.engine.stats().depth is not None

    def test_requests_come_and_go(self, target: Path, drafts: dict[str, SpecConfig | None]) -> None:
        params = [
            SamplingParams(max_tokens=3 + 5 * i, temperature=0.0, ignore_eos=True)
            for i in range(12)
        ]
        prompts = [PROMPTS[i % 3] + str(i) for i in range(12)]
        eager = make(target, None, disable_cuda_graph=True)
        flying = make(target, drafts["EAGLE3"], max_running_requests=4, page_size=16)
        expected = [one.token_ids for one in eager.generate(prompts, params)]
        assert [one.token_ids for one in flying.generate(prompts, params)] == expected
        flying.engine.scheduler.check_invariant()

    @pytest.mark.parametrize("name", ["plain", "EAGLE", "EAGLE3"])
    def test_prompts_that_come_together(
        self, name: str, target: Path, drafts: dict[str, SpecConfig | None]
    ) -> None:
        """As many as one graph serves, of many lengths, and some that the cache knows in part."""
        eager = make(target, None, disable_cuda_graph=True)
        flying = make(target, drafts[name])
        for count, length in ((12, 1), (64, 2), (30, 1)):
            prompts = [PROMPTS[i % 3] * length + str(i % 40) for i in range(count)]
            params = [replace(GREEDY, max_tokens=6)] * count
            expected = [one.token_ids for one in eager.generate(prompts, params)]
            assert [one.token_ids for one in flying.generate(prompts, params)] == expected
        stats = flying.engine.stats().graphs
        assert stats["prefill"].replays >= 3
        assert not stats["prefill"].fallbacks
        assert name == "plain" or not stats["draft"].fallbacks

    @pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
    @pytest.mark.parametrize("name", ["plain", "EAGLE", "EAGLE3", "NGRAM"])
    def test_sampled_requests_fly(
        self, name: str, overlap: bool, target: Path, drafts: dict[str, SpecConfig | None]
    ) -> None:
        """Seed by seed as without graphs, in batches of every kind, that change their kind."""
        eager = make(target, None, disable_cuda_graph=True)
        flying = make(target, drafts[name], disable_overlap_schedule=not overlap)
        prompts = [PROMPTS[i % 3] + str(i) for i in range(len(SAMPLED))]
        params = [replace(one, max_tokens=8 + 9 * i) for i, one in enumerate(SAMPLED)]
        for count in (1, len(params), 3):
            expected = [one.token_ids for one in eager.generate(prompts[:count], params[:count])]
            found = flying.generate(prompts[:count], params[:count])
            assert [one.token_ids for one in found] == expected
            flying.engine.scheduler.check_invariant()
        stats = flying.engine.stats().graphs["round"]
        assert stats.replays > 10
        assert not stats.fallbacks

    def test_rows_change_their_owner(
        self, target: Path, drafts: dict[str, SpecConfig | None]
    ) -> None:
        params = [
            SamplingParams(
                max_tokens=3 + 5 * i, temperature=(0.0, 0.7, 1.0)[i % 3], seed=i, ignore_eos=True
            )
            for i in range(12)
        ]
        prompts = [PROMPTS[i % 3] + str(i) for i in range(12)]
        eager = make(target, None, disable_cuda_graph=True)
        flying = make(target, drafts["EAGLE3"], max_running_requests=4)
        expected = [one.token_ids for one in eager.generate(prompts, params)]
        assert [one.token_ids for one in flying.generate(prompts, params)] == expected

    @pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
    @pytest.mark.parametrize("name", ["plain", "EAGLE3", "NGRAM"])
    def test_requests_that_edit_logits_fly(
        self, name: str, overlap: bool, target: Path, drafts: dict[str, SpecConfig | None]
    ) -> None:
        """Tokens are counted on the device, until other rounds run in between and back again."""
        eager = make(target, None, disable_cuda_graph=True)
        flags = {"disable_overlap_schedule": not overlap}
        flying = make(target, drafts[name], **flags)
        grammar = GrammarSpec.regex("[a-z]{40}")
        on_the_ground = replace(GREEDY, max_tokens=6, grammar=grammar)
        assert flying.engine.graph_round is not None
        flying.engine.graph_round.masks_fly = False
        mixed = [*EDITED, on_the_ground, *SAMPLED[:2], *EDITED]
        for params in (EDITED, mixed):
            prompts = [PROMPTS[i % 3] + str(i) for i in range(len(params))]
            expected = [one.token_ids for one in eager.generate(prompts, params)]
            assert [one.token_ids for one in flying.generate(prompts, params)] == expected
        stats = flying.engine.stats().graphs["round"]
        assert stats.replays > 10
        assert stats.fallbacks.keys() == {"grammar"}

    @pytest.mark.parametrize("name", ["plain", "EAGLE3", "NGRAM"])
    def test_logprobs_come_along(
        self, name: str, target: Path, drafts: dict[str, SpecConfig | None]
    ) -> None:
        eager = make(target, None, disable_cuda_graph=True)
        flying = make(target, drafts[name])
        for params in (TOLD, [GREEDY, *TOLD[:2]]):
            expected, found = eager.generate(PROMPTS, params), flying.generate(PROMPTS, params)
            for one, other in zip(found, expected, strict=True):
                assert one.token_ids == other.token_ids
                assert_close(one.completions[0].logprobs, other.completions[0].logprobs)
        assert not flying.engine.stats().graphs["round"].fallbacks

    def test_more_edits_than_tables(
        self,
        target: Path,
        drafts: dict[str, SpecConfig | None],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(row_choices, "MOST_EDITING", 1)
        eager = make(target, None, disable_cuda_graph=True)
        flying = make(target, drafts["EAGLE3"])
        params = [EDITED[0], replace(EDITED[1], max_tokens=9), SAMPLED[0]]
        expected = [one.token_ids for one in eager.generate(PROMPTS, params)]
        assert [one.token_ids for one in flying.generate(PROMPTS, params)] == expected
        stats = flying.engine.stats().graphs["round"]
        assert stats.replays > 0
        assert len(stats.fallbacks) == 1

    def test_the_end_of_the_context(
        self, target: Path, drafts: dict[str, SpecConfig | None]
    ) -> None:
        params = replace(GREEDY, max_tokens=None)
        eager = make(target, None, disable_cuda_graph=True, context_length=70)
        flying = make(target, drafts["EAGLE3"], context_length=70)
        expected = [one.token_ids for one in eager.generate(PROMPTS, params)]
        assert [one.token_ids for one in flying.generate(PROMPTS, params)] == expected
        flying.engine.scheduler.check_invariant()
