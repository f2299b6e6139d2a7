"""Parts of a server of several processes, without any."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import zmq

from specengine.cli.serve_process import receive_start
from specengine.core.config import EngineConfig, ServerConfig
from specengine.core.errors import ConfigError, EngineStoppedError, RequestError
from specengine.core.grammar import GrammarSpec
from specengine.core.sampling import SamplingParams, SpecControl
from specengine.engine.serving.messages import Generate, Request
from specengine.server.listening import MOST_KEY
from specengine.server.processes.acceptor import FILLED, choose
from specengine.server.processes.alive import Alive
from specengine.server.processes.channel import (
    Beat,
    Channel,
    Connection,
    EngineInfo,
    LoadFailed,
    Received,
    StartFrontEnd,
    channel_pair,
    messages_of,
)
from specengine.server.processes.children import LONGEST_PAUSE, Child, Restarts
from specengine.server.processes.front_end import limits_of, load_tokenizer
from specengine.server.processes.remote import RemoteEngine
from specengine.server.processes.supervisor import num_workers
from tests.server.conftest import make_tokenizer


def test_few_connections_share_a_front_end_and_many_are_spread() -> None:
    children = [Child(name, cast(Any, None), is_up=name != "down") for name in ("a", "b", "down")]
    placed = []
    for _ in range(4 * FILLED):
        chosen = choose(children)
        assert chosen is not None
        chosen.num_open += 1
        placed.append(chosen.name)
    assert placed[:FILLED] == ["a"] * FILLED
    assert placed[FILLED : 2 * FILLED] == ["b"] * FILLED
    assert [one.num_open for one in children] == [2 * FILLED, 2 * FILLED, 0]
    assert choose(children[2:]) is None


def test_connections_go_to_front_ends_that_have_loaded_where_there_are_any() -> None:
    loading, serving = (Child(name, cast(Any, None), is_up=True) for name in ("a", "b"))
    assert choose([loading, serving]) is loading
    serving.serves = True
    loading.num_open, serving.num_open = 1, FILLED
    assert choose([loading, serving]) is serving
    serving.gone()
    assert choose([loading, serving]) is loading


def test_pauses_grow_until_the_server_gives_up() -> None:
    restarts = Restarts(8)
    pauses = [restarts.pause("a front end") for _ in range(8)]
    assert pauses[:4] == [0.5, 1.0, 2.0, 4.0]
    assert pauses[-1] == LONGEST_PAUSE
    with pytest.raises(EngineStoppedError, match="a front end has ended 9 times"):
        restarts.pause("a front end")


def test_front_ends_by_cores() -> None:
    assert [num_workers(None, cores) for cores in (1, 2, 4, 8, 16, 128)] == [1, 1, 1, 3, 7, 8]
    assert [num_workers(asked, 64) for asked in (0, 1, 30)] == [0, 1, 30]


def test_settings_of_processes_are_checked() -> None:
    for wrong in ({"api_workers": -1}, {"watchdog_timeout": -1.0}, {"stream_interval": -0.1}):
        with pytest.raises(ConfigError, match="must be at least 0"):
            ServerConfig(**cast(Any, wrong))


def test_messages_and_descriptors_arrive_in_order_beyond_what_the_socket_holds() -> None:
    async def run() -> list[Any]:
        ours, theirs = channel_pair()
        heard: list[Received] = []
        ended = asyncio.Event()
        mailbox = ours.watched(heard.append, ended.set)
        other = Channel(theirs).watched(heard.append, ended.set)
        pairs = [socket.socketpair() for _ in range(300)]
        for number, (one, _) in enumerate(pairs):
            mailbox.send(Connection(is_surplus=number % 2 == 1), one)
            mailbox.send(Beat(number))
            one.close()  # a copy is on its way
        while len(heard) < 600:
            await asyncio.sleep(0.001)
        for number, (_, far) in enumerate(pairs):
            arrived = heard[2 * number]
            assert arrived.message == Connection(number % 2 == 1)
            with socket.socket(fileno=arrived.descriptors[0]) as near, far:
                assert not near.get_inheritable()
                near.sendall(b"x")
                assert far.recv(1) == b"x"
        mailbox.close()
        await ended.wait()  # the other side notices
        other.close()
        return [one.message for one in heard[1::2]]

    assert asyncio.run(run()) == [Beat(number) for number in range(300)]


def test_keys_of_many_more_bytes_than_a_message_reach_a_front_end() -> None:
    keys = [f"key-{number}-{'é' * 20}" for number in range(10_000)] + ["k" * MOST_KEY]
    start = StartFrontEnd(EngineConfig(), "a", 0, 1, [])

    async def run() -> Any:
        ours, theirs = channel_pair()
        mailbox = ours.watched(lambda _: None, lambda: None)
        for one in (*messages_of(keys), start):
            mailbox.send(one)
        found = await asyncio.to_thread(receive_start, Channel(theirs))
        mailbox.close()
        theirs.close()
        return found

    assert asyncio.run(run()) == (start, keys)
    assert [*messages_of([])] == []


def test_engine_is_described_by_its_parts() -> None:
    parts: Any = SimpleNamespace(
        model_name="m",
        context_length=200,
        vocab_size=257,
        pooling=object(),
        config=EngineConfig(),
        sampling_defaults={"top_p": 0.5},
    )
    place: Any = {"endpoint": "ipc://x", "tokenizer": "folder", "number": 3}
    info = EngineInfo.of(parts, **place)
    assert info == EngineInfo(
        **place,
        model_name="m",
        context_length=200,
        vocab_size=257,
        is_embedding=True,
        config=parts.config,
        sampling_defaults=parts.sampling_defaults,
    )
    parts.pooling = None
    plain = EngineInfo.of(parts)
    assert (plain.is_embedding, plain.endpoint, plain.tokenizer, plain.number) == (False, "", "", 0)


def test_sampling_defaults_reach_a_front_end_as_the_model_has_them() -> None:
    """A whole number that became 20.0 on the way would be no top_k."""
    said: dict[str, Any] = {"top_k": 20, "temperature": 0.6}
    info = EngineInfo("", "", "m", 9, 9, False, EngineConfig(), sampling_defaults=said)
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(info), type=EngineInfo)
    values: dict[str, Any] = {**received.sampling_defaults}
    found = SamplingParams(**values)
    assert (found.top_k, found.temperature) == (20, 0.6)


def test_failure_to_load_keeps_its_class() -> None:
    error = LoadFailed("ConfigError", "no such flag").error()
    assert isinstance(error, ConfigError)
    assert str(error) == "no such flag"


def test_beats_are_seen_by_another_process(tmp_path: Path) -> None:
    path = str(tmp_path / "alive")
    writer, reader = Alive(path), Alive(path)
    writer.beat()
    child = os.fork()
    if child == 0:
        os._exit(0 if reader.age() < 5 else 1)
    assert os.waitpid(child, 0)[1] == 0
    for one in (writer, reader):
        one.close()


def test_buffered_bytes_are_divided_but_leave_room_for_one_body() -> None:
    config = EngineConfig()
    limits = [
        limits_of(StartFrontEnd(config, "a", 0, count, [])).max_buffered_bytes
        for count in (1, 4, 1000)
    ]
    assert limits == [256 * 2**20, 64 * 2**20, config.limits.max_body_bytes]


def test_tokenizer_is_the_same_in_a_front_end(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    again = load_tokenizer(str(tmp_path / "tokenizer"))
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert again.chat_template == tokenizer.chat_template
    assert again.special_tokens_map == tokenizer.special_tokens_map
    assert len(again) == len(tokenizer)


HUGE = 10**30
SENDABLE = [
    SamplingParams(max_tokens=HUGE, top_k=HUGE, speculative=SpecControl(num_steps=HUGE)),
    SamplingParams(temperature=HUGE, stop=("a", "\ud800")),
    SamplingParams(temperature=2**200),
]


@pytest.mark.parametrize("sampling", SENDABLE)
def test_numbers_and_texts_beyond_messagepack_are_served(
    sampling: SamplingParams, tmp_path: Path
) -> None:
    async def run() -> SamplingParams:
        engine = remote(tmp_path)
        found = engine._sendable(sampling)
        engine._encoder.encode(found)
        engine.shutdown()
        return found

    found = asyncio.run(run())
    assert found.max_tokens in (200, 128)
    assert set(found.stop) <= {"a"}


def test_what_a_message_carries_is_sent_as_it_is(tmp_path: Path) -> None:
    async def run() -> None:
        engine, asked = remote(tmp_path), SamplingParams(max_tokens=5, temperature=0.5, stop="a")
        assert engine._sendable(asked) is asked
        engine.shutdown()

    asyncio.run(run())


def remote(folder: Path) -> RemoteEngine:
    endpoint = f"ipc://{folder}/engine"
    info = EngineInfo(endpoint, str(folder), "fake", 200, 257, False, EngineConfig())
    return RemoteEngine(info, make_tokenizer(), "front-end-0")


@pytest.mark.parametrize(
    ("prompt", "sampling", "param"),
    [
        ([HUGE], SamplingParams(), "prompt"),
        ([1], SamplingParams(stop_token_ids=(HUGE,)), "stop_token_ids"),
        ([1], SamplingParams(grammar=GrammarSpec.regex("\ud800", "field")), "field"),
    ],
)
def test_what_no_message_carries_is_refused_by_name(
    prompt: list[int], sampling: SamplingParams, param: str, tmp_path: Path
) -> None:
    async def run() -> None:
        engine = remote(tmp_path)
        try:
            async for _ in engine.generate(prompt, sampling, "a"):
                pass
        finally:
            engine.shutdown()

    with pytest.raises(RequestError) as caught:
        asyncio.run(run())
    assert caught.value.param == param


def test_prompt_to_embed_that_no_message_carries_is_refused_by_name(tmp_path: Path) -> None:
    async def run() -> None:
        engine = remote(tmp_path)
        try:
            await engine.embed([HUGE], "a")
        finally:
            engine.shutdown()

    with pytest.raises(RequestError, match="prompt token ids") as caught:
        asyncio.run(run())
    assert caught.value.param == "prompt"


def test_requests_of_one_turn_reach_the_engine_in_one_go_and_in_order(tmp_path: Path) -> None:
    async def run() -> list[str]:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.bind(f"ipc://{tmp_path}/engine")
            engine = remote(tmp_path)
            for rid in ("a", "b"):
                engine._post(Generate(rid, 0, [1], SamplingParams(), True))
            told = [decode(engine._outgoing[0])]  # nothing has left so far
            assert len(engine._outgoing) == 3
            await asyncio.sleep(0)
            assert not engine._outgoing
            told += [decode(router.recv_multipart()[1]) for _ in range(3)]
            engine.shutdown()
        return [getattr(one, "rid", "hello") for one in told]

    decode = msgspec.msgpack.Decoder(Request).decode
    assert asyncio.run(run()) == ["hello", "hello", "a", "b"]


def test_engine_that_has_ended_takes_no_requests(tmp_path: Path) -> None:
    async def run() -> None:
        engine = remote(tmp_path)
        assert engine.is_ready
        engine.end("it is gone")
        assert not engine.is_ready
        with pytest.raises(EngineStoppedError, match="it is gone"):
            await anext(engine.generate([1], SamplingParams(), "a"))

    asyncio.run(run())
