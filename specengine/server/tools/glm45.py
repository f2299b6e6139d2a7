"""GLM-4.5 and later: <tool_call>f, then <arg_key>k</arg_key>, <arg_value>v</arg_value> for each
argument, then </tool_call>, a line each."""

from __future__ import annotations

from specengine.server.parsing.reader import Reader, Steps
from specengine.server.tools.format import NAME, Layout
from specengine.server.tools.lark import Lark
from specengine.server.tools.xml_call import TaggedFormat, Tags

START, END = "<tool_call>", "</tool_call>"
KEY, VALUE, VALUE_END = "<arg_key>", "<arg_value>", "</arg_value>"


class Glm45(TaggedFormat):
    markers = START, END, KEY, "</arg_key>", VALUE, VALUE_END
    signs = START, KEY
    tags = Tags(START, KEY, "</arg_key>", VALUE, (VALUE_END,), END)

    def read_name(self, reader: Reader) -> Steps[str]:
        pieces: list[str] = []
        yield from reader.skip_space()
        yield from reader.run(NAME, pieces.append)
        return "".join(pieces) if (yield from reader.peek()) else ""  # the rest may be missing

    def layout(self, lark: Lark) -> Layout:
        return Layout(before=START, middle="\n", after=END, separator="\n", trigger=START)
