"""Random workloads: whatever happens around a request, it says what it would say alone, and every
KV slot is accounted for after every step."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specengine.core.request import Req
from specengine.core.sampling import SamplingParams
from tests.scheduler.fake_engine import VOCAB, FakeEngine, Setup, expected_output

setups = st.builds(
    Setup,
    num_slots=st.sampled_from([96, 128, 192, 512]),
    page_size=st.sampled_from([1, 16]),
    context_len=st.sampled_from([61, 80]),
    rows=st.integers(1, 6),
    chunk=st.sampled_from([-1, 5, 16, 64]),
    max_nodes=st.integers(1, 8),
    mixed=st.booleans(),
    disable_cache=st.booleans(),
)


class Workload:
    """Requests with common prefixes, some of one call, that arrive, and are sometimes aborted,
    while others run."""

    def __init__(self, setup: Setup, seed: int) -> None:
        self.random = random.Random(seed)
        self.engine = FakeEngine(setup, seed)
        self.stems = [self.tokens(self.random.randint(1, 40)) for _ in range(3)]
        self.reqs: list[Req] = []
        self.aborted: set[Req] = set()

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(1, VOCAB) for _ in range(count)]

    def arrive(self) -> None:
        rnd = self.random
        stem = rnd.choice(self.stems)
        prompt = stem[: rnd.randint(1, len(stem))] + self.tokens(rnd.randint(0, 18))
        min_tokens = rnd.choice([0, 0, 4])
        sampling = SamplingParams(
            max_tokens=rnd.choice([None, *range(min_tokens + 1, 30)]),
            min_tokens=min_tokens,
            ignore_eos=rnd.random() < 0.7,
            stop=rnd.choice([(), (), ("bc", "q"), ("zzz",)]),
            stop_token_ids=rnd.choice([(), (7,)]),
        )
        rid, owner = f"r{len(self.reqs)}", rnd.choice(["", "many", "some"])
        self.reqs.append(self.engine.add(rid, prompt, sampling, owner=owner))

    def run(self, count: int, abort_rate: float) -> None:
        while len(self.reqs) < count or self.engine.scheduler.has_work:
            if len(self.reqs) < count and self.random.random() < 0.5:
                self.arrive()
            if self.reqs and self.random.random() < abort_rate:
                self.abort(self.random.choice(self.reqs))
            self.engine.step()
            assert self.engine.steps < 10_000, "the scheduler goes round in circles"

    def abort(self, req: Req) -> None:
        if not req.is_finished:
            self.aborted.add(req)
        self.engine.scheduler.abort(req.rid)
        self.engine.scheduler.check_invariant()


def check_outputs(work: Workload) -> None:
    context_len = work.engine.setup.context_len
    for req in work.reqs:
        assert req.finish_reason is not None
        expected = expected_output(req, context_len)
        cut_short = req in work.aborted or req.finish_reason.message is not None
        if cut_short:
            assert req.output_ids == expected[: len(req.output_ids)]
        else:
            assert req.output_ids == expected
        assert (req.finish_reason.kind == "abort") == (req in work.aborted)
        if req.output_ids:
            emitted = 1 + req.spec.num_rounds + req.spec.num_accepted
            assert emitted == len(req.output_ids)
            assert sum(k * n for k, n in enumerate(req.spec.histogram)) == req.spec.num_accepted


def check_all_memory_is_back(work: Workload) -> None:
    scheduler = work.engine.scheduler
    ledger = scheduler.ledger
    assert scheduler.num_running == scheduler.num_waiting == 0
    assert ledger.cache.protected_size == 0
    assert ledger.obtainable == ledger.capacity
    ledger.evict_all()
    assert ledger.allocator.available == ledger.capacity
    assert ledger.rows.num_free == ledger.rows.size


@settings(max_examples=120)
@given(setups, st.integers(0, 2**32), st.sampled_from([0.0, 0.05, 0.3]))
def test_random_workload(setup: Setup, seed: int, abort_rate: float) -> None:
    work = Workload(setup, seed)
    work.run(count=14, abort_rate=abort_rate)
    check_outputs(work)
    check_all_memory_is_back(work)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("disable_cache", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
def test_retraction_changes_no_output(page_size: int, disable_cache: bool, mixed: bool) -> None:
    """Six requests of up to 80 tokens share memory for 128."""
    setup = Setup(
        num_slots=128,
        page_size=page_size,
        context_len=80,
        max_nodes=4,
        mixed=mixed,
        disable_cache=disable_cache,
    )
    work = Workload(setup, seed=1)
    sampling = SamplingParams(max_tokens=None, ignore_eos=True)
    for index in range(6):
        prompt = work.tokens(4 + 5 * index)
        work.reqs.append(work.engine.add(f"r{index}", prompt, sampling))
    work.run(count=6, abort_rate=0.0)
    assert work.engine.scheduler.num_retractions > 0
    assert all(req.finish_reason and not req.finish_reason.message for req in work.reqs)
    check_outputs(work)
    check_all_memory_is_back(work)
