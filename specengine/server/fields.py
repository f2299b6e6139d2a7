"""Fields that several endpoints share.

Every field is honoured or refused by name; null means a field's default, as in OpenAI's API.
Fields beyond OpenAI's (top_k, min_p, ignore_eos, ...) are those of SamplingParams.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from specengine.core.grammar import GrammarSpec
from specengine.core.sampling import SamplingParams, SpecControl
from specengine.server.strict import Strict
from specengine.server.structured import FORMS, StructuredOutputs

# Fields of SamplingParams that this API calls or counts otherwise, or that the server sets itself;
# it has all others under their names.
_OTHERWISE = {
    *("max_tokens", "logprobs", "prompt_logprobs", "grammar", "speculative"),
    "visible_special_ids",
}
_SHARED = frozenset(one.name for one in fields(SamplingParams)) - _OTHERWISE


def as_strings(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def as_bias(value: Any) -> Any:
    """JSON keys are strings; here they are token ids."""
    if not isinstance(value, dict):
        return value
    if not all(str(key).isdecimal() for key in value):
        raise ValueError("keys must be token ids")
    return {int(key): bias for key, bias in value.items()}


def is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def are_tokens(value: Any) -> bool:
    """Whether it is a list of token ids, not empty. Without a Python call for each: a body may hold
    a million."""
    return isinstance(value, list) and bool(value) and set(map(type, value)) == {int}


class Speculative(Strict):
    """How far this request may be drafted for; its answer does not depend on it."""

    enabled: bool | None = None
    num_steps: int | None = None

    def control(self) -> SpecControl:
        """Raises RequestError."""
        return SpecControl(self.enabled is not False, self.num_steps)


class CommonSampling(Strict):
    """How tokens are chosen, under names that every endpoint has."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(as_bias)] = None
    stop: Annotated[list[str] | None, BeforeValidator(as_strings)] = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None


class SamplingFields(CommonSampling):
    """How tokens are chosen and drafted: the same at every endpoint of OpenAI's kind."""

    # Names of vLLM's and SGLang's, the first with those of older releases.
    instead: ClassVar[dict[str, str]] = {
        **{f"guided_{one}": f"structured_outputs.{one}" for one in FORMS},
        "ebnf": "structured_outputs.grammar",
        "extra_body": "its fields, beside the others",
        "json_schema": "structured_outputs.json",
        "max_new_tokens": "max_tokens",
        "min_new_tokens": "min_tokens",
        "regex": "structured_outputs.regex",
        "sampling_seed": "seed",
    }

    seed: int | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: int | None = None
    structured_outputs: StructuredOutputs | None = None
    speculative: Speculative | None = None
    priority: int | None = Field(default=None, description="the lowest is served first; else 0")

    def sampling(self, defaults: Mapping[str, float], **values: Any) -> SamplingParams:
        """SamplingParams of the fields that are set, and of `values`; defaults: of those that are
        not. Raises RequestError."""
        asked = self.model_fields_set & _SHARED
        given: dict[str, Any] = {name: getattr(self, name) for name in asked}
        given["grammar"] = self.grammar()
        given["speculative"] = self.speculative and self.speculative.control()
        set_ones = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(**{**defaults, **set_ones, **values})

    def grammar(self) -> GrammarSpec | None:
        return None if self.structured_outputs is None else self.structured_outputs.grammar()
