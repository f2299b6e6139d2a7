"""Chances of acceptance by position: of chains, of trees cut to their best nodes, of hybrids."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specengine.core.spec_stats import DraftShape
from specengine.engine.adaptive.acceptance import (
    Acceptance,
    HybridAcceptance,
    PositionShares,
    RoundObservation,
    merged,
)
from specengine.engine.adaptive.costs import RunningCosts
from specengine.engine.adaptive.estimate import expected_tokens
from specengine.engine.adaptive.state import DepthChooser
from tests.support.adaptive import DEPTH, TreeWorld, chances, ranks_of, seen, tree_cost, tree_of

PRIOR = pytest.approx(0.7)
TREE = [0.55, 0.2, 0.1]  # chances of the children of a node
WHOLE = DraftShape(DEPTH)
MODEL, LOOKUP = 3, 7  # steps


def learned(rounds: list[tuple[list[int], list[int]]], depth: int = 3) -> list[float]:
    acceptance = Acceptance(depth)
    for drafted, accepted in rounds:
        acceptance.observe(seen(depth, drafted, accepted))
    return chances(acceptance)


def tokens_of(acceptance: Acceptance, num_nodes: int | None = None) -> float:
    return expected_tokens(chances(acceptance, num_nodes))[-1]


def count(shares: PositionShares, place: int, held: list[bool]) -> None:
    """At one position, of so many requests at once."""
    shares.add((place, place + 1, place + one, 1) for one in held)


def test_first_rounds_move_the_prior_a_little() -> None:
    assert learned([]) == [PRIOR] * 3
    assert 0.5 < learned([([3], [0])])[0] < 0.7
    assert 0.7 < learned([([3], [1])])[0] < 0.8


def test_a_position_counts_only_where_it_was_reached() -> None:
    """Half stand at the first position, of those all at the second, of those none at the third."""
    assert learned([([3, 3], [0, 2])] * 300) == pytest.approx([0.5, 1.0, 0.0], abs=0.01)


@pytest.mark.parametrize("accepted", [0, 1])
def test_positions_without_drafts_are_expected_like_the_one_before(accepted: int) -> None:
    found = learned([([1, 0], [accepted, 0])] * 500)
    assert found == pytest.approx([float(accepted)] * 3, abs=0.01)


def test_old_rounds_are_forgotten() -> None:
    before, after = ([1], [1]), ([1], [0])
    assert learned([before] * 2000 + [after] * 200)[0] < 0.4
    assert learned([before] * 2000 + [after] * 800)[0] < 0.03


def test_one_large_round_does_not_replace_all_that_is_known() -> None:
    before, after = ([1] * 200, [1] * 200), ([1] * 200, [0] * 200)
    assert learned([before] * 50 + [after])[0] > 0.9


def test_coverage_is_the_share_of_requests_with_drafts() -> None:
    acceptance = Acceptance(2)
    assert acceptance.coverage == 1.0
    for _ in range(20):
        acceptance.observe(seen(2, [2, 1], [1, 0]))
    assert acceptance.coverage == 1.0
    for _ in range(500):
        acceptance.observe(seen(2, [2, 0, 0, 0], [0] * 4))
    assert acceptance.coverage == pytest.approx(0.25, abs=0.01)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=20))
def test_requests_of_a_round_count_position_by_position(pairs: list[tuple[int, int]]) -> None:
    """A position is tried where those before it were accepted."""
    pairs = [(levels, min(levels, kept)) for levels, kept in pairs]
    expected = PositionShares(3, 0.7)
    for place in range(3):
        reached = [kept for levels, kept in pairs if levels > place and kept >= place]
        count(expected, place, [kept > place for kept in reached])
    drafted, accepted = zip(*pairs, strict=True)
    assert learned([([*drafted], [*accepted])]) == expected.chances()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(0, 39))
def test_more_accepted_drafts_give_better_chances(accepted: list[int], one: int) -> None:
    better = list(accepted)
    better[one % len(better)] = 3
    low = learned([([3], [kept]) for kept in accepted])
    high = learned([([3], [kept]) for kept in better])
    assert high[0] >= low[0] - 1e-12
    assert all(0.0 <= chance <= 1.0 for chance in low + high)


@pytest.mark.parametrize("num_nodes", [2, 4, 5, 8, None])
def test_rounds_of_whole_trees_tell_what_smaller_ones_accept(num_nodes: int | None) -> None:
    """As many tokens as rounds of the smaller tree."""
    world, acceptance = TreeWorld(TREE, tree_cost), Acceptance(DEPTH, [2, 4, 5, 8])
    tree = tree_of(TREE, WHOLE)
    for _ in range(600):
        ranks = [ranks_of(tree, world.draw()) for _ in range(8)]
        accepted = [len(one) for one in ranks]
        acceptance.observe(seen(DEPTH, [len(tree)] * 8, accepted, path_ranks=ranks))
    run = world.tokens(DraftShape(DEPTH, num_nodes))
    assert tokens_of(acceptance, num_nodes) == pytest.approx(run, abs=0.2)


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("cut_to", [None, 4])
def test_requests_with_trees_count_position_by_position(depth: int, cut_to: int | None) -> None:
    """For each size, those that tell it from the size before."""
    draw, sizes, deepest = random.Random(depth), [3, 4, 8], 3
    acceptance = Acceptance(deepest, sizes)
    compared = [PositionShares(deepest, 0.2) for _ in sizes]
    for _ in range(60):
        counts = [0, 3] if cut_to else [0, 2, 3, 7, 15]
        drafted = [draw.choice(counts) for _ in range(5)]
        limits = [draw.choice([1, 2, 3]) for _ in drafted]
        levels = [*map(min, drafted, limits)]
        ranks = [
            sorted(draw.sample(range(1, nodes + 1), draw.randint(0, min(level, depth))))
            for nodes, level in zip(drafted, levels, strict=True)
        ]
        accepted = [len(one) for one in ranks]
        more = {"num_nodes": cut_to, "path_ranks": ranks, "limits": limits}
        acceptance.observe(seen(depth, drafted, accepted, **more))
        known = sizes[: len(sizes) if cut_to is None else sizes.index(cut_to)]
        by_size = [[sum(rank < size for rank in one) for one in ranks] for size in known]
        for index, (small, large) in enumerate(pairwise([*by_size, accepted])):
            least = sizes[index + 1] - 1 if index + 1 < len(sizes) else sizes[-1]
            tells = [depth == deepest or nodes >= least for nodes in drafted]
            for place in range(deepest):
                rescued = [
                    after > place
                    for level, before, after, does in zip(levels, small, large, tells, strict=True)
                    if does and min(level, depth) > place >= before
                ]
                count(compared[index], place, rescued)
    for own, other in zip(acceptance.rescues, compared, strict=True):
        assert own.chances() == other.chances()


def test_a_tree_of_n_nodes_has_the_ranks_below_n() -> None:
    acceptance = Acceptance(3, [3, 4])
    for _ in range(600):
        acceptance.observe(seen(3, [15] * 2, [3, 3], path_ranks=[[1, 2, 3]] * 2))
    assert chances(acceptance, 3) == pytest.approx([1.0, 1.0, 0.0], abs=0.02)
    assert chances(acceptance, 4) == pytest.approx([1.0, 1.0, 1.0], abs=0.02)
    assert chances(acceptance) == pytest.approx([1.0, 1.0, 1.0], abs=0.02)


def test_requests_with_a_limit_tell_nothing_of_deeper_positions() -> None:
    """However many nodes their trees have."""
    acceptance = Acceptance(3, [4])
    more = {"path_ranks": [[1, 2, 3], [1, 2, 5], [1]], "limits": [3, 3, 1]}
    for _ in range(100):
        acceptance.observe(seen(3, [15, 15, 4], [3, 3, 1], **more))
    for size in (None, 4):
        assert chances(acceptance, size)[:2] == pytest.approx([1.0, 1.0], abs=0.05)
    assert chances(acceptance)[2] == pytest.approx(1.0, abs=0.05)
    assert chances(acceptance, 4)[2] == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("size", [2, 5, 8])
def test_a_smaller_tree_keeps_its_nodes_of_every_path(size: int) -> None:
    """The other tests rely on this of the simulated trees."""
    world, whole = TreeWorld(TREE, tree_cost), tree_of(TREE, WHOLE)
    small = tree_of(TREE, DraftShape(DEPTH, size))
    assert small == whole[: size - 1]
    for _ in range(500):
        text = world.draw()
        assert [rank for rank in ranks_of(whole, text) if rank < size] == ranks_of(small, text)


def test_no_size_reaches_less_than_a_smaller_one() -> None:
    """Even where larger ones ran only while nothing was accepted."""
    acceptance = Acceptance(DEPTH, [5, 8])
    for _ in range(200):
        acceptance.observe(seen(DEPTH, [15] * 4, [0] * 4, path_ranks=[[]] * 4))
    for _ in range(500):
        ranks = [[1, 2, 3]] * 4
        acceptance.observe(seen(DEPTH, [4] * 4, [3] * 4, path_ranks=ranks, num_nodes=5))
    found = [tokens_of(acceptance, size) for size in (5, 8, None)]
    assert found == sorted(found)
    assert found[0] == pytest.approx(4.0, abs=0.1)


def test_no_chance_exceeds_one_though_positions_forget_separately() -> None:
    rng, acceptance = random.Random(0), Acceptance(DEPTH, [5, 9])
    for _ in range(300):
        size = rng.choice([5, 9, None])
        most = size or 40
        ranks = [sorted(rng.sample(range(1, most), rng.randrange(DEPTH + 1))) for _ in range(4)]
        accepted, more = [len(row) for row in ranks], {"path_ranks": ranks, "num_nodes": size}
        acceptance.observe(seen(DEPTH, [most - 1] * 4, accepted, **more))
        assert all(max(found) <= 1.0 for found in acceptance.by_size([5, 9, None]).values())


@pytest.mark.parametrize("chosen", [None, 5])
def test_rounds_of_small_trees_leave_what_larger_ones_add(chosen: int | None) -> None:
    """A whole tree in place of the chosen size counts as whole."""
    acceptance = Acceptance(DEPTH, [5])
    for _ in range(300):
        more = {"path_ranks": [[1], [9]], "num_nodes": chosen}
        acceptance.observe(seen(1, [15] * 2, [1, 1], **more))
    assert chances(acceptance, 5)[0] == pytest.approx(0.5, abs=0.02)
    assert chances(acceptance)[0] == pytest.approx(1.0, abs=0.02)
    for _ in range(600):
        acceptance.observe(seen(1, [4] * 2, [0, 0], path_ranks=[[], []], num_nodes=5))
    assert chances(acceptance, 5)[0] == pytest.approx(0.0, abs=0.02)
    assert chances(acceptance)[0] == pytest.approx(1.0, abs=0.02), "as far as is known"


def test_shallow_trees_of_few_nodes_tell_nothing_of_larger_ones() -> None:
    acceptance = Acceptance(DEPTH, [5])
    before = chances(acceptance)[0] - chances(acceptance, 5)[0]
    for _ in range(300):
        acceptance.observe(seen(1, [3] * 2, [0, 0], path_ranks=[[], []]))
    assert chances(acceptance)[0] - chances(acceptance, 5)[0] > before > 0.0


@pytest.mark.parametrize("requests", [1, 8, 64])
@pytest.mark.parametrize("sizes", [[], [2, 4]])
def test_merged_rounds_weigh_as_much_as_one_by_one(sizes: list[int], requests: int) -> None:
    """And what was known before them is forgotten as fast."""
    draw, depth = random.Random(0), 3
    each, together = Acceptance(depth, sizes), Acceptance(depth, sizes)
    for number in range(60):
        rounds, chance = list[RoundObservation](), 0.95 if number < 40 else 0.4
        for _ in range(4):
            fails = [[draw.random() > chance for _ in range(depth)] for _ in range(requests)]
            accepted = [(*one, True).index(True) for one in fails]
            ranks = [sorted(draw.sample(range(1, 8), kept)) for kept in accepted]
            more = {"path_ranks": ranks, "limits": [depth] * requests}
            rounds.append(seen(depth, [7] * requests, accepted, **more))
            each.observe(rounds[-1])
        together.observe(merged(rounds))
        for size in (*sizes, None):
            assert chances(together, size) == pytest.approx(chances(each, size), abs=0.03)


def hybrid(
    rounds: int, drafted: list[int], accepted: list[int], from_lookup: list[bool] | None
) -> HybridAcceptance:
    acceptance = HybridAcceptance(LOOKUP, MODEL)
    for _ in range(rounds):
        acceptance.observe(seen(LOOKUP, drafted, accepted, from_lookup=from_lookup))
    return acceptance


def test_accepted_lookup_tells_nothing_of_the_model() -> None:
    acceptance = hybrid(400, [7, 3, 3, 3], [7, 0, 0, 0], [True, False, False, False])
    assert chances(acceptance.model) == pytest.approx([0.0] * MODEL, abs=0.02)
    assert chances(acceptance.lookup) == pytest.approx([1.0] * LOOKUP, abs=0.02)
    assert acceptance.lookup_share == pytest.approx(0.25, abs=0.01)
    assert expected_tokens(chances(acceptance))[LOOKUP] == pytest.approx(1 + 7 / 4, abs=0.05)


def test_positions_past_the_model_count_for_requests_with_a_match() -> None:
    acceptance = hybrid(400, [7, 3, 3, 3], [7, 3, 3, 3], [True, False, False, False])
    tokens = expected_tokens(chances(acceptance))
    assert tokens[MODEL] == pytest.approx(4.0, abs=0.05)
    assert tokens[LOOKUP] == pytest.approx(4.0 + 4 / 4, abs=0.05)
    levels = [acceptance.mean_levels(steps) for steps in (0, 2, 3, 7)]
    assert levels == pytest.approx([0, 2, 3, 4], abs=0.05)


def test_without_matches_a_hybrid_learns_the_model_alone() -> None:
    acceptance = hybrid(600, [3, 3], [3, 1], None)
    assert expected_tokens(chances(acceptance))[LOOKUP] == pytest.approx(3.0, abs=0.05)
    assert acceptance.mean_levels(LOOKUP) == pytest.approx(MODEL, abs=0.05)
    assert acceptance.coverage == pytest.approx(1.0)


def test_requests_without_drafts_count_for_neither_source() -> None:
    """One of them had a match that was cut to nothing."""
    acceptance = hybrid(600, [3, 0, 0, 5], [3, 0, 0, 5], [False, False, True, True])
    assert acceptance.coverage == pytest.approx(0.5, abs=0.01)
    assert acceptance.lookup_share == pytest.approx(0.5, abs=0.01)
    assert expected_tokens(chances(acceptance))[5] == pytest.approx(1 + (3 + 5) / 2, abs=0.1)


def test_in_graphs_a_hybrid_round_costs_what_its_deepest_request_does() -> None:
    """A few matches make a round of many deep."""
    steps = DepthChooser([0, MODEL, LOOKUP], model_steps=MODEL, pads=True)
    levels, matches = [MODEL] * 63 + [LOOKUP], [False] * 63 + [True]
    for _ in range(200):
        steps.observe(seen(LOOKUP, levels, levels, seconds=3.0, from_lookup=matches))
        steps.observe(seen(MODEL, [MODEL] * 64, [MODEL] * 64, seconds=2.0, from_lookup=matches))
        steps.observe(seen(0, [0] * 64, [0] * 64, seconds=1.0))
    assert (steps.costs.of(64, LOOKUP), steps.costs.of(64, MODEL)) == (3.0, 2.0)
    acceptance = steps.acceptance
    assert acceptance.mean_levels(LOOKUP, 1) == pytest.approx(MODEL + 4 / 64, abs=0.02)
    assert acceptance.mean_levels(LOOKUP, 64) == pytest.approx(MODEL + 4 * 0.635, abs=0.1)
    assert acceptance.mean_levels(MODEL, 64) == MODEL


def test_in_graphs_a_match_deeper_than_the_model_costs_the_chosen_depth() -> None:
    steps = DepthChooser([0, MODEL, LOOKUP], model_steps=MODEL, pads=True)
    for longest, seconds in ((MODEL + 1, 4.0), (MODEL - 1, 2.0)):
        levels, matches = [longest, 0], [True, False]
        for _ in range(20):
            steps.observe(seen(LOOKUP, levels, levels, seconds=seconds, from_lookup=matches))
            steps.observe(seen(0, [0, 0], [0, 0], seconds=1.0))
    assert steps.costs.of(2, LOOKUP) == 4.0
    assert steps.costs.of(2, MODEL - 1) == 2.0


def test_accepted_padding_of_a_hybrid_is_no_draft() -> None:
    acceptance, matches = HybridAcceptance(LOOKUP, MODEL), [True, False, False]
    for _ in range(400):
        more = {"limits": [1, 1, 1], "from_lookup": matches}
        acceptance.observe(seen(LOOKUP, [1, 3, 3], [1, 3, 0], **more))
    assert chances(acceptance.model) == pytest.approx([0.5] * MODEL, abs=0.02)


def test_a_hybrids_model_trees_cost_by_their_levels() -> None:
    """The number of nodes does not tell them."""
    steps = DepthChooser([0, MODEL, LOOKUP], sizes={MODEL: [4]}, model_steps=MODEL)
    more = {"path_ranks": [[1, 2, 5], [1, 2, 3, 4]], "limits": [LOOKUP] * 2}
    for _ in range(40):
        matches = [False, True]
        steps.observe(seen(LOOKUP, [15, 7], [3, 4], seconds=2.0, from_lookup=matches, **more))
        steps.observe(seen(0, [0, 0], [0, 0], seconds=1.0))
    assert isinstance(steps.costs, RunningCosts)
    assert steps.costs.of(2, (3 + 7) / 2) == 2.0
    assert steps.costs.of(2, 2.5) == 1.5
    acceptance = steps.acceptance
    assert isinstance(acceptance, HybridAcceptance)
    assert acceptance.has_ranks
    assert chances(acceptance.model) == pytest.approx([1.0] * MODEL, abs=0.1)
    assert chances(acceptance.model, 4)[2] == pytest.approx(0.0, abs=0.1)
    assert len(chances(acceptance, 4)) == LOOKUP


def test_one_source_of_drafts_is_learned_like_the_hybrids_model() -> None:
    one, other = Acceptance(MODEL), HybridAcceptance(LOOKUP, MODEL).model
    assert type(DepthChooser([0, MODEL]).acceptance) is Acceptance
    for accepted in ([3, 1], [0, 2]):
        for acceptance in (one, other):
            acceptance.observe(seen(MODEL, [3, 3], accepted))
    assert chances(one) == chances(other)
