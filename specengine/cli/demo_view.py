"""What the demo shows in the terminal."""

from __future__ import annotations

import json
import shlex

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from specengine.cli.chat_client import Endpoint, Reply, ask


class DemoView:
    """endpoints: the first one without speculation."""

    def __init__(self, endpoints: list[Endpoint], max_tokens: int) -> None:
        self.endpoints = endpoints
        self.max_tokens = max_tokens
        self.console = Console()

    def introduce(self) -> None:
        """Name the endpoints, and ask each something short, so that all are warm."""
        for endpoint in self.endpoints:
            self.console.print(f"{endpoint.url}  {endpoint.model}, {endpoint.title}")
            ask(endpoint, "Say hi.", 4, lambda text: None)

    def compare(self, title: str, prompt: str) -> list[Reply]:
        """Ask one endpoint after the other, and show what they say while they say it."""
        texts = [""] * len(self.endpoints)
        replies = []
        with Live(console=self.console, refresh_per_second=4) as live:
            for place, endpoint in enumerate(self.endpoints):

                def show(text: str, place: int = place) -> None:
                    texts[place] = text
                    live.update(self._side_by_side(title, texts))

                replies.append(ask(endpoint, prompt, self.max_tokens, show))
        self.console.print()
        return replies

    def summarise(self, replies: dict[str, list[Reply]]) -> None:
        table = Table(title="the same prompts, greedy, one at a time")
        for column in ("prompt", "tokens", "", "same text", "accepted length", "tok/s", "speed-up"):
            table.add_column(column, no_wrap=column == "")
        for title, (plain, *drafted) in replies.items():
            rate = plain.tokens_per_second
            table.add_row(
                title, str(plain.num_tokens), self.endpoints[0].title, "", "", f"{rate:.1f}"
            )
            for endpoint, reply in zip(self.endpoints[1:], drafted, strict=True):
                table.add_row("", "", endpoint.title, *_compared(reply, plain))
            table.add_section()
        self.console.print(table)
        self.console.print(
            "accepted length: tokens a round, the bonus token included. NGRAM gains where an "
            "answer repeats what was said before; a drafter that was trained for the model gains "
            "elsewhere too.\n"
        )

    def invite(self) -> None:
        endpoint = self.endpoints[1]
        body = shlex.quote(json.dumps(endpoint.body("Say hello.", 64)))
        self.console.print("The endpoints stay open until Ctrl-C. Try:\n")
        print(
            f"curl {endpoint.url}/v1/chat/completions -H 'Content-Type: application/json' "
            f"-d {body}\n",
            flush=True,
        )

    def _side_by_side(self, title: str, texts: list[str]) -> Table:
        grid = Table.grid(expand=True)
        for _ in texts:
            grid.add_column(ratio=1)
        grid.add_row(
            *(
                Panel(escape(text), title=f"{title}: {endpoint.title}", title_align="left")
                for text, endpoint in zip(texts, self.endpoints, strict=True)
            )
        )
        return grid


def _compared(reply: Reply, plain: Reply) -> list[str]:
    return [
        "yes" if plain.text == reply.text else "[bold red]NO[/]",
        f"{reply.accepted_length:.2f}",
        f"{reply.tokens_per_second:.1f}",
        f"{reply.tokens_per_second / plain.tokens_per_second:.2f}x",
    ]
