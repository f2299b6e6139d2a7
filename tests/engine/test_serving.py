"""The engine's side and the asking side, with messages encoded as between processes."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
import pytest

from specengine.core.config import EngineConfig
from specengine.core.errors import EngineStoppedError, QueueFullError, RequestError
from specengine.core.grammar import GrammarSpec
from specengine.core.request import FinishReason, Req, TokenLogprob
from specengine.core.sampling import SamplingParams
from specengine.core.spec_stats import DepthChoice
from specengine.engine.background_capture import QuietTime
from specengine.engine.loop import Engine
from specengine.engine.outgoing import Choice
from specengine.engine.outputs import EngineStats, RequestOutput
from specengine.engine.proof.scripted_engine import Pace, ScriptedEngine
from specengine.engine.serving.host import EngineHost
from specengine.engine.serving.messages import Abort, Gained, Generate, Refused, Reply, Request
from specengine.engine.serving.outbox import Outbox
from specengine.engine.serving.streams import Streams, decode_answer
from tests.server.conftest import make_tokenizer

PARAMS = SamplingParams(max_tokens=6)


def sent(message: Any, kind: Any) -> Any:
    """As it arrives in another process."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind)


class Pair:
    """A host and one front end of it, turned by hand. takes: whether the front end does."""

    def __init__(self, interval: float = 0.0) -> None:
        self.engine = ScriptedEngine(make_tokenizer(), 256, Pace(), EngineConfig())
        self.host = EngineHost(
            cast(Engine, self.engine), lambda: None, lambda: False, interval=interval
        )
        self.replies: list[Reply] = []
        self.takes = True
        self.host.connect("front", self._send)
        self.streams = Streams(self.engine.tokenizer, self._post)

    def _send(self, reply: Reply) -> bool:
        if self.takes:
            self.replies.append(sent(reply, Reply))
        return self.takes

    def _post(self, message: Request) -> None:
        self.host.receive("front", sent(message, Request))

    def pass_on(self) -> int:
        """Hand the replies over; how many there were."""
        replies, self.replies = self.replies, []
        for one in replies:
            self.streams.receive(one)
        return len(replies)


async def gather(outputs: Any, found: list[RequestOutput]) -> None:
    async for one in outputs:
        found.append(one)  # noqa: PERF401  (as they come)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_tokens_that_wait_for_a_slow_front_end_come_as_one_output() -> None:
    pair = Pair()
    found: list[RequestOutput] = []

    async def run() -> None:
        task = asyncio.create_task(gather(pair.streams.generate([65], PARAMS, "a", True), found))
        await settle()
        pair.host.turn()
        assert pair.pass_on() == 1
        await settle()
        pair.takes = False
        for _ in range(3):
            pair.host.turn()
        assert pair.replies == []
        pair.takes = True
        pair.host.turn()
        assert pair.pass_on() == 1
        await settle()
        pair.host.turn()
        pair.pass_on()
        await task

    asyncio.run(run())
    assert [one.text_delta for one in found] == ["b", "cdef", "g"]
    assert found[-1].text == "bcdefg"
    assert found[-1].finish_reason == FinishReason("length")


def test_messages_that_wait_for_a_slow_reader_come_as_one_output() -> None:
    pair = Pair()
    found: list[RequestOutput] = []

    async def run() -> None:
        task = asyncio.create_task(gather(pair.streams.generate([65], PARAMS, "a", True), found))
        await settle()
        for _ in range(4):
            pair.host.turn()
        assert pair.pass_on() == 4
        await settle()
        pair.host.turn()
        pair.host.turn()
        pair.pass_on()
        await task

    asyncio.run(run())
    assert [one.text_delta for one in found] == ["bcde", "fg"]


def test_interval_joins_steps_but_delays_neither_first_nor_last_token() -> None:
    pair = Pair(interval=1000.0)

    async def run() -> None:
        task = asyncio.create_task(gather(pair.streams.generate([65], PARAMS, "a", True), []))
        await settle()
        counts = []
        for _ in range(6):
            pair.host.turn()
            counts.append(pair.pass_on())
        await task
        assert counts == [1, 0, 0, 0, 0, 1]

    asyncio.run(run())


def test_end_of_one_stream_leaves_the_others_waiting() -> None:
    pair = Pair(interval=1000.0)
    for number, length in enumerate([3, 6]):
        params = SamplingParams(max_tokens=length)
        pair.host.receive("front", Generate(f"{number}", number, [65], params, True))
    for _ in range(6):
        pair.host.turn()
    gained = [one.tokens for one in pair.replies if isinstance(one, Gained)]
    assert [list(one) for one in gained] == [[0, 1], [0], [1]]
    assert [len(one) for tokens in gained for one in tokens.values()] == [1, 1, 2, 5]


def test_many_streams_wait_longer_for_their_next_event() -> None:
    sent_ones: list[Gained] = []
    box = Outbox(lambda reply: bool(sent_ones.append(cast(Gained, reply))) or True, 0.002)
    choices = [choice_of() for _ in range(100)]
    for milliseconds in range(5, 40):
        for stream, choice in enumerate(choices):
            choice.req.output_ids.append(1)
            box.add(stream, choice)
        box.flush(milliseconds / 1000)
    later = [len(one.tokens[0]) for one in sent_ones[2:]]
    assert set(later) <= {10, 11}
    assert all(len(one.tokens) == 100 for one in sent_ones)


def test_front_end_that_goes_aborts_its_requests_alone() -> None:
    pair = Pair()
    pair.host.connect("other", lambda reply: True)
    params = SamplingParams(max_tokens=6, n=2)
    pair.host.receive("front", Generate("a", 0, [65], params, True))
    pair.host.receive("other", Generate("b", 0, [65], params, True))
    pair.host.turn()
    pair.host.disconnect("front")
    assert {one.rid for one in pair.engine.choices.values()} == {"b"}
    pair.host.receive("front", Generate("c", 9, [65], params, True))  # it comes too late
    assert {one.rid for one in pair.engine.choices.values()} == {"b"}


def test_aborted_request_takes_what_waits_for_its_caller_with_it() -> None:
    pair = Pair()
    pair.host.receive("front", Generate("a", 0, [65], PARAMS, True))
    pair.takes = False
    pair.host.turn()
    pair.host.receive("front", Abort(0))
    pair.takes = True
    pair.host.turn()
    assert pair.replies == []


def test_dropped_stream_is_not_sent_before_it_is_time_for_others() -> None:
    taken: list[Reply] = []
    box = Outbox(lambda reply: bool(taken.append(reply)) or True, 1.0)
    for stream in range(2):
        choice = choice_of()
        choice.req.output_ids.append(1)
        box.add(stream, choice)
    box.drop(range(1))
    assert box.flush(0.5)
    assert [list(cast(Gained, one).tokens) for one in taken] == [[1]]


def test_host_keeps_nothing_of_a_request_whose_choices_have_ended() -> None:
    pair = Pair()
    pair.host.receive("front", Generate("a", 0, [65], SamplingParams(max_tokens=1, n=2), True))
    while pair.engine.has_work:
        assert "a" in pair.host._open
        pair.host.turn()
    assert not pair.host._open
    assert not pair.host._fronts["front"].requests


def test_quiet_time_of_a_host_begins_at_the_end_of_a_step() -> None:
    now = [0.0]
    engine: Any = ScriptedEngine(make_tokenizer(), 256, Pace(), EngineConfig())
    engine.use_idle_moment = lambda may_capture, _: may_capture
    quiet = QuietTime(1.0, lambda: now[0])
    host = EngineHost(engine, lambda: None, lambda: False, prepares=True, quiet=quiet)
    host.connect("front", lambda _: True)
    host.receive("front", Generate("a", 0, [65], SamplingParams(max_tokens=1), True))
    now[0] = 10.0
    assert host.turn() == 0.0
    assert not engine.has_work
    assert host.turn() == 1.0
    now[0] = 11.0
    assert host.turn() == 0.0, "it captures"


def test_iterator_that_is_closed_aborts_its_request() -> None:
    pair = Pair()

    async def run() -> None:
        outputs: Any = pair.streams.generate([65], PARAMS, "a", True)
        task = asyncio.create_task(anext(outputs))
        await settle()
        pair.host.turn()
        pair.pass_on()
        await task
        await outputs.aclose()

    asyncio.run(run())
    assert pair.engine.num_aborts == 1
    assert not pair.engine.has_work
    assert pair.streams.is_idle


@pytest.mark.parametrize(
    "error", [RequestError("no", "prompt"), QueueFullError("full")], ids=lambda one: str(one)
)
def test_refusal_arrives_as_the_error_that_it_was(error: Exception) -> None:
    pair = Pair()

    def refuse(*_: Any) -> None:
        raise error

    pair.engine.add_request = refuse  # type: ignore[method-assign]

    async def run() -> None:
        outputs = pair.streams.generate([65], PARAMS, "a", True)
        task = asyncio.create_task(gather(outputs, []))
        await settle()
        pair.host.turn()
        pair.pass_on()
        with pytest.raises(type(error), match=str(error)) as caught:
            await task
        assert getattr(caught.value, "param", None) == getattr(error, "param", None)

    asyncio.run(run())


def test_end_of_the_engine_fails_requests_and_questions() -> None:
    pair = Pair()

    async def run() -> None:
        tasks = [
            asyncio.create_task(gather(pair.streams.generate([65], PARAMS, "a", True), [])),
            asyncio.create_task(pair.streams.ask("stats")),
        ]
        await settle()
        pair.streams.fail(lambda: EngineStoppedError("gone"))
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(one) for one in results] == ["gone", "gone"]

    asyncio.run(run())


def test_question_is_answered_between_steps() -> None:
    pair = Pair()

    async def answer(what: str) -> Any:
        task = asyncio.create_task(pair.streams.ask(what))
        await settle()
        pair.host.turn()
        pair.pass_on()
        return await task

    stats = decode_answer(asyncio.run(answer("stats")), EngineStats)
    assert stats == pair.engine.stats()
    with pytest.raises(Exception, match="this engine has no nothing"):
        asyncio.run(answer("nothing"))


def choice_of(**sampling: Any) -> Choice:
    req = Req("a#0", [1], SamplingParams(**sampling))
    return Choice(req, "a", 0, make_tokenizer(), True)


def test_logprobs_of_steps_that_were_joined_follow_their_tokens() -> None:
    sent_ones: list[Gained] = []
    box = Outbox(lambda reply: bool(sent_ones.append(sent(reply, Reply))) or True)
    choice = choice_of(logprobs=1)
    for step in range(3):
        choice.req.output_ids.append(step)
        choice.req.logprobs.append(TokenLogprob(step, float("-inf"), [(step, -1.0)]))
        box.add(7, choice)
    assert box.flush(0.0)
    (gained,) = sent_ones
    assert gained.tokens == {7: [0, 1, 2]}
    assert [one.token for detail in gained.details for one in detail.logprobs] == [0, 1, 2]
    assert box.is_empty


def test_logprobs_of_the_prompt_are_held_until_they_are_taken_and_no_longer() -> None:
    sent_ones: list[Gained] = []
    takes = False
    box = Outbox(lambda reply: takes and (bool(sent_ones.append(sent(reply, Reply))) or True))
    choice = choice_of(prompt_logprobs=1)
    found = [None, TokenLogprob(3, -0.5, [(4, -0.25)])]
    choice.req.prompt_logprobs = [*found]
    choice.req.output_ids.append(5)
    box.add(7, choice)
    assert not box.flush(0.0)
    assert choice.req.prompt_logprobs == found
    takes = True
    assert box.flush(0.0)
    (detail,) = sent_ones[0].details
    assert detail.beginning is not None
    assert detail.beginning.prompt_logprobs == found
    assert choice.req.prompt_logprobs == []


def test_sampling_and_statistics_survive_the_way() -> None:
    params = SamplingParams(
        stop=("a",),
        logit_bias={3: 1.5},
        visible_special_ids=frozenset({4}),
        grammar=GrammarSpec.regex("a+", "field"),
        logprobs=2,
    )
    message = Generate("a", 3, [1, 2], params, True)
    assert sent(message, Request) == message
    stats = EngineStats(depth=DepthChoice(2, "why", 1.5, 6), num_aborts=3)
    assert sent(stats, EngineStats) == stats
    refused = Refused.of(1, RequestError("no", "field"))
    assert isinstance(sent(refused, Reply).failure.error(), RequestError)
