"""Qwen3-Coder: <tool_call> <function=f>, then <parameter=k> value </parameter> for each argument,
then </function> </tool_call>, a line each."""

from __future__ import annotations

from specengine.server.parsing.reader import Reader, Steps
from specengine.server.tools.format import NAME, Layout
from specengine.server.tools.lark import Lark
from specengine.server.tools.xml_call import TaggedFormat, Tags

START, END = "<tool_call>", "</tool_call>"
FUNCTION, PARAMETER, CLOSE = "<function=", "<parameter=", "</parameter>"


class Qwen3Coder(TaggedFormat):
    markers = START, END
    signs = START, FUNCTION, PARAMETER
    tags = Tags(START, PARAMETER, ">", "", (f"\n{CLOSE}", CLOSE), END)

    def read_name(self, reader: Reader) -> Steps[str]:
        pieces: list[str] = []
        yield from reader.skip_space()
        if not (yield from reader.take(FUNCTION)):
            return ""
        yield from reader.run(NAME, pieces.append)
        return "".join(pieces) if (yield from reader.take(">")) else ""

    def layout(self, lark: Lark) -> Layout:
        return Layout(
            before=f"{START}\n{FUNCTION}",
            middle=">\n",
            after=f"</function>\n{END}",
            separator="\n",
            trigger=START,
        )
