"""JSON in the text of an answer: values are copied as the model wrote them, strings decoded."""

from __future__ import annotations

import json
import re

from specengine.server.parsing.reader import Reader, Sink, Steps

_PLAIN = re.compile(r'[^"\\]*')
_LITERAL = re.compile(r"[-+.0-9A-Za-z]*")  # numbers, true, false, null
_BETWEEN = re.compile(r"[-+.,:\s0-9A-Za-z]*")  # the same and what separates them
_CLOSERS = {"{": "}", "[": "]"}
_HIGH, _LOW = range(0xD800, 0xDC00), range(0xDC00, 0xE000)


def copy_value(reader: Reader, sink: Sink) -> Steps[bool]:
    """Hand on one value. False where it is malformed or the text ends within: what came before has
    been handed on. Brackets and strings are checked, what is between them is not."""
    yield from reader.skip_space()
    closers: list[str] = []
    while True:
        next_one = yield from reader.peek()
        if next_one == '"':
            if not (yield from _copy_string(reader, sink)):
                return False
        elif next_one in _CLOSERS:
            closers.append(_CLOSERS[next_one])
            _pass(reader, next_one, sink)
        elif closers and next_one == closers[-1]:
            closers.pop()
            _pass(reader, next_one, sink)
        else:
            pattern = _BETWEEN if closers else _LITERAL
            if not next_one or not pattern.fullmatch(next_one):
                return False
            yield from reader.run(pattern, sink)
        if not closers:
            return True


def _pass(reader: Reader, text: str, sink: Sink) -> None:
    sink(text)
    reader.skip(len(text))


def _copy_string(reader: Reader, sink: Sink) -> Steps[bool]:
    _pass(reader, '"', sink)
    while True:
        yield from reader.run(_PLAIN, sink)
        next_two = yield from reader.peek(2)
        if next_two[:1] == '"':
            _pass(reader, '"', sink)
            return True
        _pass(reader, next_two, sink)
        if len(next_two) < 2:
            return False


def decode_string(reader: Reader, sink: Sink) -> Steps[bool]:
    """Hand on what a JSON string stands for. False where none comes, or it is malformed or cut."""
    if not (yield from reader.take('"')):
        return False
    while True:
        yield from reader.run(_PLAIN, sink)
        next_one = yield from reader.peek()
        if next_one != "\\":
            reader.skip(len(next_one))
            return next_one == '"'
        decoded = yield from _escape(reader)
        if decoded is None:
            return False
        sink(decoded)


def _escape(reader: Reader) -> Steps[str | None]:
    """What the next escape stands for; half a surrogate pair is U+FFFD."""
    kind = (yield from reader.peek(2))[1:]
    if kind != "u":
        reader.skip(2)
        return _json('"\\' + kind + '"')
    text = yield from reader.peek(6)
    decoded = _json(f'"{text}"')
    if decoded is None or len(text) < 6:
        return None
    if ord(decoded) in _HIGH:
        pair = yield from reader.peek(12)
        both = _json(f'"{pair}"') if pair[6:8] == "\\u" else None
        if both is not None and len(both) == 1:
            text, decoded = pair, both
    reader.skip(len(text))
    return "\ufffd" if ord(decoded) in _HIGH or ord(decoded) in _LOW else decoded


def _json(text: str) -> str | None:
    try:
        value: str = json.loads(text, strict=False)
    except ValueError:
        return None
    return value


def read_string(reader: Reader) -> Steps[str | None]:
    """A whole JSON string, decoded; None where none comes, or it is malformed or cut."""
    pieces: list[str] = []
    is_whole = yield from decode_string(reader, pieces.append)
    return "".join(pieces) if is_whole else None


def quoted(text: str) -> str:
    """The inside of a JSON string that stands for `text`."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
