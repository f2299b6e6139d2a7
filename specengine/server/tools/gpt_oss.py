"""GPT-OSS: messages in channels (the harmony format). `analysis` holds reasoning, `final` the
answer, `commentary` a preamble, or a call where its header has a recipient:
<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from specengine.server.parsing.answer import ParsedAnswer
from specengine.server.parsing.reader import Reader, Sink, Steps
from specengine.server.tools.format import AnswerFormat, Layout, Tools
from specengine.server.tools.lark import Lark

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class GptOss(AnswerFormat):
    markers = START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL
    signs = CHANNEL, MESSAGE
    has_parallel_calls = False

    def read(self, reader: Reader, answer: ParsedAnswer, tools: Tools) -> Steps[None]:
        while True:
            pieces: list[str] = []
            if (yield from reader.upto([MESSAGE], pieces.append)) is None:
                header = "".join(pieces)
                if CHANNEL not in header and START not in header:
                    answer.add_content(header)  # not the format at all
                return
            answer.cut()
            sink, is_call = _open("".join(pieces), answer, tools)
            yield from reader.upto([END, CALL, RETURN, START], sink)
            if is_call:
                answer.close_call()

    def layout(self, lark: Lark) -> Layout:
        return Layout(
            before=f"{CHANNEL}commentary to=functions.",
            middle=f" {CONSTRAIN}json{MESSAGE}",
        )

    def frame(self, lark: Lark, calls: str | None, body: str | None) -> str:
        text = lark.text()
        again = lark.literal(f"{END}{START}assistant")
        before = [
            f"{lark.literal(f'{CHANNEL}{name}{MESSAGE}')} {text}? {again}"
            for name in ("analysis", "commentary")
        ]
        final = f"{lark.literal(f'{CHANNEL}final{MESSAGE}')} {body}"
        last = [one for one in (calls, None if body is None else final) if one is not None]
        return f"({' | '.join(before)})* ({' | '.join(last)})"

    def template_turn(self, turn: Mapping[str, Any]) -> dict[str, Any]:
        """The template calls reasoning `thinking`, and takes it beside calls alone."""
        if turn["content"] or "reasoning_content" not in turn:
            return dict(turn)
        return {**turn, "thinking": turn["reasoning_content"]}


def _open(header: str, answer: ParsedAnswer, tools: Tools) -> tuple[Sink, bool]:
    """Where the text of a message goes, and whether it is the arguments of a call."""
    recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
    if recipient is not None and tools:
        answer.open_call(recipient[1])
        return answer.add_arguments, True
    is_reasoning = channel is not None and channel[1] == "analysis"
    return answer.add_reasoning if is_reasoning else answer.add_content, False
