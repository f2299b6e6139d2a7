"""What runs when, and who has to wait."""

from __future__ import annotations

from typing import Any

import pytest

from specengine.core.errors import InvariantError, RequestError
from specengine.core.forward_mode import ForwardMode
from specengine.core.request import FinishReason, Req, ReqState, TokenLogprob
from specengine.core.sampling import SamplingParams
from specengine.core.spec import PrefillResult, VerifyResult
from tests.scheduler.fake_engine import FakeEngine, Setup

EXTEND, DECODE, MIXED = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.MIXED


def prompt(count: int, first: int = 1) -> list[int]:
    return [first + i % 20 for i in range(count)]


def add(engine: FakeEngine, rid: str, tokens: list[int], **sampling: Any) -> Req:
    sampling = {"ignore_eos": True, "max_tokens": 20} | sampling
    return engine.add(rid, tokens, SamplingParams(**sampling))


def steps(engine: FakeEngine, count: int) -> list[tuple[ForwardMode, dict[str, int]]]:
    """Mode and new tokens of each request, forward by forward."""
    seen = []
    for _ in range(count):
        batch = engine.step()
        assert batch is not None
        rids = [req.rid for req in batch.reqs]
        seen.append((batch.forward_mode, dict(zip(rids, batch.extend_lens, strict=True))))
    return seen


def test_long_prompt_goes_in_chunks_and_lets_a_shorter_one_through() -> None:
    engine = FakeEngine(Setup(chunk=16))
    add(engine, "long", prompt(40))
    add(engine, "short", prompt(5, first=7))
    assert steps(engine, 4) == [
        (EXTEND, {"long": 11, "short": 5}),
        (DECODE, {"short": 1}),
        (EXTEND, {"long": 16}),
        (DECODE, {"short": 1}),
    ]


def test_short_prompt_waits_for_one_forward_beside_ten_long_ones() -> None:
    engine = FakeEngine(Setup(chunk=16, num_slots=800, rows=12))
    for index in range(10):
        add(engine, f"long{index}", prompt(40, first=index + 1))
    assert steps(engine, 1) == [(EXTEND, {"long0": 16})]
    add(engine, "short", prompt(6, first=15))
    assert steps(engine, 1) == [(EXTEND, {"long0": 10, "short": 6})]


def test_short_prompt_beside_ten_of_2000_tokens_waits_for_one_forward_and_costs_none() -> None:
    engine = FakeEngine(Setup(chunk=512, num_slots=40_000, context_len=2_100, rows=12))
    for index in range(10):
        add(engine, f"long{index}", prompt(2_000, first=index + 1), max_tokens=1)
    short = add(engine, "short", prompt(30, first=15), max_tokens=1)
    forwards, ended = 0, None
    while engine.scheduler.has_work:
        batch = engine.step()
        assert batch is not None
        forwards += batch.forward_mode is EXTEND
        ended = forwards if ended is None and short.is_finished else ended
    assert ended == 1
    assert forwards == -(-(10 * 2_000 + 30) // 512)  # all of them full but the last


def test_prompts_that_started_together_and_took_nothing_keep_their_places() -> None:
    """Where they have more tokens than several may have in one forward, the first is alone in it;
    a shorter one had started before a longer one."""
    engine = FakeEngine(Setup(chunk=64, num_slots=512, context_len=200))
    for rid, size in (("a", 100), ("b", 40), ("c", 30)):
        add(engine, rid, prompt(size, first=ord(rid)))
    (chunk,) = engine.scheduler.admission.plan(most_together=1)
    assert chunk.req.rid == "a"
    assert [req.rid for req in engine.scheduler.queues.prefilling] == ["a", "b", "c"]


def test_short_prompt_of_lower_priority_waits_for_a_long_one() -> None:
    engine = FakeEngine(Setup(chunk=16))
    add(engine, "long", prompt(40))
    add(engine, "later", prompt(5, first=7), priority=1)
    add(engine, "sooner", prompt(5, first=9), priority=-1)
    assert steps(engine, 1) == [(EXTEND, {"sooner": 5, "long": 11})]
    assert steps(engine, 3)[1:] == [(EXTEND, {"long": 16}), (DECODE, {"sooner": 1})]
    assert steps(engine, 1) == [(EXTEND, {"long": 13, "later": 3})]


def test_short_prompt_waits_for_the_prefix_that_it_shares_with_a_long_one() -> None:
    engine = FakeEngine(Setup(chunk=160, num_slots=1_000, context_len=300, rows=12))
    long = add(engine, "long", [*prompt(80), *prompt(170, first=3)])
    short = add(engine, "short", [*prompt(80), 5])
    assert steps(engine, 1) == [(EXTEND, {"long": 160})]
    steps(engine, 1)
    assert short.prefix_hit_len == 80
    assert long.prefix_hit_len == 0


def test_oldest_prompt_has_half_of_each_forward_beside_a_stream_of_short_ones() -> None:
    engine = FakeEngine(Setup(chunk=16))
    add(engine, "long", prompt(40))
    for index in range(12):
        add(engine, f"short{index}", prompt(4, first=index + 3), max_tokens=1)
    shares = [lens.get("long") for mode, lens in steps(engine, 5) if mode is EXTEND]
    assert shares == [8, 8, 8, 8, 8]


def test_prompts_of_one_length_are_taken_in_one_after_another() -> None:
    engine = FakeEngine(Setup(chunk=16, num_slots=800, rows=12))
    for index in range(3):
        add(engine, f"r{index}", prompt(20, first=index + 1), max_tokens=1)
    assert steps(engine, 4) == [
        (EXTEND, {"r0": 16}),
        (EXTEND, {"r0": 4, "r1": 12}),
        (EXTEND, {"r1": 8, "r2": 8}),
        (EXTEND, {"r2": 12}),
    ]


def test_short_prompt_gets_no_memory_before_an_older_one_that_lacks_it() -> None:
    engine = FakeEngine(Setup(chunk=16, num_slots=64))
    first = add(engine, "first", prompt(40))
    engine.step()
    add(engine, "second", prompt(50, first=2))
    short = add(engine, "short", prompt(4, first=9))
    steps(engine, 2)
    assert first.state is ReqState.RUNNING
    assert short.state is ReqState.WAITING
    engine.run()
    assert short.is_finished


def test_unfinished_chunks_sample_nothing() -> None:
    engine = FakeEngine(Setup(chunk=16))
    req = add(engine, "long", prompt(20))
    first, second = engine.step(), engine.step()
    assert first is not None
    assert second is not None
    assert (first.samples, second.samples) == ([False], [True])
    assert (req.state, len(req.output_ids), req.kv_len) == (ReqState.RUNNING, 1, 20)


def test_rounds_alternate_with_a_stream_of_prompts() -> None:
    engine = FakeEngine(Setup(chunk=16))
    add(engine, "a", prompt(4))
    engine.step()
    add(engine, "b", prompt(40, first=5))
    assert steps(engine, 5) == [
        (DECODE, {"a": 1}),
        (EXTEND, {"b": 16}),
        (DECODE, {"a": 1}),
        (EXTEND, {"b": 16}),
        (DECODE, {"a": 1}),
    ]


def test_mixed_batches_carry_running_requests() -> None:
    engine = FakeEngine(Setup(chunk=16, mixed=True))
    req = add(engine, "a", prompt(4))
    engine.step()
    add(engine, "b", prompt(20, first=5))
    assert steps(engine, 4) == [
        (DECODE, {"a": 1}),
        (MIXED, {"b": 16, "a": 1}),
        (MIXED, {"b": 4, "a": 1}),
        (DECODE, {"a": 1, "b": 1}),
    ]
    assert (len(req.output_ids), req.spec.num_rounds) == (5, 4)
    assert engine.scheduler.spec_totals.num_rounds == 4 + 1


def test_no_more_requests_run_than_there_are_rows() -> None:
    engine = FakeEngine(Setup(rows=2, chunk=-1))
    for index in range(4):
        add(engine, f"r{index}", prompt(3, first=index))
    assert steps(engine, 2) == [(EXTEND, {"r0": 3, "r1": 3}), (DECODE, {"r0": 1, "r1": 1})]
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (2, 2)


def test_a_request_waits_for_a_long_prefix_that_is_being_written() -> None:
    shared = prompt(70)
    engine = FakeEngine(Setup(chunk=-1, context_len=96))
    for index in range(3):
        add(engine, f"r{index}", [*shared, index])
    modes = steps(engine, 3)
    assert modes[0] == (EXTEND, {"r0": 71})
    assert modes[2] == (EXTEND, {"r1": 1, "r2": 1})
    assert engine.scheduler.num_cached_tokens == 140
    assert engine.scheduler.num_prompt_tokens == 213


def test_cached_prompts_run_their_last_token_again() -> None:
    engine = FakeEngine(Setup())
    first = add(engine, "first", prompt(10), max_tokens=4)
    engine.run()
    again = add(engine, "again", prompt(10))
    longer = add(engine, "longer", [*first.token_ids, 3, 3])
    assert steps(engine, 1) == [(EXTEND, {"again": 1, "longer": 3})]
    assert (again.prefix_hit_len, longer.prefix_hit_len) == (9, 13)


def test_prompt_logprobs_want_every_row() -> None:
    engine = FakeEngine(Setup())
    add(engine, "first", prompt(10), max_tokens=2)
    engine.run()
    req = add(engine, "again", prompt(10), prompt_logprobs=0)
    assert steps(engine, 1) == [(EXTEND, {"again": 10})]
    assert req.prefix_hit_len == 0


def test_tokens_past_the_cut_leave_nothing() -> None:
    engine = FakeEngine(Setup(max_nodes=4))
    req = add(engine, "r", prompt(4), max_tokens=3, logprobs=0)
    scheduler = engine.scheduler
    batch = scheduler.schedule()
    assert batch is not None
    first = TokenLogprob(5, -1.0)
    scheduler.commit_prefill(batch, PrefillResult([5], [first], [[]]))
    batch = scheduler.schedule()
    assert batch is not None
    run = [TokenLogprob(token, -2.0) for token in (6, 7, 8, 9)]
    result = VerifyResult([[6, 7, 8, 9]], [3], [3], None, [run])
    scheduler.commit_round(batch.reqs, result)
    assert req.output_ids == [5, 6, 7]
    assert req.logprobs == [first, *run[:2]]
    assert req.spec.histogram == [0, 1]
    assert (scheduler.spec_totals.num_accepted_tokens, scheduler.num_generated_tokens) == (1, 3)
    assert scheduler.ledger.cache.evictable_size == 4 + 2, "prompt, and all output but the last"


def test_round_limit_follows_tokens_and_memory() -> None:
    engine = FakeEngine(Setup(num_slots=24, chunk=-1, max_nodes=8))
    req = add(engine, "r", prompt(4), max_tokens=6)
    engine.step()
    engine.scheduler.schedule()
    assert engine.scheduler.round_limit(req) == 5
    engine.scheduler.abort("r")
    long = add(engine, "long", prompt(19, first=3), max_tokens=None)
    engine.step()
    engine.scheduler.schedule()
    assert engine.scheduler.round_limit(long) == 24 - 19


def test_a_request_that_outgrows_the_memory_ends_with_a_message() -> None:
    engine = FakeEngine(Setup(num_slots=24, max_nodes=3))
    req = add(engine, "r", prompt(10), max_tokens=None)
    engine.run()
    assert req.finish_reason is not None
    assert req.finish_reason.kind == "length"
    assert "--max-total-tokens" in str(req.finish_reason.message)
    assert req.seq_len == 24 + 1, "every slot was used, and the last token needs none"


def test_a_retracted_request_that_outgrew_the_memory_ends_too() -> None:
    engine = FakeEngine(Setup(num_slots=24))
    req = add(engine, "r", prompt(10), max_tokens=None)
    for _ in range(14):
        engine.step()
    assert req.seq_len == 24
    engine.scheduler.lifecycle.retract(req)
    req.output_ids.append(1)
    engine.run()
    assert req.finish_reason is not None
    assert "--max-total-tokens" in str(req.finish_reason.message)


@pytest.mark.parametrize("num_slots", [48, 49])
def test_the_newest_request_is_retracted_and_comes_back(num_slots: int) -> None:
    """One slot more or less decides which of the two asks in vain first."""
    engine = FakeEngine(Setup(num_slots=num_slots))
    old = add(engine, "old", prompt(8), max_tokens=30)
    engine.step()
    new = add(engine, "new", prompt(8, first=9), max_tokens=30)
    late = add(engine, "late", prompt(8, first=5), max_tokens=1)
    while not engine.scheduler.num_retractions:
        engine.step()
    assert (old.num_retractions, new.num_retractions) == (0, 1)
    assert new.output_ids
    assert new in engine.scheduler.take_released()
    assert engine.scheduler.queues.waiting[0] is new
    engine.run()
    assert old.finish_time is not None
    assert new.finish_time is not None
    assert old.finish_time < new.finish_time
    assert late.is_finished


def test_retracted_request_tells_its_prompt_and_counts_its_cached_tokens_once() -> None:
    engine = FakeEngine(Setup(chunk=4))
    req = add(engine, "r", prompt(10), prompt_logprobs=0)
    engine.step()
    req.prompt_logprobs.append(TokenLogprob(1, -1.0))
    engine.scheduler.lifecycle.retract(req)
    assert not req.prompt_logprobs, "its prompt runs again"
    for _ in range(3):
        engine.step()
    req.prompt_logprobs.append(TokenLogprob(1, -1.0))
    engine.scheduler.lifecycle.retract(req)
    assert req.prompt_logprobs, "with an output it does not"
    engine.step()
    assert (req.kv_len, req.prefix_hit_len, engine.scheduler.num_prompt_tokens) == (10, 0, 10)


def test_demand_grows_with_retractions_and_decays_with_rounds_to_a_tenth() -> None:
    engine = FakeEngine(Setup(num_slots=48))
    demand = engine.scheduler.admission.demand
    for number in range(2):
        add(engine, f"r{number}", prompt(8, first=1 + 8 * number), max_tokens=30)
    steps(engine, 3)
    assert demand.share < 0.5
    while not engine.scheduler.num_retractions:
        before = demand.share
        engine.step()
    assert demand.share > before
    for _ in range(1000):
        demand.decay()
    assert demand.share == 0.1


def test_no_round_follows_while_the_scheduler_holds() -> None:
    engine = FakeEngine(Setup())
    req = add(engine, "r", prompt(4))
    engine.step()
    assert engine.scheduler.follow([req], 2) == [req]
    engine.scheduler.holds = True
    assert engine.scheduler.follow([req], 2) == []


def test_slots_reserved_ahead_are_taken_back_before_anyone_is_retracted() -> None:
    engine = FakeEngine(Setup(num_slots=160, context_len=140, chunk=-1))
    ahead = add(engine, "ahead", prompt(2), max_tokens=70)
    steps(engine, 3)
    assert ahead.reserved_len == 3 + 1 + 64
    grows = add(engine, "grows", prompt(90, first=5), max_tokens=10)
    engine.scheduler.admission.demand.share = 0.1
    while not grows.is_finished:
        engine.step()
    assert ahead.reserved_len < 3 + 1 + 64
    assert engine.scheduler.num_retractions == 0


def test_a_steady_round_writes_no_rows() -> None:
    engine = FakeEngine(Setup(num_slots=4096, context_len=512, max_nodes=4))
    add(engine, "r", prompt(4), max_tokens=60)
    engine.step()
    req = engine.scheduler.queues.running[0]
    assert req.reserved_len == 4 + 4, "its first round asks for nothing"
    steps(engine, 2)
    reserved = req.reserved_len
    while not req.is_finished:
        assert req.reserved_len == reserved
        engine.step()


def test_a_prompt_that_fills_the_memory_starts_without_its_round() -> None:
    engine = FakeEngine(Setup(num_slots=42, context_len=64, max_nodes=8, chunk=-1))
    req = add(engine, "r", prompt(40), max_tokens=9)
    engine.step()
    assert (req.state, req.reserved_len) == (ReqState.RUNNING, 41)


@pytest.mark.parametrize("after", [0, 1, 3], ids=["waiting", "prefilling", "running"])
def test_abort(after: int) -> None:
    engine = FakeEngine(Setup(chunk=16))
    req = add(engine, "r", prompt(40))
    for _ in range(after):
        engine.step()
    engine.scheduler.take_changed()
    engine.scheduler.abort("r")
    engine.scheduler.abort("r")
    engine.scheduler.check_invariant()
    assert req.finish_reason is not None
    assert req.finish_reason.kind == "abort"
    assert not engine.scheduler.has_work
    assert engine.scheduler.take_changed() == [req]
    assert engine.scheduler.take_released() == [req]
    assert engine.scheduler.num_free_slots == engine.scheduler.num_slots


def test_abort_while_the_forward_runs() -> None:
    engine = FakeEngine(Setup())
    req, other = add(engine, "r", prompt(4)), add(engine, "other", prompt(4, first=9))
    engine.step()
    batch = engine.scheduler.schedule()
    assert batch is not None
    engine.scheduler.abort("r")
    result = VerifyResult([[1], [2]], [0, 0], [0, 0], None)
    engine.scheduler.commit_round(batch.reqs, result)
    engine.scheduler.check_invariant()
    assert (len(req.output_ids), len(other.output_ids)) == (1, 2)


def test_requests_that_were_given_up_are_counted_as_aborted() -> None:
    engine = FakeEngine(Setup())
    for kind in ("abort", "error", "stop", "length"):
        req = add(engine, kind, prompt(4))
        engine.scheduler.lifecycle.finish(req, FinishReason(kind))
    assert engine.scheduler.lifecycle.num_aborts == 2


def test_changed_requests_are_told_once() -> None:
    engine = FakeEngine(Setup())
    req = add(engine, "r", prompt(4), max_tokens=2)
    assert engine.scheduler.take_changed() == []
    engine.step()
    assert engine.scheduler.take_changed() == [req]
    assert engine.scheduler.take_changed() == []


@pytest.mark.parametrize(
    ("tokens", "names"),
    [
        (0, "empty"),
        (96, "--context-length"),
        (64, "--max-total-tokens"),
    ],
)
def test_prompts_that_can_never_run_are_refused(tokens: int, names: str) -> None:
    engine = FakeEngine(Setup(num_slots=64))
    with pytest.raises(RequestError, match=names):
        add(engine, "r", prompt(tokens))
    assert not engine.scheduler.has_work


def test_request_ids_are_unique() -> None:
    engine = FakeEngine(Setup())
    add(engine, "r", prompt(4))
    with pytest.raises(RequestError, match="in use"):
        add(engine, "r", prompt(4))


def test_sampling_parameters_are_refreshed_and_rebuilt() -> None:
    engine = FakeEngine(Setup())
    add(engine, "r", prompt(4), temperature=1.0, presence_penalty=1.0)
    engine.step()
    first, second = engine.step(), engine.step()
    assert first is not None
    assert second is not None
    assert first.sampling is second.sampling
    assert second.sampling.output_lens == [2]
    add(engine, "other", prompt(4, first=9))
    engine.step()
    third = engine.step()
    assert third is not None
    assert third.sampling.output_lens == [3, 1]


@pytest.mark.parametrize("field", ["reserved_len", "kv_len", "row", "page"])
def test_the_invariant_sees_leaks(field: str) -> None:
    engine = FakeEngine(Setup(page_size=16))
    req = add(engine, "r", prompt(20))
    engine.step()
    if field == "row":
        engine.scheduler.ledger.rows.alloc()
    elif field == "page":
        engine.scheduler.ledger.allocator.alloc_pages(1)
    else:
        setattr(req, field, getattr(req, field) - 16)
    with pytest.raises(InvariantError):
        engine.scheduler.check_invariant()


def test_a_full_cache_does_not_make_every_round_ask_for_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the cache would give up is reserved ahead like what is free."""
    engine = FakeEngine(Setup(num_slots=1000, context_len=300, rows=4))
    ledger = engine.scheduler.ledger
    for number in range(8):
        add(engine, f"old {number}", prompt(150, first=number), max_tokens=40)
        while engine.scheduler.has_work:
            engine.step()
    assert ledger.allocator.available < 300
    add(engine, "a", prompt(5, first=9), max_tokens=150)
    add(engine, "b", prompt(5, first=10), max_tokens=150)
    engine.step()
    asked = asks(engine, monkeypatch)
    while engine.scheduler.has_work:
        engine.step()
    assert 2 <= len(asked) <= 10
    engine.scheduler.check_invariant()


@pytest.mark.parametrize("rows", [8, 1])
def test_requests_beside_each_other_ask_for_slots_at_once(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However far each has come. Each time the device is sent what was given out."""
    engine = FakeEngine(Setup(num_slots=8192, context_len=600, rows=8))
    for number in range(rows):
        add(engine, str(number), prompt(5, first=number), max_tokens=400)
        steps(engine, 3)
    asked = asks(engine, monkeypatch)
    steps(engine, 320)
    assert 2 <= len(asked) <= 1 + 320 // 32
    engine.scheduler.check_invariant()


def test_nobody_is_retracted_for_slots_ahead() -> None:
    """Pages are larger than what is reserved past a round: two requests take the last ones, and the
    third has room for a while."""
    engine = FakeEngine(Setup(num_slots=5 * 256, context_len=768, page_size=256, chunk=-1))
    engine.scheduler.admission.demand.share = 0.05
    for name, count, most in (("a", 221, 45), ("b", 221, 45), ("c", 200, 150)):
        add(engine, name, prompt(count, first=ord(name) % 7), max_tokens=most)
    engine.run()
    assert engine.scheduler.num_retractions == 0


def asks(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Filled with the pages that are asked for, each time that some are."""
    asked: list[int] = []
    allocator = engine.scheduler.ledger.allocator
    alloc = allocator.alloc_pages
    monkeypatch.setattr(
        allocator, "alloc_pages", lambda count: (asked.append(count), alloc(count))[1]
    )
    return asked
