"""Text for targets: conversations out of files and data sets, in the ids of a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specengine.core.errors import ConfigError, DataError
from specengine.draft.train.config import TrainConfig, load_config
from specengine.draft.train.conversations import Conversation, read_conversations, tokenize
from specengine.draft.train.data.dataset import TokenDataset
from specengine.draft.train.loop import Trainer
from specengine.draft.train.target import TargetConfig, make_target_task, prepare_text
from specengine.draft.train.tokenizer import train_tokenizer
from specengine.engine.chat_template import render_chat
from tests.train.training_runs import ONE

TURNS = ["Hi there", "Hello!", "Count to three", "1, 2, 3"]
ROLES = ["user", "assistant", "user", "assistant"]


def conversation(*turns: str) -> Conversation:
    pairs = zip(ROLES, turns, strict=False)
    return [{"role": role, "content": content} for role, content in pairs]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(TURNS * 3, 300, 256)


def write_lines(path: Path, conversations: list[Conversation]) -> Path:
    lines = [json.dumps({"messages": one}) for one in conversations]
    path.write_text("\n".join(lines) + "\n")
    return path


def tokenized(
    conversations: Iterator[Conversation],
    tokenizer: Any,
    directory: Path,
    max_positions: int = 128,
    name: str = "tiny",
) -> TokenDataset:
    return tokenize(conversations, tokenizer, directory, name, {"max_positions": max_positions})


def small_run(output: Path, text: Path, *overrides: str) -> TrainConfig:
    settings = {
        "run.output": output,
        "run.device": "cpu",
        "task.text": text,
        "task.vocab_size": 300,
        "task.hidden_size": 16,
        "task.intermediate_size": 16,
        "task.num_layers": 1,
        "task.num_heads": 2,
        "task.max_positions": 128,
        "data.batch_tokens": 256,
        "data.held_out": 0.2,
        "schedule.max_steps": 4,
    }
    given = [f"{key}={value}" for key, value in settings.items()]
    return load_config(TargetConfig, None, [*given, *overrides])


def test_answers_are_what_is_generated(tmp_path: Path, tokenizer: Any) -> None:
    system = {"role": "system", "content": "Be brief."}
    lines = write_lines(tmp_path / "text.jsonl", [[system, *conversation(*TURNS)]])
    data = tokenized(read_conversations(lines), tokenizer, tmp_path / "data")
    (document,) = data.documents
    messages = conversation(*TURNS[:3])
    prompt = render_chat(tokenizer, messages[:1])
    assert document.tokens[: len(prompt)].tolist() == prompt
    learned = document.tokens[document.loss.astype(bool)].tolist()
    assert tokenizer.decode(learned) == "Hello!<|im_end|>1, 2, 3<|im_end|>"
    second = render_chat(tokenizer, messages)
    assert document.tokens[: len(second)].tolist() == second
    assert not document.loss[-1]  # the line break of the template


def test_long_conversations_are_cut_and_empty_ones_left_out(tmp_path: Path, tokenizer: Any) -> None:
    texts = [conversation("Hi", "Hello! " * 30), conversation("Hi " * 90, "Hello!")]
    data = tokenized(iter(texts), tokenizer, tmp_path / "data", 40)
    assert [len(document) for document in data.documents] == [40]
    assert data.manifest.counts["cut"] == 2
    assert data.manifest.counts["without_answer"] == 1


def test_tokenizers_without_a_template_are_refused(tmp_path: Path) -> None:
    plain = train_tokenizer(TURNS, 300, 64)
    plain.chat_template = None
    with pytest.raises(ConfigError, match="the tokenizer has no chat template"):
        tokenized(iter([conversation(*TURNS)]), plain, tmp_path)


def test_templates_that_rewrite_the_past_are_refused(tmp_path: Path) -> None:
    odd = train_tokenizer(TURNS, 300, 64)
    odd.chat_template = "{{ messages | length }}" + odd.chat_template
    with pytest.raises(ConfigError, match="renders earlier turns otherwise"):
        tokenized(iter([conversation(*TURNS)]), odd, tmp_path)


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"turns": ["a"]}', '{"messages": [{"role": "user"}]}']
)
def test_lines_that_do_not_fit_are_named(tmp_path: Path, line: str) -> None:
    path = write_lines(tmp_path / "text.jsonl", [conversation(*TURNS)])
    path.write_text(path.read_text() + line)
    with pytest.raises(DataError, match=r"text\.jsonl:2: an object with `messages`"):
        list(read_conversations(path))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read the conversations"):
        list(read_conversations(tmp_path / "none.jsonl"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task.text=none"], "no data: name task.text"),
        (["data.path=x"], "data.path is in the ids of some tokenizer"),
        (["task.text=none", "data.path=x"], "data.path is in the ids of some tokenizer"),
        (["task.tokenizer=nowhere"], "cannot read the tokenizer nowhere"),
    ],
)
def test_what_names_no_text(tmp_path: Path, overrides: list[str], message: str) -> None:
    config = small_run(tmp_path / "run", tmp_path / "text.jsonl", *overrides)
    with pytest.raises(ConfigError, match=message):
        prepare_text(config, ONE)


def test_a_target_learns_from_what_another_wrote(tmp_path: Path) -> None:
    """Text -> a target -> a data set in its ids -> another target with a tokenizer of its own."""
    texts = [conversation(f"Say {i}", " ".join(8 * [str(i)])) for i in range(60)]
    lines = write_lines(tmp_path / "text.jsonl", texts)
    config = small_run(tmp_path / "first", lines)
    text = prepare_text(config, ONE)
    task = make_target_task(config, text.tokenizer)
    outcome = Trainer(task, text.dataset, config, ONE).run()
    assert outcome.held_out["loss"] < 5.7  # ln 300, before the first step

    where, name = tmp_path / "data", str(outcome.export)
    copied = tokenized(read_conversations(lines), text.tokenizer, where, name=name)
    config = small_run(tmp_path / "second", tmp_path / "data", "task.vocab_size=280")
    second = prepare_text(config, ONE)
    assert len(second.tokenizer) == 280
    pairs = zip(copied.documents, second.dataset.documents, strict=True)
    for ours, theirs in pairs:
        texts_of = [
            tokenizer.decode(document.tokens.tolist())
            for tokenizer, document in ((text.tokenizer, ours), (second.tokenizer, theirs))
        ]
        assert texts_of[0] == texts_of[1]
    assert prepare_text(config, ONE).dataset.manifest == second.dataset.manifest
    with pytest.raises(
        ConfigError, match=r"was made with task\.vocab_size=280, and this run has 290"
    ):
        prepare_text(small_run(tmp_path / "second", tmp_path / "data", "task.vocab_size=290"), ONE)
