from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specengine.core.request import FinishReason
from specengine.core.sampling import SamplingParams
from specengine.engine.detokenizer import Detokenizer, find_stop, held_back
from specengine.engine.tokens import Pieces, encode_text, vocabulary_of

END = FinishReason("length")


def test_visible_special_tokens_are_text() -> None:
    tokenizer = byte_level()
    start, end = encode_text(tokenizer, "<tool><end>")
    ids = [start, *encode_text(tokenizer, "ab"), end, *encode_text(tokenizer, "a")]
    for visible, text in (((), "<tool>aba"), ((end,), "<tool>ab<end>a")):
        for _ in range(2):
            sampling = SamplingParams(visible_special_ids=frozenset(visible))
            assert Detokenizer(tokenizer, sampling).add(ids, END) == text
    sampling = SamplingParams(stop=("<end>",), visible_special_ids=frozenset((end,)))
    stopped = Detokenizer(tokenizer, sampling)
    assert stopped.add(ids) == "<tool>ab"
    assert stopped.stopped


def wrap(tokenizer: Tokenizer) -> Any:
    tokenizer.add_tokens(
        [AddedToken("<end>", special=True, normalized=False), AddedToken("<tool>", special=False)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def byte_level() -> Any:
    """Every byte a token, and a few merged ones, some of them half a character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("Ġ", "ab"), ("Ã", "©"), ("ð", "Ł"), ("Ċ", "Ċ")]
    names = alphabet + [left + right for left, right in merges]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return wrap(tokenizer)


def sentencepiece() -> Any:
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁ab", "é", "\n"]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return wrap(tokenizer)


TOKENIZERS = {"byte level": byte_level(), "sentencepiece": sentencepiece()}
BYTES = TOKENIZERS["byte level"]


def ids_of(text: str) -> list[int]:
    return encode_text(BYTES, text)


def feed(detokenizer: Detokenizer, ids: Sequence[int], sizes: Sequence[int]) -> list[str]:
    """Deltas of feeding `ids` in chunks of these sizes, the rest one by one, then the end."""
    deltas, place = [], 0
    for size in [*sizes, *[1] * len(ids)]:
        deltas.append(detokenizer.add(ids[place : place + size]))
        place += size
    return [*deltas, detokenizer.add([], END)]


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=st.text("ab é\n😀—"), sizes=st.lists(st.integers(0, 5), max_size=8))
def test_deltas_add_up_to_the_text(kind: str, text: str, sizes: list[int]) -> None:
    ids = encode_text(TOKENIZERS[kind], text)
    detokenizer = Detokenizer(TOKENIZERS[kind], SamplingParams())
    deltas = feed(detokenizer, ids, sizes)
    assert "".join(deltas) == detokenizer.text == text
    assert not any("\ufffd" in delta for delta in deltas)


@given(ids=st.lists(st.integers(0, 262), max_size=40), sizes=st.lists(st.integers(0, 5)))
def test_any_tokens_equal_decoding_at_once(ids: list[int], sizes: list[int]) -> None:
    """Broken characters included."""
    detokenizer = Detokenizer(BYTES, SamplingParams())
    feed(detokenizer, ids, sizes)
    assert detokenizer.text == BYTES.decode(ids, skip_special_tokens=True)


def test_half_a_character_waits() -> None:
    ids = ids_of("😀")
    assert len(ids) == 3
    detokenizer = Detokenizer(BYTES, SamplingParams())
    assert [detokenizer.add([token]) for token in ids] == ["", "", "😀"]


def test_half_a_character_at_the_end_is_shown() -> None:
    detokenizer = Detokenizer(BYTES, SamplingParams())
    assert detokenizer.add(ids_of("é😀")[:-1]) == "é"
    assert detokenizer.add([], END) == "\ufffd"


@pytest.mark.parametrize(("skip", "text"), [(True, "a<tool>b"), (False, "a<end><tool>b")])
def test_special_tokens(skip: bool, text: str) -> None:
    detokenizer = Detokenizer(BYTES, SamplingParams(skip_special_tokens=skip))
    detokenizer.add(ids_of("a<end><tool>b"), END)
    assert detokenizer.text == text


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "a\n")])
def test_the_stop_token_is_no_text(include: bool, text: str) -> None:
    (newline,) = ids_of("\n")
    params = SamplingParams(stop_token_ids=(newline,), include_stop_str_in_output=include)
    detokenizer = Detokenizer(BYTES, params)
    detokenizer.add([*ids_of("a"), newline], FinishReason("stop", newline))
    assert detokenizer.text == text


def test_a_token_that_stopped_nothing_is_text() -> None:
    (newline,) = ids_of("\n")
    detokenizer = Detokenizer(BYTES, SamplingParams())
    detokenizer.add([newline], END)
    assert detokenizer.text == "\n"


def test_text_that_may_become_a_stop_string_waits() -> None:
    detokenizer = Detokenizer(BYTES, SamplingParams(stop=("aba",)))
    shown = [detokenizer.add(ids_of(text)) for text in ("b", "a", "b", "b")]
    assert shown == ["b", "", "", "abb"]


@given(
    text=st.text("ab", max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    sizes=st.lists(st.integers(0, 5), max_size=8),
    include=st.booleans(),
)
def test_stop_strings_do_not_depend_on_chunks(
    text: str, stops: list[str], sizes: list[int], include: bool
) -> None:
    params = SamplingParams(stop=tuple(stops), include_stop_str_in_output=include)
    detokenizer = Detokenizer(BYTES, params)
    deltas = feed(detokenizer, [BYTES.convert_tokens_to_ids(c) for c in text], sizes)
    first = min(
        (end for end in range(len(text) + 1) if text[:end].endswith(params.stop)), default=0
    )
    if not first:
        assert detokenizer.text == text
        assert not detokenizer.stopped
    else:
        longest = max(len(stop) for stop in stops if text[:first].endswith(stop))
        assert detokenizer.text == text[: first if include else first - longest]
        assert detokenizer.stopped
    assert "".join(deltas) == detokenizer.text


def test_min_tokens_lets_early_stop_strings_pass() -> None:
    params = SamplingParams(stop=("ab",), min_tokens=3)
    letters = [BYTES.convert_tokens_to_ids(c) for c in "ababbab"]
    for sizes in ([], [2, 2, 2], [7]):
        detokenizer = Detokenizer(BYTES, params)
        feed(detokenizer, letters, sizes)
        assert detokenizer.text == "ab"


def test_find_stop_takes_the_first_to_be_complete() -> None:
    found = find_stop("xabcy", ["abcy", "bc", "abc"])
    assert found is not None
    assert (found.start, found.end) == (1, 4)
    assert find_stop("xab", ["abc"]) is None


def test_held_back() -> None:
    assert held_back("x<|", ["<|end|>", "|x"]) == 2
    assert held_back("x|", ["<|end|>", "|x"]) == 1
    assert held_back("stop", ["stop"]) == 0


def test_pieces_of_whole_answers() -> None:
    """Asked for before or not, kept or not."""
    asked: list[int] = []

    def find(token: int) -> bytes:
        asked.append(token)
        return b"" if token == 9 else b"%d," % token

    pieces = Pieces(4, find)
    assert pieces.joined([]) == b""
    assert [pieces.joined([1, 3, 1]), pieces.joined([3]), pieces[1]] == [b"1,3,1,", b"3,", b"1,"]
    assert asked == [1, 3]
    assert [pieces.joined([4, 1, 9]), pieces.joined([4, 2])] == [b"4,1,", b"4,2,"]
    assert asked == [1, 3, 4, 9, 4, 2]
    with pytest.raises(OverflowError):
        vocabulary_of(BYTES).bytes_of(-1)


def test_vocabulary_knows_bytes() -> None:
    vocabulary = vocabulary_of(BYTES)
    assert [vocabulary.bytes_of(token) for token in ids_of("é ab")] == ["é".encode(), b" ab"]
    assert vocabulary.text_of(ids_of("😀")[0]) == "\ufffd"
    assert vocabulary.bytes_of(99_999) == b""
    pieces = vocabulary_of(TOKENIZERS["sentencepiece"])
    assert [pieces.bytes_of(t) for t in encode_text(TOKENIZERS["sentencepiece"], " —")] == [
        b" ",
        b"\xe2",
        b"\x80",
        b"\x94",
    ]
