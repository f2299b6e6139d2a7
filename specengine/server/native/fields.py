"""What /generate takes: SGLang's names (its document "Native APIs")."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, model_validator

from specengine.core.errors import RequestError
from specengine.core.grammar import GrammarSpec
from specengine.core.sampling import MAX_LOGPROBS, SamplingParams
from specengine.server.fields import CommonSampling, Speculative, are_tokens
from specengine.server.strict import Strict

PARAMS = "sampling_params"
# SamplingParams by SGLang's names, where these are others.
_RENAMED = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "sampling_seed": "seed",
}


class NativeSampling(CommonSampling):
    """One form of json_schema, regex and ebnf may be asked for."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "custom_params": (),
        "spaces_between_special_tokens": (True,),
        "stop_regex": (),
        "stream_interval": (1,),
        "structural_tag": (),
    }

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

    def params(self, **values: Any) -> SamplingParams:
        """Raises RequestError, whose param lies in sampling_params."""
        try:
            given = self.model_dump(exclude={"json_schema", "regex", "ebnf"}, exclude_none=True)
            renamed = {_RENAMED.get(name, name): value for name, value in given.items()}
            limit = 1 if self.is_prompt_only else self.max_new_tokens
            renamed |= {"max_tokens": limit, "grammar": self._grammar()}
            return SamplingParams(**renamed, **values)
        except RequestError as error:
            raise _of_params(error) from None

    def _grammar(self) -> GrammarSpec | None:
        asked = {name: getattr(self, name) for name in ("json_schema", "regex", "ebnf")}
        asked = {name: text for name, text in asked.items() if text is not None}
        if len(asked) > 1:
            names = " and ".join(asked)
            raise RequestError(f"{names} both ask for a form; give one of them", names.split()[-1])
        if self.json_schema is not None:
            return GrammarSpec.json_schema(_schema(self.json_schema), f"{PARAMS}.json_schema")
        if self.regex is not None:
            return GrammarSpec.regex(self.regex, f"{PARAMS}.regex")
        return None if self.ebnf is None else GrammarSpec.ebnf(self.ebnf, f"{PARAMS}.ebnf")


def _schema(text: str) -> dict[str, Any] | str:
    """SGLang writes "$$ANY$$" for any JSON object."""
    return {"type": "object"} if text == "$$ANY$$" else text


def _of_params(error: RequestError) -> RequestError:
    """The same error, under the names of this endpoint."""
    names = {ours: theirs for theirs, ours in _RENAMED.items()}
    param = error.param or ""
    if param.startswith((PARAMS, "speculative", "priority", "prompt_logprobs")):
        return error
    message = str(error)
    for ours, theirs in names.items():
        message = message.replace(ours, theirs)
    return RequestError(message, f"{PARAMS}.{names.get(param, param)}".removesuffix("."))


Ids = list[int]
_FOR_ALL = (
    *(PARAMS, "rid", "return_logprob", "logprob_start_len", "top_logprobs_num"),
    *("priority", "return_text_in_logprobs"),
)


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


class NativeRequest(Strict):
    """Either text or input_ids, one or a list of them. All share sampling_params."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        **dict.fromkeys(("audio_data", "image_data", "video_data", "input_embeds"), ()),
        **dict.fromkeys(("lora_path", "session_params", "token_ids_logprob"), ()),
        **dict.fromkeys(("custom_logit_processor", "conversation_id"), ()),
        **dict.fromkeys(("return_hidden_states", "return_routed_experts"), (False,)),
        **dict.fromkeys(("background", "no_logs", "return_bytes", "return_entropy"), (False,)),
        "modalities": (["text"], []),
        "log_metrics": (True, False),
    }

    model: str | None = Field(default=None, description="a served name")
    text: Annotated[str | list[str] | None, BeforeValidator(_texts)] = None
    input_ids: Annotated[Ids | list[Ids] | None, BeforeValidator(_ids)] = None
    sampling_params: NativeSampling = Field(default_factory=NativeSampling)
    rid: str | None = Field(default=None, max_length=128, description="for /abort_request")
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = Field(
        default=None, ge=-1, description="first prompt token that has a logprob; -1: none has"
    )
    top_logprobs_num: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    return_text_in_logprobs: bool | None = None
    priority: int | None = Field(default=None, description="the lowest is served first; else 0")
    speculative: Speculative | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_for_all(cls, data: Any) -> Any:
        """SGLang takes a list of these as well, one for each prompt."""
        for name in _FOR_ALL if isinstance(data, dict) else ():
            if isinstance(data.get(name), list):
                message = f"{name}: one holds for all prompts; send those of another apart"
                raise RequestError(message, name)
        return data

    @model_validator(mode="after")
    def _one_of_both(self) -> NativeRequest:
        if (self.text is None) == (self.input_ids is None):
            raise RequestError("give either text or input_ids", "text")
        if not self.return_logprob:
            for name in ("logprob_start_len", "top_logprobs_num"):
                if (getattr(self, name) or -1) > 0:
                    raise RequestError(f"{name} needs return_logprob to be true", name)
        return self

    @property
    def prompts(self) -> list[str | Ids]:
        given: Any = self.input_ids if self.text is None else self.text
        return list(given) if self.is_batch else [given]

    @property
    def is_batch(self) -> bool:
        """Answered with a list."""
        given = self.input_ids if self.text is None else self.text
        return isinstance(given, list) and not isinstance(given[0], int)

    @property
    def param(self) -> str:
        """The field that holds the prompts."""
        return "input_ids" if self.text is None else "text"

    def to_sampling(self) -> SamplingParams:
        values: dict[str, Any] = {"priority": self.priority or 0}
        if self.speculative is not None:
            values["speculative"] = self.speculative.control()
        if self.return_logprob:
            values["logprobs"] = self.top_logprobs_num or 0
            if self.logprob_start_len is not None and self.logprob_start_len >= 0:
                values["prompt_logprobs"] = values["logprobs"]
        return self.sampling_params.params(**values)
