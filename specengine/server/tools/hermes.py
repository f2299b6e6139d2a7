"""Hermes, Qwen2.5 and Qwen3: <tool_call>{"name": "f", "arguments": {...}}</tool_call>"""

from __future__ import annotations

from specengine.server.parsing.answer import ParsedAnswer
from specengine.server.parsing.reader import Reader, Steps
from specengine.server.tools.format import Layout, ToolFormat, Tools
from specengine.server.tools.json_call import read_call
from specengine.server.tools.lark import Lark

START, END = "<tool_call>", "</tool_call>"


class Hermes(ToolFormat):
    markers = START, END
    signs = (START,)

    def read(self, reader: Reader, answer: ParsedAnswer, tools: Tools) -> Steps[None]:
        while (yield from reader.upto([START], answer.add_content)) is not None:
            if not (yield from read_call(reader, answer, [END])):
                answer.add_content(START)
                continue
            yield from reader.skip_space()
            yield from reader.take(END)

    def layout(self, lark: Lark) -> Layout:
        return Layout(
            before=f'{START}\n{{"name": "',
            middle='", "arguments": ',
            after=f"}}\n{END}",
            separator="\n",
            trigger=START,
        )
