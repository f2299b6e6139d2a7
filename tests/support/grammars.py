"""Tokens, grammars and trees that the tests of grammars share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from specengine.core.grammar import GrammarSpec, GrammarState
from specengine.core.request import Req
from specengine.core.sampling import SamplingParams
from specengine.engine.grammar.compiler import GrammarCompiler

VOCAB = 320
EOS = 0


def load_tokenizer(folder: Path) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder)


class World:
    """The byte-level tokenizer of the small models, and what follows from it."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = load_tokenizer(folder)
        self.compiler = GrammarCompiler(self.tokenizer, VOCAB, frozenset({EOS}))

    def ids(self, text: str) -> list[int]:
        """A token a byte."""
        return list(self.tokenizer(text)["input_ids"])

    def token(self, letter: str) -> int:
        (token,) = self.ids(letter)
        return token

    def start(self, spec: GrammarSpec, text: str = "") -> GrammarState:
        state = self.compiler.start(spec)
        assert all(state.accept(token) for token in self.ids(text))
        return state

    def request(self, spec: GrammarSpec, text: str = "", **sampling: Any) -> Req:
        """A request that has emitted `text` already."""
        params = SamplingParams(**{"grammar": spec, "max_tokens": 100, **sampling})
        return Req(
            "r",
            self.ids("prompt"),
            params,
            eos_ids=frozenset({EOS}),
            output_ids=self.ids(text),
            grammar=self.start(spec, text),
        )


def allowed(words: Any) -> set[int]:
    """The tokens of a mask, bit by bit."""
    unsigned = np.asarray(words).astype(np.int32).view(np.uint32).tolist()
    return {32 * i + bit for i, word in enumerate(unsigned) for bit in range(32) if word >> bit & 1}


def mask_of(state: GrammarState, vocab: int = VOCAB) -> set[int]:
    words = np.zeros((vocab + 31) // 32, dtype=np.int32)
    state.fill_mask(words)
    return allowed(words)
