"""The lossy rule: drafts that are nearly as good as the target's own token."""

from __future__ import annotations

import random
from itertools import accumulate
from typing import Any

import pytest
import torch

from specengine.core.batch import ScheduleBatch
from specengine.core.interfaces import LogitsOutput
from specengine.core.spec import DraftProposal, VerifyResult
from specengine.layers import logits as layers_logits
from specengine.layers.logits import edit_logits
from specengine.layers.sampler import Sampler
from specengine.target.verify.match import MatchVerifier
from specengine.target.verify.relaxed import RelaxedVerifier
from specengine.target.verify.rows import row_map
from specengine.target.verify.walk import path_to
from tests.device import DEVICE
from tests.kernels.relaxed_world import walk
from tests.target.verify_world import Draft, TableTarget, chain, decode_batch, propose
from tests.target.verify_world import request as make_req

VOCAB = 6
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 4},
    {"temperature": 1.5, "logit_bias": {2: 3.0, 4: -100.0}},
    {"temperature": 0.0, "frequency_penalty": 2.0, "repetition_penalty": 1.3},
    {"min_tokens": 3, "stop_token_ids": (5,)},
]
PLAIN: list[dict[str, Any]] = [{"temperature": 0.0}] * 5


def random_drafts(rng: random.Random, tree: bool) -> list[Draft]:
    """One request has none, and one has some."""
    drafts: list[Draft] = []
    for most in (3, 5, 0, 4, 6):
        count = rng.randint(1, most) if most else 0
        tokens = [rng.randrange(VOCAB) for _ in range(count)]
        drafts.append(
            (tokens, [rng.randint(0, n) for n in range(count)]) if tree else chain(*tokens)
        )
    return drafts


def by_definition(
    batch: ScheduleBatch, output: LogitsOutput, proposal: DraftProposal, rule: tuple[int, float]
) -> list[tuple[list[int], list[int]]]:
    """The path and the tokens of each request."""
    rows = row_map(proposal, batch.sampling)
    edited = edit_logits(output.logits, batch.sampling, rows).cpu()
    sampled = Sampler()(output, batch.sampling, rows).tolist()
    found = []
    for b, (count, stop) in enumerate(
        zip(proposal.num_nodes, accumulate(proposal.num_nodes), strict=True)
    ):
        tokens, parents = (x[b, :count].tolist() for x in (proposal.tokens, proposal.parents))
        mine = sampled[stop - count : stop]
        end = walk(tokens, parents, mine, edited[stop - count : stop], *rule)
        path = path_to(end, parents)
        found.append((path, [*(tokens[node] for node in path[1:]), mine[end]]))
    return found


def rounds(
    options: list[dict[str, Any]], tree: bool, rule: tuple[int, float]
) -> list[tuple[VerifyResult, list[tuple[list[int], list[int]]]]]:
    """What the verifier says and what it should."""
    rng, target, pairs = random.Random(0), TableTarget(VOCAB, seed=5, sharpness=0.7), []
    for seed in range(12):
        reqs = [make_req(seed=seed + i, **one) for i, one in enumerate(options)]
        batch = decode_batch(reqs, VOCAB)
        proposal = propose([1] * len(options), random_drafts(rng, tree))
        output = target(batch, proposal)
        result = RelaxedVerifier(*rule).accept(output, batch, proposal)
        pairs.append((result, by_definition(batch, output, proposal, rule)))
    return pairs


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("options", [PLAIN, OPTIONS], ids=["plain", "edited"])
@pytest.mark.parametrize("rule", [(3, 0.2), (9, 1.0)])
def test_the_walk_is_that_of_the_definition(
    options: list[dict[str, Any]], tree: bool, rule: tuple[int, float]
) -> None:
    lengths = set()
    for result, expected in rounds(options, tree, rule):
        assert result.tokens == [tokens for _, tokens in expected]
        assert result.num_accepted == [len(path) - 1 for path, _ in expected]
        if result.kv_keep is not None:
            assert result.kv_keep == [path for path, _ in expected]
        lengths |= set(result.num_accepted)
    assert len(lengths) >= 3


def test_rows_may_be_edited_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [result for result, _ in rounds(OPTIONS, True, (3, 0.4))]
    monkeypatch.setattr(layers_logits, "_MAX_ELEMENTS", 4 * VOCAB)
    assert [result for result, _ in rounds(OPTIONS, True, (3, 0.4))] == whole


def test_a_request_does_not_feel_its_batch() -> None:
    target, verifier = TableTarget(VOCAB, seed=5), RelaxedVerifier(3, 0.4)
    for seed in range(6):
        drafts = random_drafts(random.Random(seed), tree=True)

        def accept(places: list[int], seed: int = seed, drafts: list[Draft] = drafts) -> list[Any]:
            batch = decode_batch([make_req(seed=seed + i, **OPTIONS[i]) for i in places], VOCAB)
            proposal = propose([1] * len(places), [drafts[i] for i in places])
            return verifier.accept(target(batch, proposal), batch, proposal).tokens

        assert accept([0, 1, 2, 3, 4]) == [accept([i])[0] for i in range(5)]


def test_nobody_drafted_is_a_plain_decode() -> None:
    target, nothing = TableTarget(VOCAB, seed=5), propose([1] * 5, [([], [])] * 5)
    batch = decode_batch([make_req(seed=i, **one) for i, one in enumerate(OPTIONS)], VOCAB)
    output = target(batch, nothing)
    result = RelaxedVerifier(9, 1.0).accept(output, batch, nothing)
    assert result.tokens == MatchVerifier().accept(output, batch, nothing).tokens
    assert result.is_lossy


def test_it_takes_what_is_nearly_as_good() -> None:
    logits = torch.tensor([[0.4, 0.35, 0.2, 0.05]] * 4, device=DEVICE).log()
    req = make_req(temperature=0.0)
    batch = decode_batch([req], 4)
    expected = {
        (3, 0.5): [[1, 0], [2, 0], [0]],  # (top_k, delta): what stands of drafts 1, 2 and 3
        (3, 0.1): [[1, 0], [0], [0]],
        (2, 0.5): [[1, 0], [0], [0]],
        (1, 0.5): [[0], [0], [0]],
        (4, 1.0): [[1, 0], [2, 0], [3, 0]],
    }
    for (top_k, delta), outputs in expected.items():
        verifier = RelaxedVerifier(top_k, delta)
        for draft, tokens in zip((1, 2, 3), outputs, strict=True):
            proposal = propose([1], [chain(draft)])
            result = verifier.accept(LogitsOutput(logits[:2]), batch, proposal)
            assert result.tokens == [tokens]
            assert result.is_lossy


def test_it_prefers_the_targets_own_token() -> None:
    r"""
          0
        /   \
     1:"1"  2:"0"
              |
            3:"2"
    """
    logits = torch.tensor([[0.4, 0.35, 0.25]] * 4, device=DEVICE).log()
    batch = decode_batch([make_req(temperature=0.0)], 3)
    proposal = propose([1], [([1, 0, 2], [0, 0, 2])])
    result = RelaxedVerifier(3, 0.5).accept(LogitsOutput(logits), batch, proposal)
    assert result.tokens == [[0, 2, 0]]
    assert result.kv_keep == [[0, 2, 3]]
    assert not MatchVerifier().accept(LogitsOutput(logits), batch, proposal).is_lossy
