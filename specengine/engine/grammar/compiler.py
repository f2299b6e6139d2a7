"""Grammar texts into states that requests follow, by llguidance."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from specengine.core.errors import RequestError
from specengine.core.grammar import WHITESPACE, GrammarSpec
from specengine.engine.grammar.state import LlguidanceState
from specengine.engine.tokens import encode_text, vocabulary_of

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# Compiled grammars kept. One that many requests have followed may hold some megabytes.
MAX_KEPT = 64

_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


class GrammarCompiler:
    """Compiles each grammar once. Safe to call from any thread.

    tokenizer: transformers' fast tokenizer. eos_ids: the tokens that end a text; they are allowed
    where a grammar can end.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: frozenset[int]) -> None:
        ends = sorted(token for token in eos_ids if token < vocab_size)
        self._source = TokenBytes(tokenizer, vocab_size, ends)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled = lru_cache(MAX_KEPT)(self._compile)

    def start(self, spec: GrammarSpec) -> LlguidanceState:
        """A state at the beginning of the grammar. The first grammar of all takes about a second,
        every new one from one to hundreds of milliseconds.

        Raises RequestError for a grammar that does not compile, where llguidance is missing, and
        for a model without an end-of-text token.
        """
        return self._compiled(spec).fork()

    def _compile(self, spec: GrammarSpec) -> LlguidanceState:
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise RequestError(
                f"{spec.param} needs llguidance, which is not installed; "
                "pip install 'specengine[grammar]'",
                spec.param,
            ) from error
        if not self._source.eos_token_ids:
            raise RequestError(
                f"{spec.param} needs a model with an end-of-text token, and this one has none",
                spec.param,
            )
        try:
            matcher = LLMatcher(self._get_tokenizer(), _definition(spec), log_level=0)
        except ValueError as error:
            raise _refusal(spec, str(error)) from error
        if matcher.is_error():
            raise _refusal(spec, matcher.get_error())
        return LlguidanceState(matcher)

    def _get_tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        with self._lock:
            if self._tokenizer is None:
                wrapper = TokenizerWrapper(self._source.load())
                self._tokenizer = LLTokenizer(wrapper, eos_token=self._source.eos_token_ids)
            return self._tokenizer


class TokenBytes:
    """A vocabulary as llguidance reads one: the bytes that the detokenizer turns each token into,
    so that the text a user sees is the text that the grammar saw."""

    bos_token_id = None

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: list[int]) -> None:
        self.eos_token_ids = eos_token_ids
        self.tokens: Sequence[bytes] = ()
        self.special_token_ids: list[int] = []
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    @property
    def eos_token_id(self) -> int:
        return self.eos_token_ids[0]

    def load(self) -> TokenBytes:
        vocabulary = vocabulary_of(self._tokenizer)
        self.tokens = [vocabulary.bytes_of(token) for token in range(self._vocab_size)]
        special = vocabulary.special_ids.union(self.eos_token_ids)
        self.special_token_ids = sorted(token for token in special if token < self._vocab_size)
        return self

    def __call__(self, text: str) -> list[int]:
        return encode_text(self._tokenizer, text, add_special_tokens=False)


def _refusal(spec: GrammarSpec, reason: str) -> RequestError:
    return RequestError(f"{spec.param} does not compile: {reason.strip()}", spec.param)


def _definition(spec: GrammarSpec) -> str:
    """In llguidance's own terms. Raises ValueError."""
    if spec.frame is None:
        return _body(spec)
    body = _body(spec)  # Lark, or JSON: {"grammars": [...]}
    inner = json.loads(body)["grammars"][0] if body.startswith("{") else {"lark_grammar": body}
    frame = {"name": "frame", "lark_grammar": spec.frame}
    return json.dumps({"grammars": [frame, inner | {"name": "body"}]})


def _body(spec: GrammarSpec) -> str:
    from llguidance import LLMatcher, grammar_from

    if spec.kind in ("json_schema", "json_object"):
        schema = spec.text if spec.kind == "json_schema" else '{"type": "object"}'
        return LLMatcher.grammar_from_json_schema(
            schema, defaults={"whitespace_pattern": WHITESPACE}
        )
    if spec.kind == "ebnf":
        return grammar_from("gbnf" if _GBNF_RULE.search(spec.text) else "lark", spec.text)
    if spec.kind == "regex":
        return grammar_from("regex", spec.text)
    return grammar_from("choice", spec.text)
