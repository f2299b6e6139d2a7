"""Requests of every sort, each made from a seed, and when they come and go."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from specengine.core.grammar import GrammarSpec
from specengine.core.sampling import SamplingParams, SpecControl

_PREFIX_LENGTHS = (5, 19, 34, 50, 71)
_TAIL_LENGTHS = ((1, 8), (8, 40), (40, 90))  # at most 161 tokens with a prefix
_LETTERS = "abcdefgh ,.0"
_NEW_TOKENS = (1, 3, 12, 24, 48)
_GRAMMARS = (
    GrammarSpec.regex("[a-f ]{1,40}"),
    GrammarSpec.choice(["yes", "no", "maybe so", "maybe not"]),
    GrammarSpec.json_schema(
        {
            "type": "object",
            "properties": {"on": {"type": "boolean"}, "of": {"enum": ["this", "that"]}},
            "required": ["on", "of"],
            "additionalProperties": False,
        }
    ),
)


@dataclass(frozen=True)
class Visit:
    """One request. Steps count from when it was added."""

    rid: str
    prompt: list[int]
    params: SamplingParams
    abort_after: int | None  # steps; None: it is not aborted


class Workload:
    """Greedy and sampled, penalised, stopped by text and by tokens, n > 1, with logprobs, grammars
    and limits on drafts; short and long prompts, half of them with a prefix that others share."""

    def __init__(self, tokenizer: Any, aborted: float, seed: int) -> None:
        """aborted: share of the requests."""
        self._tokens = [tokenizer(letter)["input_ids"][-1] for letter in _LETTERS]
        self._aborted = aborted
        self._seed = seed
        self._has_grammars = find_spec("llguidance") is not None
        rng = random.Random(seed)
        self._prefixes = [self._text(rng, length) for length in _PREFIX_LENGTHS]

    def visit(self, index: int) -> Visit:
        rng = random.Random(f"{self._seed} {index}")
        prefix = rng.choice(self._prefixes) if rng.random() < 0.5 else []
        return Visit(
            rid=str(index),
            prompt=[*prefix, *self._text(rng, rng.randint(*rng.choice(_TAIL_LENGTHS)))],
            params=self._params(rng),
            abort_after=rng.randrange(12) if rng.random() < self._aborted else None,
        )

    def _text(self, rng: random.Random, length: int) -> list[int]:
        """A text of some tokens that repeat: there is something to draft from."""
        few = rng.sample(self._tokens, 3)
        return [rng.choice(few) for _ in range(length)]

    def _params(self, rng: random.Random) -> SamplingParams:
        chosen: dict[str, Any] = {"temperature": 0.0}
        if rng.random() < 0.6:
            chosen |= _sampling(rng)
        options = (_penalties, _stops, _several, _logprobs, _draft_limits)
        for option in options:
            if rng.random() < 0.25:
                chosen |= option(rng)
        params = SamplingParams(
            max_tokens=rng.choice(_NEW_TOKENS), seed=rng.randrange(2**31), **chosen
        )
        if self._has_grammars and rng.random() < 0.15:
            return replace(params, grammar=rng.choice(_GRAMMARS))
        return replace(params, logit_bias=dict.fromkeys(rng.sample(self._tokens, 6), 9.0))


def _sampling(rng: random.Random) -> dict[str, Any]:
    return {
        "temperature": rng.choice((0.5, 1.0, 1.4)),
        "top_k": rng.choice((0, 0, 5)),
        "top_p": rng.choice((1.0, 0.9)),
        "min_p": rng.choice((0.0, 0.05)),
    }


def _penalties(rng: random.Random) -> dict[str, Any]:
    return {
        "frequency_penalty": rng.choice((0.0, 0.7)),
        "presence_penalty": rng.choice((0.0, 0.5)),
        "repetition_penalty": rng.choice((1.0, 1.3)),
    }


def _stops(rng: random.Random) -> dict[str, Any]:
    return {"stop": tuple(rng.sample(_LETTERS, 2)), "min_tokens": rng.choice((0, 1))}


def _several(rng: random.Random) -> dict[str, Any]:
    return {"n": rng.choice((2, 3))}


def _logprobs(rng: random.Random) -> dict[str, Any]:
    return {"logprobs": rng.choice((0, 3)), "prompt_logprobs": rng.choice((None, 1))}


def _draft_limits(rng: random.Random) -> dict[str, Any]:
    return {"speculative": SpecControl(enabled=rng.random() < 0.5, num_steps=rng.choice((1, 2)))}
