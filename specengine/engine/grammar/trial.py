"""A process that compiles grammars for pool.py, and may be killed while it does.

A line of JSON comes in for each grammar (a GrammarSpec's fields), and one goes out: null where it
compiles and some bytes can be followed, or why not. A grammar that takes too long ends the process,
whether or not the parent still lives; one that takes too much memory does as well.
"""

from __future__ import annotations

import json
import resource
import signal
import sys

from llguidance import LLMatcher, LLTokenizer

from specengine.core.grammar import GrammarSpec
from specengine.engine.grammar.definition import definition, shown, why_stuck

MAX_BYTES = 2 * 2**30  # of address space
NUM_STEPS = 16  # bytes that are followed: many limits are met after the first only


def main() -> None:
    seconds = float(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = LLTokenizer("byte")
    for line in sys.stdin:
        spec = GrammarSpec(**json.loads(line))
        signal.setitimer(signal.ITIMER_REAL, seconds)  # the default of its signal is to end
        reason = failure(tokenizer, spec)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(reason), flush=True)


def failure(tokenizer: LLTokenizer, spec: GrammarSpec) -> str | None:
    """Why a grammar does not compile, or cannot be followed for some bytes."""
    try:
        matcher = LLMatcher(tokenizer, definition(spec), log_level=0)
    except ValueError as error:
        return shown(str(error))
    if matcher.is_error():
        return shown(matcher.get_error())
    for _ in range(NUM_STEPS):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        token = (mask & -mask).bit_length() - 1  # the first that is allowed
        if token < 0 or matcher.is_stopped() or not matcher.consume_token(token):
            break
    return why_stuck(matcher.get_error()) if matcher.is_error() else None


if __name__ == "__main__":
    main()
