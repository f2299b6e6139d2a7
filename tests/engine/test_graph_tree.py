"""Rounds of draft trees that run on the device alone: their trees are those of the other round, and
what they decide is what plain decoding says.

On a CPU the same code runs without a graph, and attention in plain PyTorch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.batch import RowBatch, ScheduleBatch
from specengine.core.interfaces import LogitsOutput
from specengine.core.spec import DraftProposal, VerifyResult
from specengine.draft.eagle.worker import EagleWorker
from specengine.engine.graph_tree import GraphTreeRound
from specengine.engine.row_choices import Choosing
from specengine.kernels.tree_build import DraftTree
from tests.draft.mtp_reading import add_mtp
from tests.support.mtp_targets import predictable
from tests.engine.flying_world import let_fly
from tests.engine.test_graph_round import (
    BIASED,
    EDITED,
    GREEDY,
    NEW_TOKENS,
    PROMPTS,
    SAMPLED,
    TOLD,
    DeviceLengths,
    assert_close,
)
from tests.engine.test_graph_round import make as make_any

ON_CPU = pytest.mark.skipif(
    torch.cuda.is_available(), reason="graphs are tested where there is a GPU"
)
# algorithm, topk, levels, nodes, static
SHAPES = {
    "EAGLE, 2": ("EAGLE", 2, 3, 6, False),
    "EAGLE3, 2": ("EAGLE3", 2, 3, 8, False),
    "EAGLE3, 4": ("EAGLE3", 4, 4, 16, False),
    "EAGLE3, 2, static": ("EAGLE3", 2, 4, 8, True),
    "EAGLE3, 4, static": ("EAGLE3", 4, 3, 16, True),
    "EAGLE3, one level": ("EAGLE3", 4, 1, 4, False),
}


def make(target: Path, spec: SpecConfig | None, **flags: object) -> LLM:
    return make_any(target, spec, **flags)


@pytest.fixture(scope="module")
def specs(drafters: dict[str, str]) -> dict[str, SpecConfig]:
    return {
        name: SpecConfig(
            algorithm=algorithm,
            adaptive=False,
            draft_model_path=drafters[algorithm],
            eagle_topk=topk,
            num_steps=steps,
            num_draft_tokens=nodes,
            static_tree=static,
        )
        for name, (algorithm, topk, steps, nodes, static) in SHAPES.items()
    }


@pytest.fixture(scope="module")
def plain(target: Path) -> list[list[int]]:
    return [one.token_ids for one in make(target, None, device="cpu").generate(PROMPTS, GREEDY)]


class Counts:
    """A RoundRecorder of how many drafts each round accepted, by request."""

    def __init__(self) -> None:
        self.accepted: dict[str, list[int]] = {}

    def record(
        self,
        batch: ScheduleBatch,
        proposal: DraftProposal,
        output: LogitsOutput,
        result: VerifyResult,
    ) -> None:
        for req, count in zip(batch.reqs, result.num_accepted, strict=True):
            self.accepted.setdefault(req.rid, []).append(count)


class ByHand:
    """An engine whose rounds are run one by one, on the CPU, without the scheduler."""

    def __init__(self, llm: LLM, params: list[SamplingParams]) -> None:
        self.engine = llm.engine
        for i, (prompt, wish) in enumerate(zip(PROMPTS, params, strict=True)):
            self.engine.add_request(str(i), llm.tokenizer.encode(prompt), wish)
        self.engine.step()  # the prefill
        batch = self.engine.scheduler.schedule()
        assert batch is not None
        self.batch: ScheduleBatch = batch
        self.drafter = cast(EagleWorker, self.engine.drafter)
        worker = self.engine.parts.worker
        backend = DeviceLengths(torch.device("cpu"))
        for runner in (worker.runner, self.drafter.runner):
            runner.attn_backend = backend
        steps = self.drafter.tree_row_steps
        assert steps is not None
        self.round = GraphTreeRound(worker, self.drafter, [steps], [4])
        assert self.round.can_run(batch)
        state = self.round.state
        # A row of padding, and in no order that would hide a mistake.
        self.rows = torch.tensor([*(req.req_pool_idx or 0 for req in batch.reqs), 0]).flip(0)
        for req in batch.reqs:
            row = cast(int, req.req_pool_idx)
            state.lens[row], state.roots[row] = req.kv_len, req.last_token
            assert self.engine.scheduler.ledger.reserve(req, 200)
        self.engine.scheduler.ledger.flush()
        self.choosing = Choosing.of(batch.reqs)
        self.round.choices.write(batch.reqs, self.rows.flip(0)[:-1], self.choosing)

    def row_batch(self) -> RowBatch:
        state = self.round.state
        return RowBatch(self.rows, state.lens[self.rows], state.roots[self.rows])

    def generate(self) -> tuple[list[list[int]], list[list[int]]]:
        """Tokens, and accepted drafts round by round, of each request."""
        found = [list(req.output_ids) for req in self.batch.reqs]
        accepted: list[list[int]] = [[] for _ in found]
        while min(map(len, found)) < NEW_TOKENS:
            for i, row in enumerate(self.run()):
                accepted[i].append(row[0])
                found[i] += row[1 : row[0] + 2]
        assert sum(map(sum, accepted)) > 5, "drafts were accepted"
        return [one[:NEW_TOKENS] for one in found], accepted

    def run(self) -> list[list[int]]:
        """A round: accepted drafts and emitted tokens of each request, in order."""
        self.round.run(self.rows, self.round.steps[-1], self.choosing)
        state = self.round.state
        outcome = state.outcomes[int(state.turn), : len(self.rows)]
        return outcome.flip(0)[: len(PROMPTS)].tolist()


@ON_CPU
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("params", [[GREEDY] * 3, BIASED], ids=["greedy", "biased"])
def test_trees_are_those_of_the_host(
    name: str, params: list[SamplingParams], target: Path, specs: dict[str, SpecConfig]
) -> None:
    hand = ByHand(make(target, specs[name], device="cpu"), params)
    expected, rows = hand.drafter.draft(hand.batch), hand.row_batch()
    edits = hand.round.draft_edits(rows, hand.choosing)
    assert (edits is None) == (params is not BIASED)
    tree = hand.drafter.draft_tree_rows(rows, hand.round.steps[-1], edits)
    for i in range(len(PROMPTS)):
        same_tree(tree, len(PROMPTS) - i, expected, i)
        mask = tree.mask_BNN[len(PROMPTS) - i]
        assert torch.equal(tree.depths_BN[len(PROMPTS) - i], mask.sum(1) - 1)


def same_tree(tree: DraftTree, row: int, proposal: DraftProposal, i: int) -> None:
    count = proposal.num_nodes[i]
    assert count == tree.tokens_BN.shape[1]
    assert tree.tokens_BN[row].tolist() == proposal.tokens[i, :count].tolist()
    assert tree.parents_BN[row].tolist() == proposal.parents[i, :count].tolist()


@ON_CPU
@pytest.mark.parametrize("name", SHAPES)
def test_rounds_without_the_host(
    name: str, target: Path, specs: dict[str, SpecConfig], plain: list[list[int]]
) -> None:
    hand = ByHand(make(target, specs[name], device="cpu"), [GREEDY] * 3)
    found, accepted = hand.generate()
    assert found == plain

    host = make(target, specs[name], device="cpu")
    counts = Counts()
    host.engine.round.recorders.append(counts)
    # The last rounds of a request may be smaller.
    host.generate(PROMPTS, replace(GREEDY, max_tokens=NEW_TOKENS + hand.drafter.max_nodes))
    for mine, its in zip(accepted, counts.accepted.values(), strict=True):
        rounds = next(n for n in range(len(mine) + 1) if sum(mine[:n]) + n >= NEW_TOKENS - 1)
        assert mine[:rounds] == its[:rounds]


@ON_CPU
def test_trees_of_a_layer_that_came_with_the_target(
    small_models: dict[str, Path], tmp_path: Path
) -> None:
    add_mtp(small_models["qwen2"], tmp_path / "target", "mimo", 1)
    folder = predictable(tmp_path / "target", "mimo", 1, residue=0.2)
    spec = SpecConfig(
        algorithm="MTP", adaptive=False, num_steps=3, eagle_topk=2, num_draft_tokens=8
    )
    plain = [one.token_ids for one in make(folder, None, device="cpu").generate(PROMPTS, GREEDY)]
    found, _ = ByHand(make(folder, spec, device="cpu"), [GREEDY] * 3).generate()
    assert found == plain


@ON_CPU
@pytest.mark.parametrize("params", [SAMPLED[:3], EDITED], ids=["sampled", "edited"])
def test_tokens_are_chosen_as_requests_want(
    params: list[SamplingParams], target: Path, specs: dict[str, SpecConfig]
) -> None:
    llm = make(target, None, device="cpu")
    expected = [one.token_ids for one in llm.generate(PROMPTS, params)]
    found, _ = ByHand(make(target, specs["EAGLE3, 4"], device="cpu"), params).generate()
    assert found == expected


@ON_CPU
def test_logprobs_come_along(
    target: Path, specs: dict[str, SpecConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    flying = make(target, specs["EAGLE3, 4"])
    counters = let_fly(flying, monkeypatch).counters
    check_logprobs(flying, target)
    assert counters.keys() == {"captures", "replays"}


def check_logprobs(flying: LLM, target: Path) -> None:
    eager = make(target, None, disable_cuda_graph=True)
    for params in (TOLD, [GREEDY, *TOLD[:2]]):
        expected, found = eager.generate(PROMPTS, params), flying.generate(PROMPTS, params)
        for one, other in zip(found, expected, strict=True):
            assert one.token_ids == other.token_ids
            assert_close(one.completions[0].logprobs, other.completions[0].logprobs)
    assert flying.engine.scheduler.spec_totals.num_accepted_tokens > 20


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnTheGpu:
    def test_logprobs_come_along(self, target: Path, specs: dict[str, SpecConfig]) -> None:
        flying = make(target, specs["EAGLE3, 4"])
        check_logprobs(flying, target)
        assert not flying.engine.stats().graphs["round"].fallbacks

    @pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
    @pytest.mark.parametrize("name", SHAPES)
    def test_graphs_change_nothing(
        self, name: str, overlap: bool, target: Path, specs: dict[str, SpecConfig]
    ) -> None:
        eager = make(target, specs[name], disable_cuda_graph=True)
        flags = {"disable_overlap_schedule": not overlap, "cuda_graph_bs": (1, 2, 8)}
        flying = make(target, specs[name], **flags)
        for count in (1, 3, 2):
            expected = eager.generate(PROMPTS[:count], GREEDY)
            found = flying.generate(PROMPTS[:count], GREEDY)
            assert [one.token_ids for one in found] == [one.token_ids for one in expected]
            for mine, its in zip(found, expected, strict=True):
                rounds = sum(mine.spec.histogram), sum(its.spec.histogram)
                assert abs(rounds[0] - rounds[1]) <= 1, "only the last round may differ"
            flying.engine.scheduler.check_invariant()
        assert flying.engine.graph_round is not None
        assert flying.engine.graph_round.counters["replays"] > 10

    def test_depths_that_change_do_not_change_tokens(
        self, target: Path, specs: dict[str, SpecConfig]
    ) -> None:
        eager = make(target, None, disable_cuda_graph=True)
        flying = make(target, replace(specs["EAGLE3, 2"], adaptive=True))
        params = replace(GREEDY, max_tokens=200)
        for count in (3, 1):
            expected = [one.token_ids for one in eager.generate(PROMPTS[:count], params)]
            assert [one.token_ids for one in flying.generate(PROMPTS[:count], params)] == expected
        assert flying.engine.stats().depth is not None

    @pytest.mark.parametrize("name", ["EAGLE3, 2", "EAGLE3, 4"])
    def test_the_end_of_the_context(
        self, name: str, target: Path, specs: dict[str, SpecConfig]
    ) -> None:
        params = replace(GREEDY, max_tokens=None)
        eager = make(target, None, disable_cuda_graph=True, context_length=90)
        flying = make(target, specs[name], context_length=90)
        expected = [one.token_ids for one in eager.generate(PROMPTS, params)]
        assert [one.token_ids for one in flying.generate(PROMPTS, params)] == expected
        flying.engine.scheduler.check_invariant()
        assert flying.engine.graph_round is not None
        assert flying.engine.graph_round.counters["replays"] > 0

    def test_memory_nearly_full(self, target: Path, specs: dict[str, SpecConfig]) -> None:
        params = [replace(GREEDY, max_tokens=20 + 9 * i) for i in range(8)]
        prompts = [PROMPTS[i % 3] + str(i) for i in range(8)]
        eager = make(target, None, disable_cuda_graph=True)
        expected = [one.token_ids for one in eager.generate(prompts, params)]
        small = {"max_total_tokens": 256, "page_size": 4, "context_length": 150}
        flying = LLM(str(target), specs["EAGLE3, 4"], dtype="float32", **small)
        assert [one.token_ids for one in flying.generate(prompts, params)] == expected
        flying.engine.scheduler.check_invariant()

    def test_sampled_requests_fly(self, target: Path, specs: dict[str, SpecConfig]) -> None:
        eager = make(target, None, disable_cuda_graph=True)
        flying = make(target, specs["EAGLE3, 4"])
        for params in (SAMPLED[:3], EDITED):
            expected = [one.token_ids for one in eager.generate(PROMPTS, params)]
            assert [one.token_ids for one in flying.generate(PROMPTS, params)] == expected

    def test_requests_come_and_go(self, target: Path, specs: dict[str, SpecConfig]) -> None:
        params = [
            SamplingParams(max_tokens=3 + 5 * i, temperature=0.0, ignore_eos=True)
            for i in range(12)
        ]
        prompts = [PROMPTS[i % 3] + str(i) for i in range(12)]
        eager = make(target, None, disable_cuda_graph=True)
        flying = make(target, specs["EAGLE3, 4"], max_running_requests=4, page_size=16)
        expected = [one.token_ids for one in eager.generate(prompts, params)]
        assert [one.token_ids for one in flying.generate(prompts, params)] == expected
        flying.engine.scheduler.check_invariant()
