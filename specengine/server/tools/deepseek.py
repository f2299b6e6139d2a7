"""DeepSeek V3 and V3.1. Both write calls between special tokens; V3 names the kind of tool before
the separator, and fences the arguments."""

from __future__ import annotations

from specengine.server.parsing.answer import ParsedAnswer
from specengine.server.parsing.reader import Reader, Steps
from specengine.server.tools.format import Layout, ToolFormat, Tools
from specengine.server.tools.json_call import read_arguments
from specengine.server.tools.lark import Lark

OPEN, CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
START, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE, FENCE_END = "```json", f"```{END}"


class DeepseekV31(ToolFormat):
    markers = OPEN, CLOSE, START, SEPARATOR, END
    signs: tuple[str, ...] = (OPEN,)

    def read(self, reader: Reader, answer: ParsedAnswer, tools: Tools) -> Steps[None]:
        while (yield from reader.upto([OPEN], answer.add_content)) is not None:
            opening = OPEN  # shown where no call follows it
            yield from reader.skip_space()
            while (yield from reader.take(START)):
                if not (yield from self._read_call(reader, answer)):
                    opening += START
                    break
                opening = ""
                yield from reader.skip_space()
            answer.add_content(opening)
            yield from reader.take(CLOSE)

    def _read_call(self, reader: Reader, answer: ParsedAnswer) -> Steps[bool]:
        name = yield from _read_name(reader, SEPARATOR)
        if name is None:
            return False
        answer.open_call(name)
        yield from _read_arguments(reader, answer)
        return True

    def layout(self, lark: Lark) -> Layout:
        return Layout(
            open=OPEN, before=START, middle=SEPARATOR, after=END, close=CLOSE, trigger=OPEN
        )


class DeepseekV3(DeepseekV31):
    signs = OPEN, FENCE

    def _read_call(self, reader: Reader, answer: ParsedAnswer) -> Steps[bool]:
        reader.mark()
        if not (yield from reader.take("function" + SEPARATOR)):
            reader.back()
            return False
        name = yield from _read_name(reader, "\n")
        if name is None:
            reader.back()
            return False
        reader.keep()
        answer.open_call(name)
        yield from reader.skip_space()
        yield from reader.take(FENCE)
        yield from _read_arguments(reader, answer)
        return True

    def layout(self, lark: Lark) -> Layout:
        return Layout(
            open=OPEN,
            before=f"{START}function{SEPARATOR}",
            middle=f"\n{FENCE}\n",
            after=f"\n{FENCE_END}",
            separator="\n",
            close=CLOSE,
            trigger=OPEN,
        )


def _read_arguments(reader: Reader, answer: ParsedAnswer) -> Steps[None]:
    """Arguments, and what ends the call."""
    ends = FENCE_END, END
    if (yield from read_arguments(reader, answer.add_arguments, ends, takes_text=False)):
        yield from reader.skip_space()
        yield from reader.take("```")
        yield from reader.skip_space()
        yield from reader.take(END)
    answer.close_call()


def _read_name(reader: Reader, end: str) -> Steps[str | None]:
    """The text before `end`; None, and nothing is taken, where it is empty or never ends."""
    pieces: list[str] = []
    reader.mark()
    mark = yield from reader.upto([end, END, CLOSE], pieces.append)
    name = "".join(pieces).strip()
    if mark != end or not name:
        reader.back()
        return None
    reader.keep()
    return name
