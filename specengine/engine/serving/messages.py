"""The messages between an engine and its callers. Between processes they travel as MessagePack,
never as pickle; in one process the objects themselves are handed over."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from specengine.core.errors import (
    ConfigError,
    EngineAsleepError,
    EngineStoppedError,
    ModelLoadError,
    OutOfMemoryError,
    QueueFullError,
    RequestError,
    SpecEngineError,
)
from specengine.core.request import FinishReason, TokenLogprob
from specengine.core.sampling import SamplingParams
from specengine.core.spec_stats import SpecStats
from specengine.engine.outputs import RequestTimes


class Hello(Struct, tag="hello"):
    """The first message of a front end."""


class Generate(Struct, tag="generate"):
    """A prompt to complete. stream: a number that no open choice of this front end has; choice k of
    n is called stream + k in what comes back. streams: hand tokens out as they come. embeds: the
    prompt's vector is wanted, not what follows it."""

    rid: str
    stream: int
    prompt_ids: list[int]
    sampling: SamplingParams
    streams: bool
    embeds: bool = False


class Abort(Struct, tag="abort"):
    """The caller of this request has gone. stream: of its first choice."""

    stream: int


class Ask(Struct, tag="ask"):
    """A call of one of the host's operations (host.py), which is answered between two steps."""

    number: int
    what: str
    arguments: dict[str, Any]


Request = Hello | Generate | Abort | Ask


class Beginning(Struct):
    """What is known of a choice when its first tokens are."""

    num_cached_tokens: int
    times: RequestTimes
    prompt_logprobs: list[TokenLogprob | None]


class Ending(Struct):
    """What is known of a choice when it has ended."""

    finish_reason: FinishReason
    times: RequestTimes
    spec: SpecStats
    embedding: list[float] | None = None


class Detail(Struct):
    """What a choice gained beside tokens. logprobs: of new tokens, where they were asked for."""

    stream: int
    logprobs: list[TokenLogprob]
    beginning: Beginning | None
    ending: Ending | None


class Gained(Struct, tag="gained"):
    """What the choices of one front end gained, in one step or in several. tokens: by stream."""

    tokens: dict[int, list[int]]
    details: list[Detail]


class Failure(Struct):
    """An error of one of ERRORS. kind: its name there."""

    kind: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: SpecEngineError) -> Failure:
        return cls(kind_of(error), str(error), getattr(error, "param", None))

    def error(self) -> SpecEngineError:
        if self.kind == RequestError.__name__:
            return RequestError(self.message, self.param)
        return ERRORS[self.kind](self.message)


class Refused(Struct, tag="refused"):
    """The request is not served."""

    stream: int
    failure: Failure

    @classmethod
    def of(cls, stream: int, error: SpecEngineError) -> Refused:
        return cls(stream, Failure.of(error))


class Answer(Struct, tag="answer"):
    """result: MessagePack; nil where the operation failed."""

    number: int
    result: msgspec.Raw
    failure: Failure | None = None


Reply = Gained | Refused | Answer

_ERRORS = (
    *(SpecEngineError, RequestError, QueueFullError, EngineStoppedError, EngineAsleepError),
    *(ConfigError, ModelLoadError, OutOfMemoryError),
)
ERRORS: dict[str, type[SpecEngineError]] = {one.__name__: one for one in _ERRORS}


def kind_of(error: SpecEngineError) -> str:
    """The name of its class, or of the nearest one in ERRORS."""
    return next(one.__name__ for one in type(error).__mro__ if one.__name__ in ERRORS)
