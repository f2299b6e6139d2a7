"""Prompt files: JSONL with `turns`, or with chat `messages`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specengine.core.errors import DataError


@dataclass(frozen=True)
class Prompt:
    """What a user says, turn by turn; the answers between the turns are the model's to give."""

    id: str
    category: str  # "" for none
    turns: tuple[str, ...]  # at least one
    system: str | None = None  # None: what the chat template puts there by itself


def read_prompts(path: Path | str) -> list[Prompt]:
    """One JSON object a line: `turns`, a list of the user's turns, or `messages`, a conversation of
    roles system, user and assistant whose answers are left out. `id` and `category` are optional;
    a line without id gets its number.

    Raises DataError naming the line that does not fit, and for a file without prompts.
    """
    path = Path(path)
    prompts = [_prompt(line, f"{path}:{number}", number) for number, line in _lines(path)]
    if not prompts:
        raise DataError(f"{path} has no prompts; put one JSON object with `turns` on each line")
    return prompts


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the prompts {path}: {error}") from error


def _prompt(line: str, place: str, number: int) -> Prompt:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{place} is no JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{place}: an object with `turns` or `messages` is wanted")
    system, turns = _turns(row, place)
    if not turns or any(not isinstance(turn, str) or not turn.strip() for turn in turns):
        raise DataError(f"{place}: the user's turns must be texts, one at least")
    return Prompt(
        id=str(row.get("id", number)),
        category=str(row.get("category") or ""),
        turns=tuple(turns),
        system=system,
    )


def _turns(row: dict[str, Any], place: str) -> tuple[str | None, list[Any]]:
    """-> (system message, user turns)."""
    if isinstance(turns := row.get("turns"), list):
        return None, turns
    messages = row.get("messages")
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise DataError(f"{place} has neither a list `turns` nor a list `messages`")
    roles = [one.get("role") for one in messages]
    unknown = set(roles) - {"system", "user", "assistant"}
    if unknown or "system" in roles[1:]:
        raise DataError(
            f"{place}: messages are one of the system's at most, at the beginning, then the "
            f"user's and the assistant's; found the roles {roles}"
        )
    has_system = roles[:1] == ["system"]
    if has_system and not isinstance(messages[0].get("content"), str):
        raise DataError(f"{place}: the system message must be a text")
    system = messages[0]["content"] if has_system else None
    return system, [one.get("content") for one in messages if one["role"] == "user"]
