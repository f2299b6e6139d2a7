"""Grammar texts into states that requests follow, by llguidance."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import numpy as np

from specengine.core.errors import RequestError
from specengine.core.grammar import GrammarSpec
from specengine.engine.grammar.definition import definition, shown, why_stuck
from specengine.engine.grammar.state import LlguidanceState
from specengine.engine.tokens import encode_text, vocabulary_of

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# Compiled grammars kept, and bytes of theirs.
MAX_KEPT = 64
MAX_KEPT_BYTES = 25 * 2**20
LEAST_VERSION = (1, 9)  # of llguidance, as in pyproject.toml; older ones take one end of text
# Of one that was not measured. Some regular expressions take a million times their text.
BYTES_A_CHARACTER = 50


@cache
def installed_version() -> str | None:
    """The version of llguidance that is installed; None where nothing states it."""
    try:
        return version("llguidance")
    except PackageNotFoundError:
        return None


def release_of(text: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(one) for one in re.findall(r"\d+", text)[:2])


@dataclass(frozen=True)
class Kept:
    state: LlguidanceState
    num_bytes: int


class GrammarCompiler:
    """Compiles each grammar once. Safe to call from any thread.

    tokenizer: transformers' fast tokenizer. eos_ids: the tokens that end a text; they are allowed
    where a grammar can end.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: frozenset[int]) -> None:
        ends = sorted(token for token in eos_ids if token < vocab_size)
        self._vocab_size = vocab_size
        self._source = TokenBytes(tokenizer, vocab_size, ends)
        self._lock = threading.Lock()
        self._tokenizer_lock = threading.Lock()  # held for about a second, the first time
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[GrammarSpec, Kept] = OrderedDict()

    def compiled(self, spec: GrammarSpec) -> LlguidanceState | None:
        """As `start`, where it is compiled already: a millisecond at most. Else None."""
        with self._lock:
            kept = self._compiled.get(spec)
            return None if kept is None else kept.state.fork()

    def start(self, spec: GrammarSpec, num_bytes: int = 0) -> LlguidanceState:
        """A state at the beginning of the grammar. The first grammar of all takes about a second,
        every new one from one to hundreds of milliseconds. num_bytes: that it holds compiled, where
        that was measured. One that holds half of what is kept in all is not kept.

        Raises RequestError for a grammar that does not compile, where llguidance is missing or too
        old, and for a model without an end-of-text token.
        """
        state = self.compiled(spec) or self._compile(spec)
        cost = max(num_bytes, len(spec.text) * BYTES_A_CHARACTER)
        if cost > MAX_KEPT_BYTES // 2:
            return state
        with self._lock:
            kept = self._compiled.setdefault(spec, Kept(state, cost))
            self._compiled.move_to_end(spec)
            while not self._fits():
                self._compiled.popitem(last=False)
            return kept.state.fork()

    def _fits(self) -> bool:
        num_bytes = sum(kept.num_bytes for kept in self._compiled.values())
        return len(self._compiled) <= MAX_KEPT and num_bytes <= MAX_KEPT_BYTES

    def check(self, spec: GrammarSpec) -> None:
        """RequestError where no grammar can be served at all."""
        try:
            import llguidance  # noqa: F401
        except ImportError as error:
            raise RequestError(
                f"{spec.param} needs llguidance, which is not installed; "
                "pip install 'specengine[grammar]'",
                spec.param,
            ) from error
        found = installed_version()
        if found is not None and release_of(found) < LEAST_VERSION:
            least = ".".join(map(str, LEAST_VERSION))
            raise RequestError(
                f"{spec.param} needs llguidance {least} or newer, and {found} is installed; "
                "pip install --upgrade 'specengine[grammar]'",
                spec.param,
            )
        if not self._source.eos_token_ids:
            raise RequestError(
                f"{spec.param} needs a model with an end-of-text token, and this one has none",
                spec.param,
            )

    def vocabulary(self) -> dict[str, Any]:
        """What trial.Vocabulary is made of."""
        self._get_tokenizer()
        return {
            "tokens": [token.decode("latin-1") for token in self._source.tokens],
            "special": self._source.special_token_ids,
            "eos": self._source.eos_token_ids,
        }

    def _compile(self, spec: GrammarSpec) -> LlguidanceState:
        self.check(spec)
        from llguidance import LLMatcher

        try:
            matcher = LLMatcher(self._get_tokenizer(), definition(spec), log_level=0)
        except ValueError as error:
            raise refusal(spec, shown(str(error))) from error
        if matcher.is_error():
            raise refusal(spec, shown(matcher.get_error()))
        state = LlguidanceState(matcher)
        state.fill_mask(np.zeros((self._vocab_size + 31) // 32, dtype=np.int32))
        if state.error is not None:
            raise refusal(spec, why_stuck(state.error))
        return state

    def _get_tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        with self._tokenizer_lock:
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


def refusal(spec: GrammarSpec, reason: str) -> RequestError:
    return RequestError(f"{spec.param} does not compile: {reason}", spec.param)
