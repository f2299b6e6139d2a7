"""Llama 3.1 to 3.3: {"name": "f", "parameters": {...}}; semicolons separate several."""

from __future__ import annotations

from specengine.server.parsing.answer import ParsedAnswer
from specengine.server.parsing.reader import Reader, Steps
from specengine.server.tools.format import Layout, ToolFormat, Tools
from specengine.server.tools.json_call import read_calls
from specengine.server.tools.lark import Lark

TAG = "<|python_tag|>"


class Llama3Json(ToolFormat):
    """An object at the beginning of the answer, or after the tag, is a call if it names a tool."""

    markers = (TAG,)
    signs = ('{"name": function name, "parameters": ',)

    def read(self, reader: Reader, answer: ParsedAnswer, tools: Tools) -> Steps[None]:
        while True:
            yield from read_calls(reader, answer, tools)
            if (yield from reader.upto([TAG], answer.add_content)) is None:
                return

    def layout(self, lark: Lark) -> Layout:
        return Layout(before='{"name": "', middle='", "parameters": ', after="}", separator="; ")
