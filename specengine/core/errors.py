"""Errors that a user sees. Each message says what is wrong and what to do about it."""

from __future__ import annotations


class SpecEngineError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(SpecEngineError):
    """A flag, environment variable, configuration key or combination of them is wrong."""


class ModelLoadError(SpecEngineError):
    """A model cannot be found, read, or does not fit its declared architecture."""


class OutOfMemoryError(SpecEngineError):
    """The memory plan does not fit; the message names the flag and a value that fits."""


class RequestError(SpecEngineError):
    """A request is invalid or cannot be served (HTTP 400). `param` names the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PlanMismatchError(SpecEngineError):
    """A forward was asked to run on an AttnPlan that was made for another batch."""


class GraphInputError(SpecEngineError):
    """An input of a CUDA graph is not where it was when the graph was captured. Always a bug in the
    engine."""


class InvariantError(SpecEngineError):
    """KV bookkeeping does not add up. Always a bug in the engine."""


class QueueFullError(SpecEngineError):
    """Too many requests wait already (HTTP 503)."""


class EngineStoppedError(SpecEngineError):
    """The engine has failed or is shutting down (HTTP 503)."""


class EngineAsleepError(SpecEngineError):
    """The engine has given its memory back, and serves again when it is woken (HTTP 503)."""


class DataError(SpecEngineError):
    """A data set or prompt file is missing, damaged, or does not fit what it is used with."""


class TrainingError(SpecEngineError):
    """A training run cannot go on. What it wrote before is kept."""
