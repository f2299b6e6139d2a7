"""A process that compiles grammars for pool.py, and may be killed while it does.

The first line of JSON that comes in is the vocabulary, for grammars may name tokens by their ids:
the fields of Vocabulary. Each further line is a grammar, a GrammarSpec's fields, and one goes out:
a list of null where it compiles and some tokens can be followed, or why not, and the bytes that it
holds. A grammar that takes too long ends the process, whether or not the parent still lives; one
that takes too much memory does too.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from specengine.core.grammar import GrammarSpec
from specengine.core.trim import allocated_bytes
from specengine.engine.grammar.definition import definition, shown, why_stuck

MAX_BYTES = 2 * 2**30  # of address space
NUM_STEPS = 16  # tokens that are followed: many limits are met after the first only
NICENESS = 5  # a third of the time that another process gets, where cores are short


class Vocabulary:
    """As llguidance reads one. tokens: their bytes, as Latin-1."""

    bos_token_id = None

    def __init__(self, tokens: list[str], special: list[int], eos: list[int]) -> None:
        self.tokens = [token.encode("latin-1") for token in tokens]
        self.special_token_ids = special
        self.eos_token_id = eos[0]
        self._ids = {token: number for number, token in enumerate(self.tokens) if len(token) == 1}

    def __call__(self, text: bytes | str) -> list[int]:
        """A token a byte: no grammar's cost depends on more."""
        data = text.encode() if isinstance(text, str) else text
        pieces = (data[i : i + 1] for i in range(len(data)))
        return [self._ids[piece] for piece in pieces if piece in self._ids]


def main() -> None:
    seconds = float(sys.argv[1])
    give_way()
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    given = json.loads(sys.stdin.readline())
    ends = sum(1 << token for token in given["eos"])
    wrapper = TokenizerWrapper(Vocabulary(**given))
    tokenizer = LLTokenizer(wrapper, eos_token=given["eos"])
    for line in sys.stdin:
        spec = GrammarSpec(**json.loads(line))
        signal.setitimer(signal.ITIMER_REAL, seconds)  # the default of its signal is to end
        answer = tried(tokenizer, ends, spec)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), flush=True)


def give_way() -> None:
    """The engine goes first where cores are short. The second line is for kernels that share cores
    out by session first, of which this process has its own (sched_autogroup)."""
    os.nice(NICENESS)
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(NICENESS))


def tried(tokenizer: LLTokenizer, ends: int, spec: GrammarSpec) -> tuple[str | None, int]:
    """Why a grammar does not compile, or cannot be followed for some tokens, and the bytes that it
    holds compiled. ends: a bit for each token that ends a text, which is not followed."""
    before = allocated_bytes()
    try:
        matcher = LLMatcher(tokenizer, definition(spec), log_level=0)
    except ValueError as error:
        return shown(str(error)), 0
    if matcher.is_error():
        return shown(matcher.get_error()), 0
    for _ in range(NUM_STEPS):
        mask = int.from_bytes(matcher.compute_bitmask(), "little") & ~ends
        token = (mask & -mask).bit_length() - 1  # the first that is allowed
        if token < 0 or matcher.is_stopped() or not matcher.consume_token(token):
            break
    reason = why_stuck(matcher.get_error()) if matcher.is_error() else None
    return reason, max(allocated_bytes() - before, 0)


if __name__ == "__main__":
    main()
