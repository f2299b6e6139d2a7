"""How a request wants its tokens chosen."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from specengine.core.errors import RequestError
from specengine.core.grammar import GrammarSpec
from specengine.core.options import NO_OPTION

MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class SpecControl:
    """How far one request may be drafted for. Under the rule `match` no token depends on it, only
    time. Under rules that look at drafts, sampled text depends on it.

    enabled: False drafts nothing. num_steps: the most tokens below the root that a draft has in
    depth; None leaves it to the engine, whose own limit holds as well.
    """

    enabled: bool = True
    num_steps: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.enabled, bool):
            raise RequestError(
                f"speculative.enabled must be true or false, got {self.enabled!r}",
                "speculative.enabled",
            )
        if self.num_steps is not None:
            _integer("speculative.num_steps", self.num_steps, 1)

    @property
    def max_depth(self) -> int | None:
        return self.num_steps if self.enabled else 0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request; every one is honoured, with or without speculation.

    temperature: 0 is greedy. top_k: 0 or -1 keeps every token. min_p: relative to the best token.
    frequency_penalty, presence_penalty: subtracted per generated token (OpenAI's definition).
    repetition_penalty: 0.01 to 100, divides positive and multiplies negative logits of tokens seen
    in prompt or output (CTRL, Keskar et al. 2019, section 4.1). logit_bias: added to raw logits.
    max_tokens: None means up to the context length. logprobs: None off, 0 the chosen token only,
    k the k best as well; of the model's raw distribution, before any of the above. They act in this
    order: logit_bias, penalties (repetition first), min_tokens, grammar, temperature, top_k, top_p,
    min_p. Tokens tied with the last one that top_k or top_p keeps are kept with it.

    grammar: what the output must follow, up to its end or to max_tokens or a stop. The request ends
    when nothing may follow. Where min_tokens or ignore_eos would leave it no token, the grammar
    wins.

    visible_special_ids: special tokens that skip_special_tokens leaves in the text.

    speculative: how far the request may be drafted for.

    priority: of the requests that wait, those of the lowest are served first, and where memory is
    short those of the highest are retracted first. No token depends on it.
    """

    max_tokens: int | None = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    visible_special_ids: frozenset[int] = field(default=frozenset(), metadata=NO_OPTION)
    grammar: GrammarSpec | None = field(default=None, metadata=NO_OPTION)
    speculative: SpecControl = field(default=SpecControl(), metadata=NO_OPTION)
    priority: int = field(default=0, metadata=NO_OPTION)

    def __post_init__(self) -> None:
        stop: Any = self.stop
        self._normalise("stop", tuple, (stop,) if isinstance(stop, str) else stop)
        self._normalise("stop_token_ids", tuple, self.stop_token_ids)
        self._normalise("logit_bias", dict, self.logit_bias)
        self._check_ranges()
        self._check_lists()
        grammar: Any = self.grammar
        if grammar is not None and not isinstance(grammar, GrammarSpec):
            raise RequestError("grammar must be a GrammarSpec", "grammar")
        speculative: Any = self.speculative
        if not isinstance(speculative, SpecControl):
            raise RequestError("speculative must be a SpecControl", "speculative")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        return (
            self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    def check_vocab(self, vocab_size: int) -> None:
        """Raise RequestError for a token id that the model does not have, and for a min_tokens
        that could leave no token to choose."""
        for name in ("stop_token_ids", "logit_bias"):
            for token in getattr(self, name):
                if token >= vocab_size:
                    raise RequestError(
                        f"{name}: token {token} is outside the vocabulary (0..{vocab_size - 1})",
                        name,
                    )
        if self.min_tokens and len(set(self.stop_token_ids)) + 1 >= vocab_size:
            raise RequestError(
                "min_tokens forbids stop_token_ids until it is reached, and they leave no token "
                "to choose; shorten the list",
                "stop_token_ids",
            )

    def _normalise(self, name: str, kind: Callable[[Any], Any], value: Any) -> None:
        try:
            object.__setattr__(self, name, kind(value or ()))
        except (TypeError, ValueError) as error:
            raise RequestError(f"{name} has the wrong form: {value!r}", name) from error

    def _check_ranges(self) -> None:
        _number("temperature", self.temperature, 0.0, math.inf)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _integer("top_k", self.top_k, -1)
        _integer("min_tokens", self.min_tokens, 0)
        _integer("n", self.n, 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"min_tokens ({self.min_tokens}) is greater than max_tokens "
                    f"({self.max_tokens}); lower one or raise the other",
                    "min_tokens",
                )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _integer(name, value, 0, MAX_LOGPROBS)
        _integer("priority", self.priority, -(2**31), 2**31 - 1)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1)

    def _check_lists(self) -> None:
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise RequestError("stop must be non-empty strings", "stop")
        if not all(_is_token(t) for t in self.stop_token_ids):
            raise RequestError("stop_token_ids must be token ids, 0 or greater", "stop_token_ids")
        for token, bias in self.logit_bias.items():
            if not _is_token(token):
                raise RequestError(f"logit_bias: {token!r} is not a token id", "logit_bias")
            _number("logit_bias", bias, -100.0, 100.0)


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _number(name: str, value: Any, low: float, high: float, open_low: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    highest = min(high, sys.float_info.max)
    if is_number and low <= value <= highest and not (open_low and value == low):
        return
    left = "(" if open_low else "["
    right = ")" if math.isinf(high) else "]"
    raise RequestError(f"{name} must be in {left}{low:g}, {high:g}{right}, got {value!r}", name)


def _integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if is_integer and value >= low and (high is None or value <= high):
        return
    limit = f"at least {low}" if high is None else f"between {low} and {high}"
    raise RequestError(f"{name} must be a whole number, {limit}, got {value!r}", name)
