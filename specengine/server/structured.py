"""Fields that ask for output of a certain form."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from specengine.core.errors import RequestError
from specengine.core.grammar import GrammarSpec
from specengine.server.strict import Strict

FORMAT, OUTPUTS = "response_format", "structured_outputs"


class JsonSchemaFormat(Strict):
    """The output follows the schema whether it is called strict or not."""

    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = Field(default=None, description="accepted; nothing depends on it")
    strict: bool | None = Field(default=None, description="accepted; it always is")


class ResponseFormat(Strict):
    """OpenAI's field."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def grammar(self) -> GrammarSpec | None:
        """Raises RequestError where type and json_schema do not belong together."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            message = f"{FORMAT}.json_schema belongs with the type json_schema, and with it alone"
            raise RequestError(message, f"{FORMAT}.json_schema")
        if self.json_schema is not None:
            return GrammarSpec.json_schema(self.json_schema.schema_, FORMAT)
        return GrammarSpec.json_object(FORMAT) if self.type == "json_object" else None


class StructuredOutputs(Strict):
    """vLLM's field: exactly one of these. json is a schema, as an object or as text."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar_: str | None = Field(default=None, alias="grammar", description="Lark or GBNF")

    def grammar(self) -> GrammarSpec:
        """Raises RequestError unless exactly one form is asked for."""
        asked = []
        if self.json_ is not None:
            asked.append(GrammarSpec.json_schema(self.json_, f"{OUTPUTS}.json"))
        if self.json_object:
            asked.append(GrammarSpec.json_object(f"{OUTPUTS}.json_object"))
        if self.regex is not None:
            asked.append(GrammarSpec.regex(self.regex, f"{OUTPUTS}.regex"))
        if self.choice is not None:
            asked.append(GrammarSpec.choice(self.choice, f"{OUTPUTS}.choice"))
        if self.grammar_ is not None:
            asked.append(GrammarSpec.ebnf(self.grammar_, f"{OUTPUTS}.grammar"))
        if len(asked) != 1:
            message = f"{OUTPUTS} takes one of json, json_object, regex, choice and grammar"
            raise RequestError(f"{message}; {len(asked)} are given", OUTPUTS)
        return asked[0]


FORMS = tuple(one.alias or name for name, one in StructuredOutputs.model_fields.items())
