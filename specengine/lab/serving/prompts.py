"""The bodies of requests: random tokens or words, prompt sets, or lines of a file."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from specengine.core.errors import ConfigError
from specengine.core.paths import user_path
from specengine.lab.accept.prompts import PromptSet, find_prompt_sets

PATHS = {"ids": "/completions", "text": "/completions", "chat": "/chat/completions"}
_SAID = "the river is green and the stone under a small window was silver until morning came again"
_WORDS = tuple(_SAID.split())

Prompt = str | list[int] | list[dict[str, Any]]  # text, token ids, messages (of sets)


@dataclass(frozen=True)
class Requests:
    """What is asked. send: a key of PATHS. sets: of prompts, taken in turn; none for random ones.

    prompt_len, output_len: tokens (of random words, words); spread: each is drawn from length ×
    (1 ± spread). vocab_size: random ids lie below it. extra: further fields of each body.
    """

    send: str = "ids"
    sets: tuple[PromptSet, ...] = ()
    lines: tuple[Prompt, ...] = ()  # of files of ready prompts
    prompt_len: int = 512
    output_len: int = 128
    spread: float = 0.0
    vocab_size: int = 1000
    temperature: float = 0.0
    ignore_eos: bool = True
    extra: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def source(self, model: str, name: str) -> Callable[[], bytes]:
        """Gives one body after another. name: of the point of load, whose random prompts are
        no other's, so that no prefix cache helps."""
        rng, at = random.Random(f"{self.seed} {name}"), 0
        ready = [*self.lines, *(self._of_set(one) for pack in self.sets for one in pack.prompts)]
        if ready:
            random.Random(self.seed).shuffle(ready)

        def make() -> bytes:
            nonlocal at
            prompt = ready[at % len(ready)] if ready else self._random(rng)
            at += 1
            return self._body(model, prompt, self._length(rng, self.output_len))

        return make

    def _random(self, rng: random.Random) -> Prompt:
        length = self._length(rng, self.prompt_len)
        if self.send == "ids":
            return [rng.randrange(1, self.vocab_size) for _ in range(length)]
        text = " ".join(rng.choices(_WORDS, k=length))
        return text if self.send == "text" else [{"role": "user", "content": text}]

    def _of_set(self, prompt: Any) -> Prompt:
        if self.send == "text":
            return str(prompt.turns[0])
        system = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
        return [*system, {"role": "user", "content": prompt.turns[0]}]

    def _length(self, rng: random.Random, length: int) -> int:
        if not self.spread:
            return length
        return max(
            1, rng.randint(round(length * (1 - self.spread)), round(length * (1 + self.spread)))
        )

    def _body(self, model: str, prompt: Prompt, max_tokens: int) -> bytes:
        if self.send == "chat" and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        body: dict[str, Any] = {
            "model": model,
            ("messages" if self.send == "chat" else "prompt"): prompt,
            "max_tokens": max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        return orjson.dumps(body | self.extra)


def check_send(send: str, sets: Sequence[PromptSet], lines: Sequence[Prompt]) -> None:
    """Raises ConfigError where these prompts cannot be sent like this."""
    if sets and send == "ids":
        raise ConfigError("--send ids: prompt sets are texts; say --send chat or --send text")
    for line in lines:
        if isinstance(line, str) == (send == "ids"):
            kind = "a text" if send == "ids" else "token ids"
            raise ConfigError(f"--send {send}: a prompt of the file is {kind}")


def find_prompts(
    names: Sequence[str], data_dir: Path | None
) -> tuple[list[PromptSet], list[Prompt]]:
    """Prompt sets by name or path, and the prompts of files whose lines have `prompt`: a text or
    token ids. Raises ConfigError or DataError."""
    lines: list[Prompt] = []
    others = []
    for name in names:
        found = _ready_lines(user_path(name))
        lines += found
        if not found:
            others.append(name)
    return (find_prompt_sets(others, data_dir) if others else []), lines


def _ready_lines(path: Path) -> list[Prompt]:
    """None where it is no such file."""
    if not path.is_file():
        return []
    found: list[Prompt] = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError:
                return []  # the reader of prompt sets says what is wrong
            if not isinstance(row, dict) or "prompt" not in row:
                if found:
                    raise ConfigError(f"{path}:{number} has no `prompt`, as the lines before have")
                return []
            found.append(_ready(row["prompt"], f"{path}:{number}"))
    return found


def _ready(prompt: Any, place: str) -> Prompt:
    is_ids = isinstance(prompt, list) and all(isinstance(one, int) for one in prompt)
    if not prompt or not (isinstance(prompt, str) or is_ids):
        raise ConfigError(f"{place}: `prompt` is to be a text or a list of token ids")
    return list(prompt) if is_ids else str(prompt)
