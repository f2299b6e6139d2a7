"""Calls as JSON objects, {"name": ..., "arguments": {...}}, as several formats write them."""

from __future__ import annotations

from collections.abc import Container, Sequence

from specengine.server.parsing.answer import ParsedAnswer
from specengine.server.parsing.json_text import copy_value, decode_string, read_string
from specengine.server.parsing.reader import Reader, Sink, Steps, ignore

ARGUMENTS = ("arguments", "parameters")


def read_arguments(
    reader: Reader, sink: Sink, ends: Sequence[str], takes_text: bool = True
) -> Steps[bool]:
    """One value, as JSON text. takes_text: a string holds the JSON text. Where the value is
    malformed, everything up to one of `ends`, or the end of the text, is handed on: False."""
    yield from reader.skip_space()
    next_one = yield from reader.peek()
    if next_one == "n" and (yield from reader.take("null")):
        return True
    if next_one == '"' and takes_text:
        is_whole = yield from decode_string(reader, sink)
    else:
        is_whole = yield from copy_value(reader, sink)
    if not is_whole:
        yield from (reader.upto(ends, sink) if ends else reader.rest(sink))
    return is_whole


def read_call(
    reader: Reader,
    answer: ParsedAnswer,
    ends: Sequence[str] = (),
    names: Container[str] | None = None,
) -> Steps[bool]:
    """One call. False, and nothing is taken, where no object with a name comes next, or it names
    none of `names`. ends: what malformed arguments reach to; it is taken with them."""
    reader.mark()
    yield from reader.skip_space()
    if not (yield from reader.take("{")):
        reader.back()
        return False
    name, early = None, list[str]()  # arguments that come before the name
    while True:
        yield from reader.skip_space()
        key = yield from read_string(reader)
        yield from reader.skip_space()
        if key is None or not (yield from reader.take(":")):
            break
        yield from reader.skip_space()
        if key == "name" and name is None:
            name = yield from read_string(reader)
            if not name or (names is not None and name not in names):
                name = None
                break
            reader.keep()
            answer.open_call(name)
            answer.add_arguments("".join(early))
        elif key in ARGUMENTS:
            sink = early.append if name is None else answer.add_arguments
            if not (yield from read_arguments(reader, sink, ends)):
                break
        elif not (yield from copy_value(reader, ignore)):
            break
        yield from reader.skip_space()
        if not (yield from reader.take(",")):
            yield from reader.take("}")
            break
    if name is None:
        reader.back()
        return False
    answer.close_call()
    return True


def read_calls(
    reader: Reader, answer: ParsedAnswer, names: Container[str] | None = None
) -> Steps[bool]:
    """A call, or several: in a list, or with commas or semicolons between them. False, and nothing
    is taken, where there is none."""
    reader.mark()
    yield from reader.skip_space()
    is_list = yield from reader.take("[")
    count = 0
    while (yield from read_call(reader, answer, (), names)):
        count += 1
        yield from reader.skip_space()
        if not (yield from reader.take(",")):
            yield from reader.take(";")
    if not count:
        reader.back()
        return False
    reader.keep()
    if is_list:
        yield from reader.take("]")
    return True
