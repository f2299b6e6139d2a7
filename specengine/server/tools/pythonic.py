"""Llama 3.2 and 4: a list of calls in Python, [f(a=1, b="x"), g()]."""

from __future__ import annotations

import re

from specengine.server.parsing.answer import ParsedAnswer
from specengine.server.parsing.reader import Reader, Steps
from specengine.server.tools.format import NAME, Layout, Tool, ToolFormat, Tools
from specengine.server.tools.lark import Lark
from specengine.server.tools.python_literal import copy_as_json
from specengine.server.tools.python_schema import PythonGrammar

START, END = "<|python_start|>", "<|python_end|>"
_KEY = re.compile(r"\w*")


class Pythonic(ToolFormat):
    """A list at the beginning of the answer, or after the tag, holds calls if its first element
    calls a tool."""

    markers = START, END
    signs = ("[func_name1(",)

    def read(self, reader: Reader, answer: ParsedAnswer, tools: Tools) -> Steps[None]:
        while True:
            reader.mark()
            yield from reader.skip_space()
            is_list = yield from reader.take("[")
            count = 0
            while is_list and (yield from _read_call(reader, answer, tools)):
                count += 1
                yield from reader.skip_space()
                yield from reader.take(",")
            if count:
                reader.keep()
                yield from reader.skip_space()
                yield from reader.take("]")
                yield from reader.take(END)
            else:
                reader.back()
            if (yield from reader.upto([START], answer.add_content)) is None:
                return

    def layout(self, lark: Lark) -> Layout:
        return Layout(open="[", before="", middle="(", after=")", separator=", ", close="]")

    def arguments(self, lark: Lark, tool: Tool) -> str:
        return PythonGrammar(lark, tool).arguments()


def _read_call(reader: Reader, answer: ParsedAnswer, tools: Tools) -> Steps[bool]:
    """One call. False, and nothing is taken, where none of a tool with named arguments comes."""
    name, key = list[str](), list[str]()
    reader.mark()
    yield from reader.skip_space()
    yield from reader.run(NAME, name.append)
    is_call = "".join(name) in tools and (yield from reader.take("("))
    yield from reader.skip_space()
    if is_call and not (yield from reader.take(")")):
        is_call = yield from _read_key(reader, key)
        is_empty = False
    else:
        is_empty = True
    if not is_call:
        reader.back()
        return False
    reader.keep()
    answer.open_call("".join(name))
    if not is_empty:
        yield from _read_arguments(reader, answer, key[0])
    answer.close_call()
    return True


def _read_key(reader: Reader, found: list[str]) -> Steps[bool]:
    """A name and an equals sign."""
    pieces: list[str] = []
    yield from reader.skip_space()
    yield from reader.run(_KEY, pieces.append)
    yield from reader.skip_space()
    found.append("".join(pieces))
    return bool(pieces) and (yield from reader.take("="))


def _read_arguments(reader: Reader, answer: ParsedAnswer, key: str) -> Steps[None]:
    """From the first value on. Once an argument is malformed, the rest is handed on as it is."""
    lead = "{"
    while True:
        answer.add_arguments(f'{lead}"{key}": ')
        if not (yield from copy_as_json(reader, answer.add_arguments)):
            break
        lead = ", "
        yield from reader.skip_space()
        yield from reader.take(",")
        yield from reader.skip_space()
        if (yield from reader.take(")")):
            answer.add_arguments("}")
            return
        keys: list[str] = []
        if not (yield from _read_key(reader, keys)):
            break
        key = keys[0]
    yield from reader.rest(answer.add_arguments)
