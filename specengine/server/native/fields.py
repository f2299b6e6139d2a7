"""What /generate takes: SGLang's names (its document "Native APIs")."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, model_validator

from specengine.core.errors import RequestError
from specengine.core.sampling import MAX_LOGPROBS, SamplingParams
from specengine.engine.tokens import is_text
from specengine.server.fields import Speculative, are_tokens
from specengine.server.native.sampling import PARAMS, NativeSampling, as_samplings
from specengine.server.strict import Strict

Ids = list[int]
MAX_RID = 128  # characters
# Fields that take a list as well, of an entry a prompt.
PER_PROMPT = (PARAMS, "rid", "return_logprob", "logprob_start_len", "top_logprobs_num")


def _texts(value: Any) -> Any:
    is_list = isinstance(value, list) and value and all(isinstance(one, str) for one in value)
    if value is not None and not isinstance(value, str) and not is_list:
        raise ValueError("must be a text or a list of texts")
    return value


def _ids(value: Any) -> Any:
    if value is None or are_tokens(value):
        return value
    if not isinstance(value, list) or not value or not all(map(are_tokens, value)):
        raise ValueError("must be a list of token ids, or a list of such lists")
    return value


def _each(fits: Callable[[Any], bool], what: str) -> BeforeValidator:
    """One value that fits, or a list of such; null is none."""

    def check(value: Any) -> Any:
        values = value if isinstance(value, list) else [value]
        if value is not None and not all(map(fits, values)):
            raise ValueError(f"must be {what}, or a list of an entry for each prompt")
        return value

    return BeforeValidator(check)


def _is_rid(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_RID and is_text(value)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _lies_in(low: int, high: float = inf) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value <= high


def _is_list(prompts: Any) -> bool:
    """A list of prompts, not of the token ids of one."""
    return isinstance(prompts, list) and bool(prompts) and not isinstance(prompts[0], int)


class NativeRequest(Strict):
    """Either text or input_ids, one or a list of them."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        **dict.fromkeys(("audio_data", "image_data", "video_data", "input_embeds"), ()),
        **dict.fromkeys(("lora_path", "token_ids_logprob"), ("", [])),
        **dict.fromkeys(
            ("custom_logit_processor", "conversation_id", "session_id", "session_params"), ()
        ),
        **dict.fromkeys(("extra_key", "routing_key", "custom_labels", "routed_dp_rank"), ()),
        **dict.fromkeys(("return_hidden_states", "return_routed_experts"), (False,)),
        **dict.fromkeys(("background", "no_logs", "return_bytes", "return_entropy"), (False,)),
        "modalities": (["text"], []),
        "log_metrics": (True, False),
        "require_reasoning": (False,),
    }

    instead: ClassVar[dict[str, str]] = {
        **{name: f"{PARAMS}.{name}" for name in NativeSampling.model_fields},
        **{name: f"{PARAMS}.{theirs}" for name, theirs in NativeSampling.instead.items()},
        "logprobs": "return_logprob and top_logprobs_num",
        "messages": "/v1/chat/completions",
        "prompt": "text or input_ids",
    }

    model: str | None = Field(default=None, description="a served name")
    text: Annotated[str | list[str] | None, BeforeValidator(_texts)] = None
    input_ids: Annotated[Ids | list[Ids] | None, BeforeValidator(_ids)] = None
    sampling_params: Annotated[
        NativeSampling | list[NativeSampling], BeforeValidator(as_samplings)
    ] = Field(default_factory=NativeSampling)
    rid: Annotated[
        str | list[str] | None, _each(_is_rid, f"a text of at most {MAX_RID} characters")
    ] = Field(default=None, description="for /abort_request")
    stream: bool | None = None
    return_logprob: Annotated[bool | list[bool] | None, _each(_is_flag, "true or false")] = None
    logprob_start_len: Annotated[
        int | list[int] | None, _each(_lies_in(-1), "a number of at least -1")
    ] = Field(default=None, description="first prompt token that has a logprob; -1: none has")
    top_logprobs_num: Annotated[
        int | list[int] | None, _each(_lies_in(0, MAX_LOGPROBS), f"a number of 0..{MAX_LOGPROBS}")
    ] = None
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = None
    priority: int | None = Field(default=None, description="the lowest is served first; else 0")
    speculative: Speculative | None = None

    @model_validator(mode="before")
    @classmethod
    def _as_many_as_prompts(cls, data: Any) -> Any:
        """Before entries are looked at."""
        if not isinstance(data, dict):
            return data
        prompts: Any = data.get("input_ids" if data.get("text") is None else "text")
        for name in PER_PROMPT if prompts or prompts == "" else ():
            value = data.get(name)
            if isinstance(value, list) and not _is_list(prompts):
                raise RequestError(f"{name} is a list, and there is one prompt; give one", name)
            if isinstance(value, list) and len(value) != len(prompts):
                message = (
                    f"{name} has {len(value)} entries for {len(prompts)} prompts; give one for "
                    "all, or an entry for each"
                )
                raise RequestError(message, name)
        return data

    @model_validator(mode="after")
    def _fits_together(self) -> NativeRequest:
        if (self.text is None) == (self.input_ids is None):
            raise RequestError("give either text or input_ids", "text")
        for number, one in enumerate(self._of_each(PARAMS)):
            if (one.n or 1) != self.n:
                name = f"{PARAMS}[{number}].n"
                raise RequestError(f"{name}: all prompts need the same n", name)
        if isinstance(self.rid, list) and len(set(self.rid)) < len(self.rid):
            raise RequestError("rid: two prompts have the same; give each its own", "rid")
        if not any(self._of_each("return_logprob")):
            for name in ("logprob_start_len", "top_logprobs_num"):
                if any((one or -1) > 0 for one in self._of_each(name)):
                    raise RequestError(f"{name} needs return_logprob to be true", name)
        return self

    @property
    def prompts(self) -> list[str | Ids]:
        given: Any = self.input_ids if self.text is None else self.text
        return list(given) if self.is_batch else [given]

    @property
    def is_batch(self) -> bool:
        """Whether a list of prompts was given."""
        return _is_list(self.input_ids if self.text is None else self.text)

    @property
    def param(self) -> str:
        """The field that holds the prompts."""
        return "input_ids" if self.text is None else "text"

    @property
    def n(self) -> int:
        """Choices of a prompt."""
        return self._of_each(PARAMS)[0].n or 1

    @property
    def is_list(self) -> bool:
        """Answered with a list."""
        return self.is_batch or self.n > 1

    @property
    def starts(self) -> list[int | None]:
        """The first token of each prompt whose logprob is returned; None where none is."""
        pairs = zip(
            self._of_each("return_logprob"), self._of_each("logprob_start_len"), strict=True
        )
        return [start if wanted and (start or 0) >= 0 else None for wanted, start in pairs]

    @property
    def prompt_only(self) -> list[bool]:
        """Whether nothing is to be generated for a prompt."""
        return [one.is_prompt_only for one in self._of_each(PARAMS)]

    @property
    def labels(self) -> list[str | None]:
        """What the client calls each prompt; one text is for all of them."""
        return self._of_each("rid")

    def name_of(self, number: int, job: str) -> str:
        """The id of a prompt in the answer: as SGLang has it, one `rid` of a list is numbered."""
        if isinstance(self.rid, list):
            return self.rid[number]
        name = self.rid or job
        return f"{name}_{number}" if self.is_batch else name

    def to_samplings(self) -> list[SamplingParams]:
        """One a prompt. Raises RequestError."""
        given = self.sampling_params
        if isinstance(given, list):
            bases = [one.params(f"{PARAMS}[{number}]") for number, one in enumerate(given)]
        else:
            bases = [given.params()] * len(self.prompts)
        shared: dict[str, Any] = {"priority": self.priority or 0}
        if self.speculative is not None:
            shared["speculative"] = self.speculative.control()
        wanted, tops = self._of_each("return_logprob"), self._of_each("top_logprobs_num")
        samplings = []
        for base, is_wanted, top, start in zip(bases, wanted, tops, self.starts, strict=True):
            logprobs = (top or 0) if is_wanted else None
            of_prompt = None if start is None else logprobs
            samplings.append(replace(base, logprobs=logprobs, prompt_logprobs=of_prompt, **shared))
        return samplings

    def _of_each(self, name: str) -> list[Any]:
        """The values of a field of PER_PROMPT, one a prompt."""
        value = getattr(self, name)
        return value if isinstance(value, list) else [value] * len(self.prompts)
