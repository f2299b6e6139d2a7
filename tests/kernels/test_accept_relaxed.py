"""Relaxed acceptance against a loop over its definition, and Triton against the reference."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specengine.kernels.accept.accept_relaxed import accept_relaxed
from specengine.kernels.accept.types import RelaxedRound
from specengine.kernels.dispatch import Backend
from tests.kernels.relaxed_world import expected, moved, random_round, round_of, with_gaps

RULES = [(1, 0.3), (2, 0.0), (3, 0.1), (3, 0.6), (9, 1.0), (10**6, 1.0)]

backends = pytest.mark.parametrize("backend", ["torch", "triton"])
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def decided(
    drafts: RelaxedRound, rule: tuple[int, float], backend: Backend = "torch"
) -> tuple[list[int], list[int]]:
    found = accept_relaxed(drafts, *rule, backend=backend)
    return found.ends_B.tolist(), found.tokens_B.tolist()


@settings(max_examples=150)
@given(st.integers(0, 10**6), st.sampled_from(RULES), st.booleans(), st.integers(1, 12))
def test_the_reference_is_the_definition(
    seed: int, rule: tuple[int, float], tree: bool, vocab: int
) -> None:
    drafts = random_round(random.Random(seed), 4, 7, vocab, tree)
    assert decided(drafts, rule) == expected(drafts, *rule)


@pytest.mark.parametrize("tree", [False, True])
def test_paths_end_everywhere(tree: bool) -> None:
    """What the other tests compare is not always the same."""
    rng = random.Random(0)
    for rule in RULES:
        ends, _ = decided(random_round(rng, 40, 6, 9, tree), rule)
        assert len(set(ends)) >= 3


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_the_kernel_decides_as_the_reference(
    rule: tuple[int, float], tree: bool, device: torch.device
) -> None:
    for seed in range(2):
        drafts = random_round(random.Random(seed), 4, 7, 11, tree)
        assert decided(moved(drafts, device), rule, "triton") == decided(drafts, rule)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_nodes_that_are_nobodys_children(backend: Backend, device: torch.device) -> None:
    """Wherever they lie: the others decide what they do where these have been left out."""
    rng = random.Random(3)
    for rule in RULES:
        for _ in range(4 if backend == "torch" else 1):
            drafts = random_round(rng, 3, 6, 11, tree=True)
            spread = with_gaps(drafts, rng)
            ends, tokens = decided(moved(spread.drafts, device), rule, backend)
            expected_ends, expected_tokens = decided(drafts, rule)
            assert tokens == expected_tokens
            assert ends == [spread.places[b][end] for b, end in enumerate(expected_ends)]


@pytest.mark.parametrize("tree", [False, True])
def test_programs_that_share_a_row(
    tree: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specengine.kernels.accept import accept_relaxed_triton

    monkeypatch.setattr(accept_relaxed_triton, "_MAX_BLOCK", 8)
    for seed, rule in enumerate(RULES[tree::2]):
        drafts = random_round(random.Random(seed), 3, 5, 21, tree)
        assert decided(moved(drafts, device), rule, "triton") == decided(drafts, rule)


def one_draft(logits: list[float], token: int) -> RelaxedRound:
    """A draft whose target says something else."""
    rows = torch.tensor([logits, [0.0] * len(logits)])
    return round_of([([0, token], [-1, 0])], rows, [50, 51])


@backends
def test_what_is_fair(backend: Backend, device: torch.device) -> None:
    """Ties with the k-th best are, whatever stands before them; nothing forbidden is."""
    none = float("-inf")
    level, forbidden = [2.0, 1.0, 1.0, 1.0, 0.0], [1.0, none, none, 1.0, none]
    cases = [
        (level, (1, 1.0), [0]),
        (level, (2, 1.0), [0, 1, 2, 3]),
        (level, (4, 1.0), [0, 1, 2, 3]),
        (level, (5, 1.0), [0, 1, 2, 3, 4]),
        (level, (99, 1.0), [0, 1, 2, 3, 4]),
        (level, (99, 0.0), [0]),
        (forbidden, (1, 0.0), [0, 3]),
        (forbidden, (99, 1.0), [0, 3]),
        ([none] * 5, (99, 1.0), []),
    ]
    for logits, rule, fair in cases:
        ends = [
            decided(moved(one_draft(logits, token), device), rule, backend)[0] for token in range(5)
        ]
        assert [token for token, (end,) in enumerate(ends) if end == 1] == fair


@backends
def test_delta_is_of_probabilities(
    backend: Backend, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Probabilities are of the whole row, though a program sees a part of it."""
    from specengine.kernels.accept import accept_relaxed_triton

    monkeypatch.setattr(accept_relaxed_triton, "_MAX_BLOCK", 4)
    probs = torch.zeros(11)
    places = [1, 5, 7, 10]
    probs[places] = torch.tensor([0.4, 0.35, 0.2, 0.05])
    logits = probs.log().tolist()
    for delta, fair in ((0.04, 1), (0.06, 2), (0.19, 2), (0.21, 3), (0.34, 3), (0.36, 4)):
        ends = [
            decided(moved(one_draft(logits, token), device), (9, delta), backend)[0]
            for token in places
        ]
        assert ends == [[1]] * fair + [[0]] * (4 - fair)


@backends
def test_what_the_target_says_stands_first(backend: Backend, device: torch.device) -> None:
    r"""Then the first that is fair, though another is more likely.

              0
            / | \
         "2" "1" "3"
    """
    rows = torch.tensor([[3.0, 1.0, 2.0, 0.0]]).repeat(4, 1)
    drafts = round_of([([0, 2, 1, 3], [-1, 0, 0, 0])], rows, [3, 0, 0, 1])
    assert decided(moved(drafts, device), (9, 1.0), backend) == ([3], [1])
    drafts = replace(drafts, chosen_T=torch.tensor([0, 7, 8, 9]))
    assert decided(moved(drafts, device), (9, 1.0), backend) == ([1], [7])
    swapped = replace(drafts, tokens_BN=torch.tensor([[0, 1, 2, 3]]))
    assert decided(moved(swapped, device), (9, 1.0), backend) == ([1], [7])
    assert decided(moved(swapped, device), (2, 1.0), backend) == ([2], [8])


@backends
def test_a_token_beyond_the_vocabulary_is_not_fair(backend: Backend, device: torch.device) -> None:
    for token in (-1, 3, 10**9):
        drafts = one_draft([0.0, 0.0, 0.0], token)
        assert decided(moved(drafts, device), (9, 1.0), backend) == ([0], [50])


@backends
def test_who_drafted_nothing_gets_its_token(backend: Backend, device: torch.device) -> None:
    drafts = round_of([([1], [-1]), ([2], [-1])], torch.zeros(2, 6), [4, 5])
    assert decided(moved(drafts, device), (3, 1.0), backend) == ([0, 0], [4, 5])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype: torch.dtype, device: torch.device) -> None:
    for seed in range(2):
        drafts = random_round(random.Random(seed), 4, 6, 20, tree=True)
        half = replace(drafts, logits_TV=drafts.logits_TV.to(dtype))
        assert decided(moved(half, device), (3, 0.4), "triton") == decided(half, (3, 0.4))


def test_tensors_may_lie_anyhow(device: torch.device) -> None:
    drafts = random_round(random.Random(5), 3, 5, 11, tree=True)
    found = moved(drafts, device)
    wide = torch.cat([found.logits_TV, found.logits_TV], dim=1)[:, :11]
    for logits in (wide, found.logits_TV.T.contiguous().T):
        turned = replace(
            found,
            logits_TV=logits,
            tokens_BN=found.tokens_BN.T.contiguous().T,
            parents_BN=found.parents_BN.T.contiguous().T,
        )
        assert not turned.logits_TV.is_contiguous()
        assert decided(turned, (3, 0.4), "triton") == decided(drafts, (3, 0.4))


@pytest.mark.parametrize(
    ("batch", "width", "vocab", "tree"),
    [(1, 5, 49_152, False), (16, 9, 151_936, False), (8, 64, 128_256, True)],
)
class TestOnTheDevice:
    """Against the reference there, which is faster; and again, whichever program
    comes last to a meeting."""

    pytestmark = on_gpu

    def test_large_vocabularies(self, batch: int, width: int, vocab: int, tree: bool) -> None:
        for seed, rule in enumerate(RULES):
            made = random_round(random.Random(seed), batch, width, vocab, tree)
            drafts = moved(made, torch.device("cuda"))
            first = decided(drafts, rule, "torch")
            for _ in range(20):
                assert decided(drafts, rule, "auto") == first

    def test_it_does_not_wait(self, batch: int, width: int, vocab: int, tree: bool) -> None:
        made = random_round(random.Random(0), batch, width, vocab, tree)
        drafts = moved(made, torch.device("cuda"))
        accept_relaxed(drafts, 3, 0.3)
        try:
            torch.cuda.set_sync_debug_mode("error")
            accept_relaxed(drafts, 3, 0.3)
        finally:
            torch.cuda.set_sync_debug_mode("default")
