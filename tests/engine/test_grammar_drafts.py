"""Drafts within grammars: what is cut, and what each node's row may say.

The tree of most tests, its letters and its node numbers:

        r0 ── a1 ── b3 ── a6
         │     └─── x4 ── b7
         └─── x2 ── a5
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specengine.core.batch import ScheduleBatch
from specengine.core.forward_mode import ForwardMode
from specengine.core.grammar import GrammarSpec
from specengine.core.request import Req
from specengine.core.sampling import SamplingParams
from specengine.core.sampling_batch import SamplingBatch
from specengine.core.spec import DraftProposal
from specengine.engine.draft_nodes import HostTree
from specengine.engine.grammar.drafts import add_masks, constrain, kept_nodes, legal_nodes
from specengine.engine.grammar.masks import MaskBuilder, masked_prefill
from tests.support.grammars import EOS, VOCAB, World, allowed, mask_of

AB = GrammarSpec.regex("[ab]{1,9}")
LETTERS = "raxbxaab"
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 4]


@pytest.fixture(scope="module")
def world(small_models: dict[str, Path]) -> World:
    return World(small_models["llama"])


def free(world: World) -> Req:
    """A request without a grammar."""
    return Req("free", world.ids("p"), SamplingParams(), output_ids=world.ids("x"))


def batch_of(reqs: list[Req], samples: list[bool] | None = None) -> ScheduleBatch:
    return ScheduleBatch(
        reqs=reqs,
        forward_mode=ForwardMode.DECODE,
        input_ids=[req.last_token for req in reqs],
        prefix_lens=[req.seq_len - 1 for req in reqs],
        extend_lens=[1] * len(reqs),
        samples=samples or [True] * len(reqs),
        sampling=SamplingBatch.from_reqs(reqs, VOCAB, torch.device("cpu")),
    )


def proposal_of(world: World, trees: list[tuple[str, list[int]]], **more: Any) -> DraftProposal:
    width = max(len(letters) for letters, _ in trees)
    return DraftProposal(
        tokens=torch.tensor([world.ids(t) + [-7] * (width - len(t)) for t, _ in trees]),
        parents=torch.tensor([p + [-9] * (width - len(p)) for _, p in trees]),
        num_nodes=[len(letters) for letters, _ in trees],
        is_chain=all(p == list(range(-1, len(p) - 1)) for _, p in trees),
        **more,
    )


def shown(world: World, proposal: DraftProposal) -> list[tuple[str, list[int]]]:
    """Letters and parents of each request's nodes."""
    rows = zip(proposal.tokens.tolist(), proposal.parents.tolist(), proposal.num_nodes, strict=True)
    return [(world.tokenizer.decode(t[:n]), p[:n]) for t, p, n in rows]


def test_node_outside_the_grammar_is_cut_with_its_subtree(world: World) -> None:
    reqs = [world.request(AB, "a"), free(world)]
    drafted = constrain(
        batch_of(reqs), proposal_of(world, [(LETTERS, PARENTS), (LETTERS, PARENTS)])
    )
    assert shown(world, drafted.proposal) == [("raba", [-1, 0, 1, 2]), (LETTERS, PARENTS)]
    assert drafted.proposal.num_drafted == [3, 7]


def test_chain_ends_where_it_leaves_the_grammar(world: World) -> None:
    chain = [-1, 0, 1, 2, 3]
    reqs = [world.request(AB, "a"), world.request(AB, "ab"), world.request(AB, "b")]
    drafted = constrain(
        batch_of(reqs),
        proposal_of(world, [("abaxa", chain), ("xa", chain[:2]), ("bxbb", chain[:4])]),
    )
    assert shown(world, drafted.proposal) == [("aba", chain[:3]), ("xa", chain[:2]), ("b", [-1])]
    assert drafted.proposal.is_chain


def test_completed_grammar_ends_the_draft(world: World) -> None:
    req = world.request(GrammarSpec.regex("abc"), "a")
    drafted = constrain(batch_of([req]), proposal_of(world, [("abca", [-1, 0, 1, 2])]))
    assert shown(world, drafted.proposal) == [("abc", [-1, 0, 1])]


def test_sampled_nodes_outside_the_grammar_are_kept_to_be_rejected(world: World) -> None:
    """Only what can never be reached is cut: the verifier must see each token that was drawn."""
    probs = torch.rand(1, len(PARENTS), VOCAB)
    confidence = torch.rand(1, len(PARENTS))
    proposal = proposal_of(world, [(LETTERS, PARENTS)], draft_probs=probs, confidence=confidence)
    drafted = constrain(batch_of([world.request(AB, "a")]), proposal).proposal
    assert shown(world, drafted) == [("raxbxa", [-1, 0, 0, 1, 1, 3])]
    kept = [0, 1, 2, 3, 4, 6]
    assert drafted.draft_probs is not None
    assert torch.equal(drafted.draft_probs[0, : len(kept)], probs[0, kept])
    assert drafted.confidence is not None
    assert torch.equal(drafted.confidence[0, : len(kept)], confidence[0, kept])


def test_greedy_requests_drafts_are_cut_beside_sampled_ones(world: World) -> None:
    """On the host and on the device."""
    tree, chain = "raxb", [-1, 0, 1, 2]
    reqs = [world.request(AB, "a", temperature=one) for one in (0.0, 0.7)]
    proposal = proposal_of(world, [(tree, chain)] * 2, draft_probs=torch.rand(2, 4, VOCAB))
    drafted = constrain(batch_of(reqs), proposal).proposal
    assert shown(world, drafted) == [("ra", [-1, 0]), ("rax", [-1, 0, 1])]
    legal_BN = np.array([[True, True, False, False]] * 2)
    trees = [HostTree(world.ids(tree), chain)] * 2
    kept_BN = kept_nodes(legal_BN, trees, [False, True])
    assert kept_BN.sum(axis=1).tolist() == drafted.num_nodes


@pytest.mark.parametrize("reqs", ["free", "legal"])
def test_proposal_is_returned_as_it_is_where_nothing_is_cut(world: World, reqs: str) -> None:
    req = free(world) if reqs == "free" else world.request(AB, "a")
    proposal = proposal_of(world, [("raba", [-1, 0, 1, 2])])
    assert constrain(batch_of([req]), proposal).proposal is proposal


def test_each_constrained_node_has_its_mask(world: World) -> None:
    """Row of each node of a request with a grammar; after abb, only the end may follow."""
    spec = GrammarSpec.regex("ab?b?")
    reqs = [free(world), world.request(spec, "a")]
    trees = [("xy", [-1, 0]), ("abxb", [-1, 0, 0, 1])]
    batch = batch_of(reqs)
    masked = constrain(batch, proposal_of(world, trees)).masked(batch)
    assert batch.sampling.mask is None
    mask = masked.sampling.mask
    assert mask is not None
    assert mask.slots_R.tolist() == [-1, -1, 0, 1, 2]
    b = world.token("b")
    assert [allowed(words) for words in mask.words_MW] == [{EOS, b}, {EOS, b}, {EOS}]


def test_rejected_nodes_have_no_mask(world: World) -> None:
    batch = batch_of([world.request(AB, "a")])
    proposal = proposal_of(world, [("raxb", [-1, 0, 0, 1])], draft_probs=torch.rand(1, 4, VOCAB))
    mask = constrain(batch, proposal).masked(batch).sampling.mask
    assert mask is not None
    assert (mask.slots_R >= 0).tolist() == [True, True, False, True]


def test_without_grammars_there_is_no_mask(world: World) -> None:
    batch = batch_of([free(world)])
    assert constrain(batch, proposal_of(world, [("xy", [-1, 0])])).masked(batch) is batch
    assert masked_prefill(batch) is batch


def test_prefill_masks_are_of_the_rows_that_sample(world: World) -> None:
    spec = GrammarSpec.choice(["a", "b"])
    reqs = [free(world), world.request(spec), world.request(AB), world.request(spec)]
    batch = batch_of(reqs, samples=[True, True, False, True])
    mask = masked_prefill(batch).sampling.mask
    assert mask is not None
    assert mask.slots_R.tolist() == [-1, 0, 1]
    ab = {world.token("a"), world.token("b")}
    assert [allowed(words) for words in mask.words_MW] == [ab, ab]


@pytest.mark.parametrize(
    ("sampling", "masks"),
    [
        ({}, ["ab$", "ab$", "ab$"]),
        ({"min_tokens": 3}, ["ab", "ab", "ab$"]),
        ({"min_tokens": 2}, ["ab", "ab$", "ab$"]),
        ({"ignore_eos": True}, ["ab", "ab", "ab"]),
        ({"stop_token_ids": "b"}, ["ab$", "ab$", "ab$"]),
        ({"min_tokens": 3, "stop_token_ids": "b"}, ["a", "a", "ab$"]),
        ({"min_tokens": 2, "stop_token_ids": "b", "ignore_eos": True}, ["a", "ab", "ab"]),
        ({"min_tokens": 3, "stop_token_ids": "ab"}, ["ab$", "ab$", "ab$"]),
    ],
    ids=str,
)
def test_tokens_that_end_the_output_are_masked_before_min_tokens(
    world: World, sampling: dict[str, Any], masks: list[str]
) -> None:
    """Forbidden before min_tokens, unless the grammar allows nothing else. $ is the end token."""
    stops = tuple(world.ids(sampling.get("stop_token_ids", "")))
    req = world.request(AB, "a", **(sampling | {"stop_token_ids": stops}))
    batch = batch_of([req])
    mask = constrain(batch, proposal_of(world, [("aab", [-1, 0, 1])])).masked(batch).sampling.mask
    assert mask is not None
    names = {world.token("a"): "a", world.token("b"): "b", EOS: "$"}
    expected = [set(letters) for letters in masks]
    assert [{names[t] for t in allowed(words)} for words in mask.words_MW] == expected


class Failed:
    """A state that hit a limit of the parser."""

    is_complete = False
    error = "too complex"

    def accept(self, token: int) -> bool:
        return False

    def take_back(self, count: int) -> None:
        assert count == 0

    def fill_mask(self, words: Any) -> None:
        words[:] = 0


def test_failed_grammar_masks_nothing(world: World) -> None:
    req = free(world)
    req.grammar = Failed()
    batch = batch_of([req])
    drafted = constrain(batch, proposal_of(world, [("xy", [-1, 0])]))
    assert drafted.proposal.num_nodes == [1]
    mask = drafted.masked(batch).sampling.mask
    assert mask is not None
    assert (mask.words_MW == -1).all()


@st.composite
def trees(draw: st.DrawFn) -> tuple[str, list[int]]:
    size = draw(st.integers(1, 12))
    letters = draw(st.text("abc", min_size=size, max_size=size))
    return letters, [-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))]


@settings(max_examples=60)
@given(trees(), st.sampled_from(["[ab]{1,9}", "(ab?c)+", "a*b", "(a|bc|cab){2,3}"]))
def test_legal_nodes_are_those_whose_text_is_legal(
    world: World, tree: tuple[str, list[int]], pattern: str
) -> None:
    """Each node's path, accepted on its own by a state of its own, and nothing is left behind."""
    letters, parents = tree
    spec = GrammarSpec.regex(pattern)
    state = world.compiler.start(spec)
    before = mask_of(state)
    found = {
        one.node: (one.depth, mask_of(state))
        for one in legal_nodes(state, HostTree(world.ids(letters), parents))
    }
    expected = {}
    for node in range(len(letters)):
        path = [node]
        while path[0] > 0:
            path.insert(0, parents[path[0]])
        fresh = world.compiler.start(spec)
        if all(fresh.accept(world.token(letters[n])) for n in path[1:]):
            expected[node] = (len(path) - 1, mask_of(fresh))
    assert found == expected
    assert mask_of(state) == before


def test_unfinished_walk_leaves_the_grammar_as_it_was(world: World) -> None:
    state = world.start(AB)
    before = mask_of(state)
    walk = legal_nodes(state, HostTree(world.ids("raba"), [-1, 0, 1, 2]))
    assert [next(walk).node for _ in range(3)] == [0, 1, 2]
    walk.close()
    assert mask_of(state) == before


@given(
    st.lists(
        st.tuples(st.text("ab", max_size=6), st.lists(st.integers(0, 4), max_size=5)),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
)
@settings(max_examples=40)
def test_masks_of_chains_made_at_once_are_those_of_the_walk(
    world: World, drawn: list[tuple[str, list[int]]], ignore_eos: bool
) -> None:
    """Among them tokens that the grammar forbids, and such that end it."""
    kinds = [world.token("a"), world.token("b"), world.token("x"), EOS, world.token("p")]
    reqs = [world.request(AB, text, ignore_eos=ignore_eos) for text, _ in drawn]
    chains = [[7, *(kinds[i] for i in picks)] for _, picks in drawn]
    trees = [HostTree(chain, list(range(-1, len(chain) - 1))) for chain in chains]
    total = sum(map(len, chains))
    at_once, walked = MaskBuilder(total, VOCAB), MaskBuilder(total, VOCAB)
    row, legal = 0, list[int]()
    for req, tree in zip(reqs, trees, strict=True):
        assert tree.is_chain
        add_masks(at_once, row, req, tree)
        assert req.grammar is not None
        for node in legal_nodes(req.grammar, tree):
            walked.add(row + node.node, req, req.grammar, node.depth)
            legal.append(row + node.node)
        row += len(tree.tokens)
    masks = [builder.send(torch.device("cpu")) for builder in (at_once, walked)]
    found, expected = (
        [allowed(mask.words_MW[mask.slots_R[i]]) for i in legal] for mask in masks if mask
    )
    assert found == expected
    for builder, mask in zip((at_once, walked), masks, strict=True):
        assert mask is not None
        assert builder.has_mask_R.nonzero()[0].tolist() == sorted(legal)
        assert (mask.slots_R >= 0).tolist() == builder.has_mask_R.tolist()
    for req, (text, _) in zip(reqs, drawn, strict=True):
        assert req.grammar is not None
        assert mask_of(req.grammar) == mask_of(world.start(AB, text)), "it stands where it stood"
