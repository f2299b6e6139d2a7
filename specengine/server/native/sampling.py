"""`sampling_params` of /generate, by SGLang's names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field, ValidationError

from specengine.core.errors import RequestError
from specengine.core.grammar import GrammarSpec
from specengine.core.sampling import SamplingParams
from specengine.server.errors import ApiError, of_validation
from specengine.server.fields import CommonSampling

PARAMS = "sampling_params"
# SamplingParams by SGLang's names, where these are others.
_RENAMED = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "sampling_seed": "seed",
}
_SGLANG_NAMES = {ours: theirs for theirs, ours in _RENAMED.items()}


class NativeSampling(CommonSampling):
    """One form of json_schema, regex and ebnf may be asked for."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "custom_params": (),
        "spaces_between_special_tokens": (True,),
        "stop_regex": ([], ""),
        "stream_interval": (1,),
        "structural_tag": (),
    }

    instead: ClassVar[dict[str, str]] = _SGLANG_NAMES

    max_new_tokens: int | None = 128
    min_new_tokens: int | None = None
    no_stop_trim: bool | None = Field(default=None, description="keep the stop string in the text")
    sampling_seed: int | None = None
    n: int | None = Field(default=None, ge=1)
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None

    @property
    def is_prompt_only(self) -> bool:
        """Nothing is to be generated: the prompt is scored."""
        return self.max_new_tokens == 0

    def params(self, place: str = PARAMS) -> SamplingParams:
        """Raises RequestError, whose param lies in `place`, where this is in the body."""
        try:
            given = self.model_dump(exclude={"json_schema", "regex", "ebnf"}, exclude_none=True)
            renamed = {_RENAMED.get(name, name): value for name, value in given.items()}
            limit = 1 if self.is_prompt_only else self.max_new_tokens
            renamed |= {"max_tokens": limit, "grammar": self._grammar(place)}
            return SamplingParams(**renamed)
        except RequestError as error:
            raise _of_params(error, place) from None

    def _grammar(self, place: str) -> GrammarSpec | None:
        asked = {name: getattr(self, name) for name in ("json_schema", "regex", "ebnf")}
        asked = {name: text for name, text in asked.items() if text is not None}
        if len(asked) > 1:
            names = " and ".join(asked)
            raise RequestError(f"{names} both ask for a form; give one of them", names.split()[-1])
        if self.json_schema is not None:
            return GrammarSpec.json_schema(_schema(self.json_schema), f"{place}.json_schema")
        if self.regex is not None:
            return GrammarSpec.regex(self.regex, f"{place}.regex")
        return None if self.ebnf is None else GrammarSpec.ebnf(self.ebnf, f"{place}.ebnf")


def as_samplings(value: Any) -> Any:
    """The JSON of one, or of a list of them -> NativeSampling, or a list. null is all defaults.
    Raises ApiError or RequestError that names the entry."""
    if isinstance(value, list):
        return [_sampling(one, f"{PARAMS}[{number}]") for number, one in enumerate(value)]
    return NativeSampling() if value is None else _sampling(value, PARAMS)


def _sampling(value: Any, place: str) -> NativeSampling:
    try:
        return NativeSampling.model_validate(value)
    except ValidationError as error:
        raise of_validation(error.errors()[0], (place,)) from None
    except RequestError as error:
        raise _of_params(error, place) from None
    except ApiError as error:
        raise replace(error, param=f"{place}.{error.param}") from None


def _schema(text: str) -> dict[str, Any] | str:
    """SGLang writes "$$ANY$$" for any JSON object."""
    return {"type": "object"} if text == "$$ANY$$" else text


def _of_params(error: RequestError, place: str) -> RequestError:
    """The same error, under the names of this endpoint."""
    param = error.param or ""
    if param.startswith(PARAMS):
        return error
    message = str(error)
    for ours, theirs in _SGLANG_NAMES.items():
        message = message.replace(ours, theirs)
    return RequestError(message, f"{place}.{_SGLANG_NAMES.get(param, param)}".removesuffix("."))
