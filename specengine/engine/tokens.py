"""Text into token ids, and single token ids into the bytes they stand for."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from specengine.core.errors import RequestError
from specengine.core.sampling import SamplingParams

# Characters above which a text is encoded without Python's lock: 5 ms and more.
LONG = 16_384

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def encode_text(
    tokenizer: Any, text: str, add_special_tokens: bool = True, param: str = "prompt"
) -> list[int]:
    """Token ids of `text`, never truncated; safe to call from any thread.

    tokenizer: transformers' fast tokenizer. Raises RequestError naming `param` for a text with half
    a surrogate pair in it: JSON can carry one, UTF-8 cannot.
    """
    if not is_text(text):
        raise RequestError(f"{param} has half a surrogate pair in it, which is no text", param)
    # Not tokenizer(text): it would set truncation on the Rust object, which all threads share.
    backend = tokenizer.backend_tokenizer
    if backend.truncation is not None or backend.padding is not None:  # its file may ask for them
        backend.no_truncation()
        backend.no_padding()
    if len(text) > LONG:  # other threads run meanwhile
        (encoded,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    else:
        encoded = backend.encode(text, add_special_tokens=add_special_tokens)
    ids: list[int] = encoded.ids
    return ids


def is_text(text: str) -> bool:
    """Whether UTF-8 can carry it: JSON can carry half a surrogate pair, too."""
    return _LONE_SURROGATE.search(text) is None


def check_token_ids(prompt_ids: list[int], sampling: SamplingParams, vocab_size: int) -> None:
    """Raise RequestError for a token id that the model does not have."""
    if prompt_ids and not 0 <= min(prompt_ids) <= max(prompt_ids) < vocab_size:
        raise RequestError(f"prompt token ids must lie in 0..{vocab_size - 1}", "prompt")
    sampling.check_vocab(vocab_size)


def special_ids(tokenizer: Any, texts: Sequence[str]) -> dict[str, int]:
    """Those of `texts` that are special tokens, with their ids."""
    find, special = tokenizer.backend_tokenizer.token_to_id, vocabulary_of(tokenizer).special_ids
    ids = {text: find(text) for text in texts}
    return {text: token for text, token in ids.items() if token in special}


@lru_cache(maxsize=8)
def vocabulary_of(tokenizer: Any) -> Vocabulary:
    return Vocabulary(tokenizer.backend_tokenizer)


class Pieces(dict[int, bytes]):
    """Bytes by token id: what is not there is found when asked for, and kept below `count`."""

    def __init__(self, count: int, find: Callable[[int], bytes]) -> None:
        self._count, self._find = count, find

    def __missing__(self, token: int) -> bytes:
        piece = self._find(token)
        if token < self._count:
            self[token] = piece
        return piece

    def joined(self, tokens: Sequence[int]) -> bytes:
        """The bytes of a whole answer, without a Python call for a token that was asked for
        before."""
        return b"".join(map(self.__getitem__, tokens))


class Vocabulary:
    """What each token is. A token may be half a character: it stands for bytes, not for text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._added = frozenset(added)
        self.special_ids = frozenset(token for token, one in added.items() if one.special)
        decoder = str(tokenizer.decoder)
        self._is_byte_level = "ByteLevel" in decoder
        self._is_sentencepiece = "Metaspace" in decoder or "ByteFallback" in decoder
        self._count = count = 1 + max([tokenizer.get_vocab_size(), *added])
        self.pieces = Pieces(count, self._find)
        self._shown_with: dict[frozenset[int], Pieces] = {}  # by special tokens that are visible

    def shown_with(self, visible: frozenset[int]) -> Pieces:
        """`pieces`, but nothing for special tokens that are not in `visible`."""
        if visible not in self._shown_with:
            hidden = self.special_ids - visible
            self._shown_with[visible] = Pieces(
                self._count, lambda token: b"" if token in hidden else self.pieces[token]
            )
        return self._shown_with[visible]

    def bytes_of(self, token: int) -> bytes:
        """Empty for ids without a piece (padding of the embedding table)."""
        return self.pieces[token]

    def text_of(self, token: int) -> str:
        """U+FFFD where the token has no whole character."""
        return self.bytes_of(token).decode("utf-8", "replace")

    def _find(self, token: int) -> bytes:
        piece: str | None = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if self._is_byte_level and all(symbol in _BYTE_OF for symbol in piece):
            return b"".join(_BYTE_OF[symbol] for symbol in piece)
        if token in self._added or self._is_byte_level:
            return piece.encode()
        if not self._is_sentencepiece:
            text: str = self._tokenizer.decode([token], skip_special_tokens=False)
            return text.encode()
        if match := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace("▁", " ").encode()


def _byte_alphabet() -> dict[str, bytes]:
    """The symbols that byte-level BPE (Radford et al. 2019) writes bytes as: printable Latin-1
    stands for itself, the others are counted up from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    symbols = {chr(byte): byte for byte in printable}
    symbols |= {chr(0x100 + place): byte for place, byte in enumerate(others)}
    return {symbol: bytes([byte]) for symbol, byte in symbols.items()}


_BYTE_OF = _byte_alphabet()
