"""Mistral: [TOOL_CALLS][{"name": "f", "arguments": {...}}], and since 2025
[TOOL_CALLS]f[ARGS]{...}."""

from __future__ import annotations

import re
from uuid import uuid4

from specengine.server.parsing.answer import ParsedAnswer
from specengine.server.parsing.reader import Reader, Steps
from specengine.server.tools.format import NAME, Layout, ToolFormat, Tools
from specengine.server.tools.json_call import read_arguments, read_calls
from specengine.server.tools.lark import Lark

START, ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class Mistral(ToolFormat):
    markers = START, ID, ARGS
    signs = (START,)

    def read(self, reader: Reader, answer: ParsedAnswer, tools: Tools) -> Steps[None]:
        while (yield from reader.upto([START], answer.add_content)) is not None:
            if not ((yield from read_calls(reader, answer)) or (yield from _named(reader, answer))):
                answer.add_content(START)

    def layout(self, lark: Lark) -> Layout:
        if lark.is_token(ARGS):
            return Layout(before=START, middle=ARGS, trigger=START)
        return Layout(
            open=f"{START}[",
            before='{"name": "',
            middle='", "arguments": ',
            after="}",
            separator=", ",
            close="]",
            trigger=START,
        )

    def new_id(self) -> str:
        return uuid4().hex[:9]

    def template_id(self, call_id: str) -> str:
        """Mistral's templates refuse ids of another length than nine."""
        return re.sub("[^0-9A-Za-z]", "", call_id)[-9:].rjust(9, "0")


def _named(reader: Reader, answer: ParsedAnswer) -> Steps[bool]:
    """A name, perhaps an id, and arguments."""
    name, call_id = list[str](), list[str]()
    reader.mark()
    yield from reader.skip_space()
    yield from reader.run(NAME, name.append)
    if (yield from reader.take(ID)):
        yield from reader.run(NAME, call_id.append)
    yield from reader.take(ARGS)
    yield from reader.skip_space()
    if not name or (yield from reader.peek()) != "{":
        reader.back()
        return False
    reader.keep()
    answer.open_call("".join(name), "".join(call_id))
    yield from read_arguments(reader, answer.add_arguments, ())
    answer.close_call()
    return True
