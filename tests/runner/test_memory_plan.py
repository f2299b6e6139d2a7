from __future__ import annotations

from dataclasses import replace

import pytest

from specengine.core.errors import OutOfMemoryError
from specengine.core.platforms.cpu import HostMemory
from specengine.runner.memory.plan import GIB, GraphDemand, MemoryPlan

PLAN = MemoryPlan(
    total=16 * GIB,
    fraction=0.5,
    used=2 * GIB,
    peak=3 * GIB,
    current=2 * GIB,
    bytes_per_token=1 << 20,
    limit_tokens=1 << 30,
    page_size=16,
)


def test_kv_budget_follows_the_formula() -> None:
    """16 x 0.5 - 2 used - 3 peak + 2 current = 5 GiB."""
    assert PLAN.kv_budget == 5 * GIB
    assert PLAN.num_tokens == 5 * 1024


def test_memory_of_graphs_is_taken_from_the_kv_budget() -> None:
    plan = replace(PLAN, graphs=GIB)
    assert plan.kv_budget == PLAN.kv_budget - GIB
    assert "1.00 graphs" in plan.describe()
    assert plan.graph_budget == GIB + 4 * GIB


def test_recurrent_state_is_taken_from_the_kv_budget_and_named_where_it_leaves_too_little() -> None:
    plan = replace(PLAN, states=2 * GIB, snapshots=GIB)
    assert plan.kv_budget == PLAN.kv_budget - 2 * GIB
    assert "2.00 states" in plan.describe()
    plan.check(3 * 1024)
    with pytest.raises(
        OutOfMemoryError,
        match=r"takes 2\.00 GiB of it: lower --max-running-requests or --max-state-snapshots$",
    ):
        plan.check(4 * 1024)
    with pytest.raises(OutOfMemoryError, match=r"lower --max-running-requests$"):
        replace(plan, snapshots=0).check(4 * 1024)
    with pytest.raises(OutOfMemoryError, match="mem-fraction-static"):
        plan.check(6 * 1024)  # which would not fit without it either


@pytest.mark.parametrize(
    ("needed", "limit", "snapshots"),
    [
        (1, 1 << 20, 20),  # half of 5 GiB
        (3, 1 << 20, 16),  # half of 2 GiB
        (3, 3, 20),  # KV has no use for the rest
        (3, 4, 16),
        (4.5, 4.5, 8),
        (5, 5, 0),
        (6, 6, 0),
    ],
)
def test_snapshots_have_half_of_what_is_left_or_what_kv_cannot_use(
    needed: float, limit: float, snapshots: int
) -> None:
    """needed, limit: GiB of KV. A snapshot takes 64 MiB, and 20 are wanted."""
    plan = replace(PLAN, limit_tokens=int(limit * 1024))
    assert plan.snapshots_beside(int(needed * 1024), GIB // 16, 20) == snapshots


def test_graph_demand_adds_logits_forward_and_launches() -> None:
    """Logits that stay, a forward at its largest, and the launches of 2 x 3 graphs."""
    demand = GraphDemand((1, 8), 4, 1, num_layers=2, vocab_size=1000, bytes_per_token=500)
    launches = 6 * 2 * 65536
    assert demand.num_bytes == (9 + 2 * 32) * 4000 + 32 * 6500 + launches
    weighed = replace(demand, kept_weights=1)
    assert weighed.num_bytes == demand.num_bytes + 32 * 4000
    plain = replace(demand, nodes=1)
    assert plain.num_bytes == 9 * 4000 + 8 * 6500 + launches
    prompts = replace(plain, prompts=(16, 64))
    assert prompts.num_bytes == plain.num_bytes + (64 + 20) * 500 + 2 * 2 * 65536


def test_num_tokens_is_whole_pages_within_the_limit() -> None:
    assert replace(PLAN, limit_tokens=1000).num_tokens == 992
    assert replace(PLAN, used=9 * GIB).num_tokens == 0


def test_check_passes_where_the_tokens_fit() -> None:
    PLAN.check(5 * 1024)


def test_error_names_a_fraction_that_fits() -> None:
    with pytest.raises(OutOfMemoryError, match=r"--mem-fraction-static 0\.\d+ fits") as error:
        PLAN.check(6 * 1024)
    words = str(error.value).split()
    fraction = float(words[words.index("--mem-fraction-static") + 1])
    replace(PLAN, fraction=fraction).check(6 * 1024)


def test_error_names_a_context_that_fits() -> None:
    with pytest.raises(OutOfMemoryError, match="--context-length 5120 fits"):
        PLAN.check(100 * 1024)


def test_error_names_the_weights_where_they_alone_do_not_fit() -> None:
    with pytest.raises(OutOfMemoryError, match="weights alone"):
        replace(PLAN, used=15 * GIB, fraction=0.9).check(100 * 1024)


def test_readings_of_this_machine_are_consistent() -> None:
    memory = HostMemory()
    assert 0 < memory.used() < memory.total()
    assert memory.peak() >= memory.current() > 0
