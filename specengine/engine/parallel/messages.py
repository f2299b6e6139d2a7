"""What rank 0 sends to the other ranks, in MessagePack."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from specengine.core.config import EngineConfig
from specengine.core.sampling import SamplingParams


class Load(msgspec.Struct, tag=True):
    """Read the weights."""

    config: EngineConfig


class Build(msgspec.Struct, tag=True):
    """An engine on the weights that were read last; it is known by its number from now on."""

    engine: int
    config: EngineConfig


class Drop(msgspec.Struct, tag=True):
    """Let go of an engine."""

    engine: int


class Add(msgspec.Struct, tag=True):
    """Engine.add_request. sampling: with a seed."""

    engine: int
    rid: str
    prompt_ids: list[int]
    sampling: SamplingParams


class Do(msgspec.Struct, tag=True):
    """A method of the engine, beside those that have messages of their own."""

    engine: int
    method: Literal[
        "abort",
        "add_embedding",
        "give_up",
        "flush_cache",
        "update_weights",
        "finish_rounds",
        "sleep",
        "wake",
    ]
    arguments: list[Any]


class Step(msgspec.Struct, tag=True):
    """Engine.advance. digest: of all tokens that rank 0 has committed before it, which every rank
    must have."""

    engine: int
    digest: int


class Idle(msgspec.Struct, tag=True):
    """Engine.use_idle_moment."""

    engine: int
    may_capture: bool


class Call(msgspec.Struct, tag=True):
    """A function of the engine, as "module:function", with arguments by name."""

    engine: int
    place: str
    arguments: dict[str, Any]


class Decided(msgspec.Struct, tag=True):
    """What Link.decide gives."""

    numbers: list[int]


Message = Load | Build | Drop | Add | Do | Step | Idle | Call | Decided

encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Message)


def decode(data: bytes) -> Message:
    message: Message = _decoder.decode(data)
    return message
