"""Acceptance of sampled drafts: kernels against their references, and against the target."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specengine.engine.proof.check import chi_squared_p
from specengine.kernels.accept.accept_block import accept_block
from specengine.kernels.accept.accept_rejection import accept_rejection
from specengine.kernels.accept.accept_sibling import accept_sibling
from specengine.kernels.accept.accept_target_only import accept_target_only
from specengine.kernels.accept.types import Accepted, Draws, SampledRound
from specengine.kernels.dispatch import Backend
from tests.halves import slow_but
from tests.kernels import offline_triton
from tests.kernels.sampled_world import (
    CPU,
    DRAFT,
    Tables,
    draws_of,
    moved,
    peaked,
    random_round,
    round_of,
)

Rule = Callable[..., Accepted]
RULES: dict[str, Rule] = {
    "rejection": accept_rejection,
    "block": accept_block,
    "sibling": accept_sibling,
    "target_only": accept_target_only,
}
# Name, whether trees are drafted.
KINDS = [
    ("rejection", False),
    ("block", False),
    ("sibling", False),
    ("sibling", True),
    ("target_only", False),
    ("target_only", True),
]
CHAIN, TREE = [0, 0, 1], [0, 0, 0, 1]

kinds = pytest.mark.parametrize(("name", "tree"), KINDS)
rules = pytest.mark.parametrize("name", RULES)
weighing_rules = pytest.mark.parametrize("name", ["rejection", "block", "sibling"])  # the draft
backends = pytest.mark.parametrize("backend", ["torch", "triton"])


def round_for(name: str, seed: int, batch: int, width: int, vocab: int, tree: bool) -> SampledRound:
    drafts = random_round(random.Random(seed), batch, width, vocab, tree)
    return peaked(drafts) if name == "target_only" else drafts


def assert_the_same(
    rule: Rule, drafts: SampledRound, device: torch.device, first_seed: int = 0
) -> Accepted:
    """Sums in another order move a border by 2^-50: none of these uniforms lies so near to one."""
    batch = len(drafts.roots_B)
    expected = rule(drafts, draws_of(batch, CPU, first_seed))
    found = rule(moved(drafts, device), draws_of(batch, device, first_seed), backend="triton")
    assert found.ends_B.tolist() == expected.ends_B.tolist()
    assert found.tokens_B.tolist() == expected.tokens_B.tolist()
    return expected


@kinds
def test_the_kernel_decides_as_the_reference(name: str, tree: bool, device: torch.device) -> None:
    ends: list[int] = []
    for seed in range(3):
        drafts = round_for(name, seed, 4, 5, 9, tree)
        ends += assert_the_same(RULES[name], drafts, device, 100 * seed).ends_B.tolist()
    assert len(set(ends)) >= 3


@kinds
def test_programs_that_share_a_vocabulary(
    name: str, tree: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specengine.kernels.accept import accept_round_triton

    monkeypatch.setattr(accept_round_triton, "_MAX_BLOCK", 8)
    assert_the_same(RULES[name], round_for(name, 0, 4, 4, 37, tree), device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@kinds
@pytest.mark.parametrize("vocab", [49_152, 151_936])
@pytest.mark.parametrize("batch", [1, 16])
def test_large_vocabularies(name: str, tree: bool, vocab: int, batch: int) -> None:
    """Against the reference on the same device, which is faster."""
    rule, device = RULES[name], torch.device("cuda")
    for seed in range(6):
        drafts = moved(round_for(name, seed, batch, 9, vocab, tree), device)
        draws = draws_of(batch, device, 100 * seed)
        expected, found = rule(drafts, draws, backend="torch"), rule(drafts, draws)
        assert found.ends_B.tolist() == expected.ends_B.tolist()
        assert found.tokens_B.tolist() == expected.tokens_B.tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@kinds
def test_every_launch_decides_the_same(name: str, tree: bool) -> None:
    """Whichever program comes last to a meeting."""
    drafts = moved(round_for(name, 3, 32, 9, 50_000, tree), torch.device("cuda"))
    draws = draws_of(32, drafts.roots_B.device)
    first = RULES[name](drafts, draws)
    for _ in range(200):
        found = RULES[name](drafts, draws)
        assert torch.equal(found.ends_B, first.ends_B)
        assert torch.equal(found.tokens_B, first.tokens_B)


COMPILED = {  # of how many forms; those of one size, and of every size
    "_begin_kernel": (4, 4),
    "_draw_kernel": (6, 6),
    "_reject_kernel": (1, 1),
    "_judge_block_kernel": (1, 1),
    "_descend_kernel": (2, 2),
    "_walk_kernel": (2, 2),
    "_accept_relaxed_kernel": (2, 2),
    "_tree_shape_kernel": (1, 3),
    "_sample_rows_kernel": (1, 1),
    "_edit_rows_kernel": (3, 3),
    "_tree_build_kernel": (2, 4),
    "_accept_path_kernel": (1, 2),
    "_tree_step_kernel": (2, 4),
    "_draw_siblings_kernel": (1, 2),
}


@pytest.mark.parametrize("sizes", slow_but(["one size"], ["one size", "every size"]))
def test_the_compiler_takes_what_the_interpreter_does(sizes: str, triton_cache: Path) -> None:
    pytest.importorskip("triton")
    compiled = offline_triton.run("tests.kernels.offline_accept", triton_cache, sizes)
    assert compiled == {name: forms[sizes == "every size"] for name, forms in COMPILED.items()}


def one_draft(target: list[float], draft: list[float], token: int, after: Tensor) -> SampledRound:
    """A chain of one token, its target, what it was drawn from, and the target after it."""
    draft_BNV = torch.tensor([[[0.0] * len(draft), draft]])
    rows = torch.stack([torch.tensor(target), after])
    return round_of([[0, 0]], [[0, token]], rows, draft_BNV, torch.tensor([False]))


@weighing_rules
@backends
def test_what_both_say_alike_stands(name: str, backend: Backend, device: torch.device) -> None:
    after = torch.tensor([0.0, 0.0, 0.0, 1.0])
    for token, row in ((0, [0.3, 0.7, 0.0, 0.0]), (1, [0.1, 0.2, 0.3, 0.1]), (2, [0, 0, 2.0, 0])):
        drafts = one_draft(row, [3 * weight for weight in row], token, after)
        found = RULES[name](moved(drafts, device), draws_of(1, device), backend=backend)
        assert (found.ends_B.tolist(), found.tokens_B.tolist()) == ([1], [3])


@weighing_rules
@backends
def test_what_the_target_never_says_never_stands(
    name: str, backend: Backend, device: torch.device
) -> None:
    """What neither can say does not stand; from a residual of nothing, the target is sampled."""
    after = torch.tensor([0.0, 0.0, 0.0, 1.0])
    cases = [
        ([0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], 0, {1}),
        ([0.0, 0.5, 0.5, 0.0], [0.5, 0.5, 0.0, 0.0], 0, {2}),
        ([0.0, 0.5, 0.5, 0.0], [0.0, 0.5, 0.5, 0.0], 0, {1, 2}),
    ]
    for target, draft, token, expected in cases:
        drafts = one_draft(target, draft, token, after)
        for seed in range(3):
            draws = draws_of(1, device, seed)
            found = RULES[name](moved(drafts, device), draws, backend=backend)
            assert found.ends_B.tolist() == [0]
            assert found.tokens_B.item() in expected


@backends
def test_siblings_before_are_taken_out_of_the_draft(backend: Backend, device: torch.device) -> None:
    """Two siblings from one row, which is the target's too. Once the first has fallen, the target
    has nothing left to give away: the second, drawn from the rest of the row, stands in so far as
    the row's rest is the target's."""
    row = torch.tensor([0.0, 0.9, 0.1])
    draft_BNV = row.expand(1, 3, -1).clone()
    target = torch.stack([torch.tensor([0.2, 0.0, 0.8]), row, torch.tensor([1.0, 0.0, 0.0])])
    drafts = round_of([[0, 0, 0]], [[0, 1, 2]], target, draft_BNV, torch.tensor([False]))
    # residual = (0.2, 0, 0.7) / 0.9; the second's own row is all on token 2: chance 7 / 9, and what
    # is left after it is token 0.
    ends = []
    for seed in range(12):
        found = accept_sibling(moved(drafts, device), draws_of(1, device, seed), backend=backend)
        ends += found.ends_B.tolist()
        assert found.tokens_B.tolist() == [0]
    assert set(ends) == {0, 2}


@rules
def test_tensors_may_lie_anyhow(name: str, device: torch.device) -> None:
    drafts = random_round(random.Random(5), 3, 4, 11, tree=False)
    expected = RULES[name](drafts, draws_of(3, CPU))
    drafts = moved(drafts, device)
    assert drafts.draft_BNV is not None
    spread = torch.stack([drafts.draft_BNV, drafts.draft_BNV * 0], dim=-1)[..., 0]
    turned = drafts.draft_BNV.transpose(0, 1).contiguous().transpose(0, 1)
    for draft in (spread, turned):
        assert not draft.is_contiguous()
        others = {"tokens_BN": drafts.tokens_BN.T.contiguous().T, "draft_BNV": draft}
        found = RULES[name](replace(drafts, **others), draws_of(3, device), backend="triton")
        assert found.ends_B.tolist() == expected.ends_B.tolist()
        assert found.tokens_B.tolist() == expected.tokens_B.tolist()


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.sampled_from(KINDS))
def test_the_reference_does_not_feel_the_batch(seed: int, kind: tuple[str, bool]) -> None:
    name, tree = kind
    drafts = round_for(name, seed, 3, 5, 8, tree)
    draws = draws_of(3, CPU, seed)
    whole = RULES[name](drafts, draws)
    for b in range(3):
        columns = {key: x for key, x in vars(drafts).items() if "_B" in key and x is not None}
        part = {key: x[b : b + 1] for key, x in columns.items()}
        alone = RULES[name](
            replace(drafts, **part),
            replace(
                draws, seeds_B=draws.seeds_B[b : b + 1], positions_B=draws.positions_B[b : b + 1]
            ),
        )
        assert alone.ends_B.item() == whole.ends_B[b]
        assert alone.tokens_B.item() == whole.tokens_B[b]


Mutation = Callable[[SampledRound, Draws], tuple[SampledRound, Draws]]


def _shared_stream(drafts: SampledRound, draws: Draws) -> tuple[SampledRound, Draws]:
    """Coins are the numbers that drew the drafts."""
    return drafts, replace(draws, accept=DRAFT)


def _one_row_off(drafts: SampledRound, draws: Draws) -> tuple[SampledRound, Draws]:
    rows, sums = drafts.target_TV.roll(-1, 0), drafts.target_sum_T.roll(-1, 0)
    return replace(drafts, target_TV=rows, target_sum_T=sums), draws


def _cut_draft(drafts: SampledRound, draws: Draws) -> tuple[SampledRound, Draws]:
    """Only the best token of the draft has weight; it was drawn from all."""
    assert drafts.draft_BNV is not None
    best = drafts.draft_BNV >= drafts.draft_BNV.amax(-1, keepdim=True)
    return replace(drafts, draft_BNV=drafts.draft_BNV.masked_fill(~best, 0.0)), draws


MUTANTS: dict[str, Mutation] = {
    "stream shared by draft and accept": _shared_stream,
    "off-by-one position": _one_row_off,
    "renormalised draft": _cut_draft,
}


def rounds_p(
    name: str,
    shape: list[int],
    device: torch.device,
    backend: Backend,
    mutation: Mutation | None = None,
) -> float:
    """χ² of the first tokens of rounds, continued by the target."""
    count = {"cuda triton": 20_000, "cpu torch": 2_000, "cpu triton": 150}[
        f"{device.type} {backend}"
    ]
    length = len(set(shape))
    tables, draws = Tables.apart(), draws_of(count, CPU)
    drafts = tables.drafted(shape, draws)
    seen, tossed = (drafts, draws) if mutation is None else mutation(drafts, draws)
    seeds_B, positions_B = draws.seeds_B.to(device), draws.positions_B.to(device)
    given_ = moved(seen, device), replace(tossed, seeds_B=seeds_B, positions_B=positions_B)
    outputs = tables.emitted(drafts, RULES[name](*given_, backend=backend), length)
    cells = (outputs * 3 ** torch.arange(length - 1, -1, -1)).sum(-1)
    observed = torch.bincount(cells, minlength=3**length)
    return chi_squared_p(observed, tables.joint(length) * count)


# The interpreter takes a tenth of a second a round, and decides as the reference does.
everywhere = pytest.mark.parametrize(
    ("device", "backend"),
    [
        ("interpreter", "torch"),
        pytest.param("interpreter", "triton", marks=pytest.mark.slow),
        pytest.param("cuda", "triton", marks=pytest.mark.gpu),
    ],
    indirect=["device"],
)


@everywhere
@rules
def test_rounds_follow_the_target(name: str, device: torch.device, backend: Backend) -> None:
    assert rounds_p(name, CHAIN if name in ("rejection", "block") else TREE, device, backend) > 1e-3


@everywhere
@pytest.mark.parametrize(
    ("name", "mutant"),
    [*product(["rejection", "block", "sibling"], MUTANTS), ("target_only", "off-by-one position")],
)
def test_the_same_test_catches_mutants(
    name: str, mutant: str, device: torch.device, backend: Backend
) -> None:
    shape = CHAIN if name in ("rejection", "block") else TREE
    if MUTANTS[mutant] is _shared_stream:
        shape = [0, 0]  # later tokens hide it
    assert rounds_p(name, shape, device, backend, MUTANTS[mutant]) < 1e-4
