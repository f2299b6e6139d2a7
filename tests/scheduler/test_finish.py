"""Where an accepted run is cut."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specengine.core.request import FinishReason, Req
from specengine.core.sampling import SamplingParams
from specengine.scheduler.finish import StopStrings, find_cut

PIECES = ["a", "b", "ab", "ba", "aab", "", "bb"]


class PieceDecoder:
    """A token is an index into PIECES, or into pieces of the test's own."""

    def __init__(self, pieces: list[str] = PIECES) -> None:
        self.pieces = pieces

    def add(self, token_ids: Any) -> str:
        return "".join(self.pieces[token] for token in token_ids)


def request(output: int = 0, prompt: int = 4, **sampling: Any) -> Req:
    req = Req("r", [1] * prompt, SamplingParams(**sampling), eos_ids=frozenset({2, 3}))
    req.output_ids = [9] * output
    if req.sampling.stop:
        req.stop_checker = StopStrings(req.sampling.stop, PieceDecoder())
    return req


@pytest.mark.parametrize(
    ("req", "tokens", "kept", "reason"),
    [
        (request(), [5, 6, 7], 3, None),
        (request(), [5, 3, 7], 2, FinishReason("stop", 3)),
        (request(ignore_eos=True), [5, 3, 7], 3, None),
        (request(ignore_eos=True, stop_token_ids=(3,)), [5, 3, 7], 2, FinishReason("stop", 3)),
        (request(stop_token_ids=(6, 7)), [5, 6, 7], 2, FinishReason("stop", 6)),
        (request(output=8, max_tokens=10), [5, 6, 7], 2, FinishReason("length")),
        (request(output=8, max_tokens=None, prompt=10), [5, 6, 7], 2, FinishReason("length")),
        (request(output=8, max_tokens=10), [5, 2, 7], 2, FinishReason("stop", 2)),
        (request(min_tokens=3), [2, 2, 2, 2, 5], 4, FinishReason("stop", 2)),
        (request(output=2, min_tokens=3), [5, 2, 7], 2, FinishReason("stop", 2)),
        (request(min_tokens=2, max_tokens=2), [2, 2, 2], 2, FinishReason("length")),
        (request(stop=("bb",)), [0, 4, 1, 1, 0], 3, FinishReason("stop", "bb")),
        (request(stop=("bb",), min_tokens=3), [0, 1, 1, 5, 0, 6], 6, FinishReason("stop", "bb")),
        (request(stop=("b", "aaaa"), min_tokens=1), [1, 0, 0], 3, None),
    ],
)
def test_cut(req: Req, tokens: list[int], kept: int, reason: FinishReason | None) -> None:
    assert find_cut(req, tokens, context_len=20) == (kept, reason)


def naive_stop(tokens: list[int], stops: list[str]) -> tuple[int, str] | None:
    """The first token after which the text holds a stop string, and the one that ends first."""
    for count in range(1, len(tokens) + 1):
        text = PieceDecoder().add(tokens[:count])
        found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
        if found:
            return count, min(found)[2]
    return None


@given(
    st.lists(st.integers(0, len(PIECES) - 1), max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3),
    st.integers(0, 2**32),
)
def test_stop_strings_across_tokens_and_rounds(
    tokens: list[int], stops: list[str], seed: int
) -> None:
    """However the tokens are spread over rounds, the text is cut where it first holds a stop."""
    rnd = random.Random(seed)
    req = request(stop=tuple(stops), max_tokens=None, ignore_eos=True)
    expected = naive_stop(tokens, stops)
    position = 0
    while position < len(tokens):
        run = tokens[position : position + rnd.randint(1, 5)]
        kept, reason = find_cut(req, run, context_len=1000)
        req.output_ids += run[:kept]
        position += len(run)
        if reason is not None:
            assert expected == (len(req.output_ids), reason.matched)
            return
    assert expected is None


def test_a_stop_string_inside_one_token() -> None:
    checker = StopStrings(["\n\n"], PieceDecoder(["one", ".\n\nTwo", "\n"]))
    assert [checker.add(token) for token in (0, 2, 0, 1)] == [None, None, None, "\n\n"]


def test_the_longest_of_those_that_end_together() -> None:
    checker = StopStrings(["b", "ab", "ba"], PieceDecoder())
    assert [checker.add(token) for token in (0, 3)] == [None, "ab"]


class CountedGrammar:
    """Takes any tokens but 8, and is complete after `length` of them, or after the end token 2."""

    error = "too complex"

    def __init__(self, length: int) -> None:
        self.length = length
        self.taken: list[int] = []

    @property
    def is_complete(self) -> bool:
        return len(self.taken) == self.length or 2 in self.taken

    def accept(self, token: int) -> bool:
        if token != 8:
            self.taken.append(token)
        return token != 8

    def take_back(self, count: int) -> None:
        raise AssertionError("what is committed stands")

    def fill_mask(self, words: Any) -> None:
        raise AssertionError("nothing is chosen here")


@pytest.mark.parametrize(
    ("sampling", "tokens", "kept", "reason"),
    [
        ({}, [5, 6], 2, None),
        ({}, [5, 6, 7, 9], 3, FinishReason("stop")),
        ({"max_tokens": 3}, [5, 6, 7], 3, FinishReason("stop")),
        ({"max_tokens": 2}, [5, 6, 7], 2, FinishReason("length")),
        ({"min_tokens": 9}, [5, 6, 7, 9], 3, FinishReason("stop")),
        ({}, [5, 2, 7], 2, FinishReason("stop", 2)),
        ({"min_tokens": 9}, [5, 2, 7], 2, FinishReason("stop", 2)),
        ({"ignore_eos": True}, [5, 2, 7], 2, FinishReason("stop", 2)),
        ({"stop_token_ids": (6,)}, [5, 6, 7], 2, FinishReason("stop", 6)),
        ({"stop": ("bb",)}, [1, 1, 1], 2, FinishReason("stop", "bb")),
    ],
    ids=str,
)
def test_a_complete_grammar_ends_the_output(
    sampling: dict[str, Any], tokens: list[int], kept: int, reason: FinishReason | None
) -> None:
    """Whatever min_tokens and ignore_eos say; the grammar sees what is kept, and nothing more."""
    req = request(**sampling)
    grammar = req.grammar = CountedGrammar(3)
    assert find_cut(req, tokens, context_len=20) == (kept, reason)
    assert grammar.taken == tokens[:kept]


def test_a_grammar_that_fails_ends_the_request_with_its_error() -> None:
    req = request()
    req.grammar = CountedGrammar(9)
    kept, reason = find_cut(req, [5, 8, 6], context_len=20)
    assert kept == 2
    assert reason is not None
    assert reason.kind == "error"
    assert "too complex" in (reason.message or "")
