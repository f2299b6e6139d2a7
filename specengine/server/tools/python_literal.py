"""Python's literals in the text of an answer, handed on as JSON."""

from __future__ import annotations

import json
import math
import re
from string import hexdigits

from specengine.server.parsing.json_text import quoted
from specengine.server.parsing.reader import Reader, Sink, Steps

_WORD = re.compile(r"[-+.\w]*")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_WORDS |= {word: word for word in _WORDS.values()}
_PLAIN = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
_CLOSERS = {"[": "]", "(": ")", "{": "}"}
_ESCAPES = dict(zip("\\'\"abfnrtv\n", "\\'\"\a\b\f\n\r\t\v", strict=False)) | {"\n": ""}
_HEX = {"x": 2, "u": 4, "U": 8}  # digits that follow
_OCTAL = re.compile("[0-7]{1,3}")
MOST_DEPTH = 64  # of lists and dictionaries: reading them is recursive


def copy_as_json(reader: Reader, sink: Sink, depth: int = 0) -> Steps[bool]:
    """Hand on one literal: text, number, list, tuple, dictionary of texts, True, False or None.
    False where it is malformed or the text ends within: what came before has been handed on."""
    yield from reader.skip_space()
    next_one = yield from reader.peek()
    if next_one in ('"', "'"):
        return (yield from _copy_text(reader, next_one, sink))
    if next_one in _CLOSERS:
        reader.skip(1)
        return depth < MOST_DEPTH and (yield from _copy_items(reader, next_one, sink, depth + 1))
    pieces: list[str] = []
    reader.mark()
    yield from reader.run(_WORD, pieces.append)
    word = _as_json("".join(pieces))
    if word is None:
        reader.back()
        return False
    reader.keep()
    sink(word)
    return True


def _as_json(word: str) -> str | None:
    if word in _WORDS:
        return _WORDS[word]
    try:
        value = float(word) if any(sign in word for sign in ".eE") else int(word)
    except ValueError:
        return None
    return json.dumps(value) if abs(value) != math.inf else None


def _copy_items(reader: Reader, opener: str, sink: Sink, depth: int) -> Steps[bool]:
    """What is between brackets, and the closing one."""
    is_dict, lead = opener == "{", ""
    sink("{" if is_dict else "[")
    while True:
        yield from reader.skip_space()
        if (yield from reader.take(_CLOSERS[opener])):
            sink("}" if is_dict else "]")
            return True
        if lead and not (yield from reader.take(",")):
            return False
        yield from reader.skip_space()
        if lead and (yield from reader.peek()) == _CLOSERS[opener]:
            continue  # a comma after the last
        sink(lead)
        lead = ", "
        if is_dict:
            if (yield from reader.peek()) not in ('"', "'"):
                return False
            is_key = yield from copy_as_json(reader, sink)
            yield from reader.skip_space()
            if not is_key or not (yield from reader.take(":")):
                return False
            sink(": ")
        if not (yield from copy_as_json(reader, sink, depth)):
            return False


def _copy_text(reader: Reader, quote: str, sink: Sink) -> Steps[bool]:
    """From its opening quote, or three of them, on."""
    end = quote * 3 if (yield from reader.take(quote * 3)) else quote
    if end == quote:
        reader.skip(1)
    sink('"')
    while True:
        yield from reader.run(_PLAIN[quote], lambda text: sink(quoted(text)))
        if (yield from reader.take(end)):
            sink('"')
            return True
        next_one = yield from reader.peek()
        if not next_one:
            return False
        if next_one == quote:  # one of less than three
            reader.skip(1)
            sink(quoted(quote))
        elif not (yield from _copy_escape(reader, sink)):
            return False


def _copy_escape(reader: Reader, sink: Sink) -> Steps[bool]:
    """What follows a backslash; one that means nothing stands for itself."""
    kind = (yield from reader.peek(2))[1:]
    if not kind:
        return False
    size = _HEX.get(kind, 0)
    text = (yield from reader.peek(2 + max(size, 2)))[1:]
    digits = text[1 : 1 + size]
    octal = _OCTAL.match(text)
    if octal is not None:
        reader.skip(1 + len(octal[0]))
        sink(quoted(chr(int(octal[0], 8))))
    elif size:
        if len(digits) < size or not set(digits) <= set(hexdigits) or int(digits, 16) > 0x10FFFF:
            return False
        reader.skip(2 + size)
        sink(quoted(chr(int(digits, 16)).encode("utf-8", "replace").decode()))
    else:
        reader.skip(2)
        sink(quoted(_ESCAPES.get(kind, "\\" + kind)))
    return True
