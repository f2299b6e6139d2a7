from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specengine.core.errors import DataError
from specengine.draft.train.data.prompts import Prompt, read_prompts


def write(folder: Path, *rows: Any) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_turns(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"id": 81, "category": "writing", "turns": ["Write.", "Rewrite."]},
        {"turns": ["Janet’s ducks"]},
    )
    assert read_prompts(path) == [
        Prompt("81", "writing", ("Write.", "Rewrite.")),
        Prompt("2", "", ("Janet’s ducks",)),
    ]


def test_messages_leave_the_answers_out(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi there"},
        {"role": "user", "content": "Bye"},
    ]
    path = write(tmp_path, {"id": "a", "messages": messages}, {"messages": messages[1:2]})
    assert read_prompts(path) == [
        Prompt("a", "", ("Hello", "Bye"), system="Be brief."),
        Prompt("2", "", ("Hello",)),
    ]


def test_empty_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('\n{"turns": ["a"]}\n\n')
    assert [prompt.id for prompt in read_prompts(path)] == ["2"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([], "an object"),
        ({"prompt": "x"}, "neither a list `turns` nor a list `messages`"),
        ({"turns": "x"}, "neither a list"),
        ({"turns": []}, "one at least"),
        ({"turns": ["a", ""]}, "must be texts"),
        ({"turns": [3]}, "must be texts"),
        ({"messages": ["a"]}, "neither a list"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "roles"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "system"}]}, "beginning"),
        ({"messages": [{"role": "system", "content": 1}]}, "system message must be a text"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "one at least"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "must be texts"),
    ],
)
def test_what_does_not_fit_is_named_by_line(tmp_path: Path, row: Any, message: str) -> None:
    path = write(tmp_path, {"turns": ["fine"]}, row)
    with pytest.raises(DataError, match=rf"prompts\.jsonl:2.*{message}"):
        read_prompts(path)


def test_files_without_prompts(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="has no prompts"):
        read_prompts(tmp_path / "empty.jsonl")
    with pytest.raises(DataError, match="cannot read"):
        read_prompts(tmp_path / "absent.jsonl")
    (tmp_path / "broken.jsonl").write_text('{"turns": [')
    with pytest.raises(DataError, match=r"broken\.jsonl:1 is no JSON"):
        read_prompts(tmp_path / "broken.jsonl")
