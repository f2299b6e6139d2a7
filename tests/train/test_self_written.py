"""User turns that the target writes itself, with a scripted target in place of an engine."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from specengine.core.config import ModelConfig
from specengine.core.errors import DataError, RequestError
from specengine.core.request import FinishReason
from specengine.lab.generate.chat import ChatFormat
from specengine.lab.generate.config import GenerationConfig
from specengine.lab.generate.dialogue_writer import Ask, DialogueResult, DialogueWriter, Reply
from specengine.lab.generate.filters import Dropped
from specengine.lab.generate.plans import Opening, Plan, Plans, read_openings
from specengine.lab.generate.words import ForbiddenTexts
from specengine.runner.loader.source import resolve_model
from specengine.runner.loader.tokenizer import load_tokenizer
from tests.train.chat_model import TEMPLATE, save_tokenizer

T = TypeVar("T")
END = 2  # <|im_end|>


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"), TEMPLATE)


def make_tokenizer(folder: Path, template: str | None) -> Any:
    from transformers import PreTrainedTokenizerFast

    save_tokenizer(folder, template)
    return PreTrainedTokenizerFast.from_pretrained(folder)


class Target:
    """Says what the script says, and keeps what it was asked."""

    def __init__(self, tokenizer: Any, *script: str) -> None:
        self.tokenizer = tokenizer
        self.script = list(script)
        self.asked: list[str] = []

    def run(self, dialogue: Generator[Ask, Reply, T]) -> T:
        try:
            ask = next(dialogue)
            while True:
                self.asked.append(self.tokenizer.decode(ask.prompt_ids))
                ask = dialogue.send(self.reply(ask))
        except StopIteration as end:
            result: T = end.value
            return result

    def reply(self, ask: Ask) -> Reply:
        """A text that ends in … goes on past its limit."""
        text = self.script.pop(0)
        ids = self.tokenizer(text.removesuffix("…"))["input_ids"]
        limit = ask.sampling.max_tokens
        assert limit is not None
        if text.endswith("…") or len(ids) >= limit:
            return Reply(ids[:limit], FinishReason("length"))
        return Reply([*ids, END], FinishReason("stop", END))


def plan(opening: str = "", num_turns: int = 1) -> Plan:
    return Plan(7, "self-written", (), None, opening, num_turns, 0.0)


def dialogue_writer(tokenizer: Any, *forbidden: str, **settings: Any) -> DialogueWriter:
    config = GenerationConfig(**({"max_conversations": 1} | settings))
    return DialogueWriter(config, ChatFormat(tokenizer), ForbiddenTexts(forbidden, 8))


def test_the_target_writes_after_the_users_header(tokenizer: Any) -> None:
    target = Target(tokenizer, "What is a whale?")
    assert target.run(dialogue_writer(tokenizer).first_turn(plan())) == "What is a whale?"
    assert target.asked == ["<|im_start|>user\n"]


def test_openings_begin_the_turn(tokenizer: Any) -> None:
    target = Target(tokenizer, " poem about rain.")
    turn = target.run(dialogue_writer(tokenizer).first_turn(plan("Write a")))
    assert turn == "Write a poem about rain."
    assert target.asked == ["<|im_start|>user\nWrite a"]


def test_a_conversation_of_two_turns_is_one_document(tokenizer: Any) -> None:
    target = Target(tokenizer, "A whale is big.", "And a mouse?", "A mouse is small.")
    result = target.run(dialogue_writer(tokenizer).converse(plan(num_turns=2), "What is a whale?"))
    (document,) = result.documents
    expected = (
        "<|im_start|>user\nWhat is a whale?<|im_end|>\n<|im_start|>assistant\nA whale is big."
        "<|im_end|>\n<|im_start|>user\nAnd a mouse?<|im_end|>\n<|im_start|>assistant\n"
        "A mouse is small.<|im_end|>"
    )
    assert tokenizer.decode(document.tokens) == expected
    learned = tokenizer.decode(document.tokens[document.loss == 1])
    assert learned == "A whale is big.<|im_end|>A mouse is small.<|im_end|>"
    # the user's second turn is written after exactly what was said
    assert expected.startswith(target.asked[1])
    assert target.asked[1].endswith("<|im_end|>\n<|im_start|>user\n")
    assert target.asked[2] == expected.removesuffix("A mouse is small.<|im_end|>")


def test_an_answer_that_comes_back_in_other_tokens(tokenizer: Any) -> None:
    """Space and letter were generated apart, and are one token when the text comes back."""
    chat = dialogue_writer(tokenizer)
    dialogue = chat.converse(plan(num_turns=2), "What is a whale?")
    next(dialogue)
    apart = [tokenizer.convert_tokens_to_ids(piece) for piece in "AĠbĠc"]
    dialogue.send(Reply([*apart, END], FinishReason("stop", END)))
    follow = tokenizer("And then what?")["input_ids"]
    ask = dialogue.send(Reply([*follow, END], FinishReason("stop", END)))
    with pytest.raises(StopIteration) as end:
        dialogue.send(Reply([*follow, END], FinishReason("stop", END)))
    result: DialogueResult = end.value.value
    first, second = result.documents
    assert first.tokens[first.loss == 1].tolist() == [*apart, END]
    assert second.tokens[second.loss == 0].tolist() == ask.prompt_ids
    assert second.tokens[second.loss == 1].tolist() == [*follow, END]
    assert "A b c<|im_end|>" in tokenizer.decode(second.tokens)


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        ("Hi.", "prompt too short"),
        ("the cat " * 20, "prompt repetitive"),
        ("What is a whale…", "prompt too long"),
        ("How many eggs are there in the big basket now?", "prompt in the evaluation set"),
    ],
)
def test_bad_turns_are_dropped(tokenizer: Any, says: str, reason: str) -> None:
    writer = dialogue_writer(tokenizer, "Say how many eggs are there in the big basket")
    with pytest.raises(Dropped) as drop:
        Target(tokenizer, says).run(writer.first_turn(plan()))
    assert drop.value.reason == reason


def test_special_tokens_among_the_words(tokenizer: Any) -> None:
    """Written letter by letter they would turn into special tokens when they come back."""
    writer = dialogue_writer(tokenizer)
    dialogue = writer.first_turn(plan())
    next(dialogue)
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "whatĠisĠ<|im_end|>Ġnow"]
    with pytest.raises(Dropped, match="malformed"):
        dialogue.send(Reply([*letters, END], FinishReason("stop", END)))


def test_a_bad_second_turn_leaves_the_first(tokenizer: Any) -> None:
    target = Target(tokenizer, "A whale is big.", "Hm.")
    result = target.run(dialogue_writer(tokenizer).converse(plan(num_turns=2), "What is a whale?"))
    assert len(result.documents) == 1
    assert result.notes == ["later turn: prompt too short"]


def test_a_cut_answer_ends_the_conversation(tokenizer: Any) -> None:
    target = Target(tokenizer, "A whale is…")
    result = target.run(dialogue_writer(tokenizer).converse(plan(num_turns=2), "What is a whale?"))
    (document,) = result.documents
    assert tokenizer.decode(document.tokens[document.loss == 1]) == "A whale is"


def test_endless_answers_are_cut(tokenizer: Any) -> None:
    target = Target(tokenizer, "Well," + " no more" * 60 + "…")
    result = target.run(dialogue_writer(tokenizer).converse(plan(), "What is a whale?"))
    (document,) = result.documents
    answer = tokenizer.decode(document.tokens[document.loss == 1])
    assert answer.startswith("Well, no more no more no more")
    assert len(answer) < 60, "three times over says it all"


def test_short_answers_are_dropped(tokenizer: Any) -> None:
    with pytest.raises(Dropped, match="answer too short"):
        Target(tokenizer, "No").run(dialogue_writer(tokenizer).converse(plan(), "Is it?"))


def test_templates_that_cannot_be_written_for(tmp_path: Path) -> None:
    shouting = TEMPLATE.replace("m['content']", "m['content'] | upper")
    with pytest.raises(DataError, match="once and unchanged"):
        ChatFormat(make_tokenizer(tmp_path / "a", shouting))
    with pytest.raises(RequestError, match="no chat template"):
        ChatFormat(make_tokenizer(tmp_path / "b", None))


def test_turns_that_end_in_text(small_models: dict[str, Path]) -> None:
    source = resolve_model(ModelConfig(model=str(small_models["llama"])))
    chat = ChatFormat(load_tokenizer(source))
    assert chat.turn_end.texts == ("\n",)
    assert chat.turn_end.token_ids == ()


@pytest.fixture
def make_plans() -> Callable[..., Plans]:
    def make(**settings: Any) -> Plans:
        config = GenerationConfig(**({"max_conversations": 400} | settings))
        return Plans(config, [], [Opening("a", "One"), Opening("b", "Two"), Opening("b", "Three")])

    return make


def test_plans_follow_the_settings(make_plans: Callable[..., Plans]) -> None:
    plans = make_plans(openings_share=0.5, second_turn_share=0.25, temperatures=(0.0, 1.0))
    all_plans = [one for number in range(400) if (one := plans[number]) is not None]
    assert plans[400] is None
    opened = [one for one in all_plans if one.opening]
    assert 140 < len(opened) < 260
    assert {one.opening for one in opened} == {"One", "Two", "Three"}
    ones = sum(one.opening == "One" for one in opened)
    assert 0.35 < ones / len(opened) < 0.65, "categories count alike, whatever their size"
    assert 60 < sum(one.num_turns == 2 for one in all_plans) < 140
    assert 140 < sum(one.temperature == 0.0 for one in all_plans) < 260
    assert [plans[number] for number in range(50)] == all_plans[:50]
    other = make_plans(seed=1, openings_share=0.5)
    assert [other[number] for number in range(50)] != all_plans[:50]


def test_the_openings_that_come_along() -> None:
    openings = read_openings(None)
    assert len(openings) > 250
    assert len(set(openings)) == len(openings)
    assert {"python function", "math", "roleplay"} <= {one.category for one in openings}
    assert not any(one.opening.endswith(" ") for one in openings)


def test_openings_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "o.jsonl"
    path.write_text('{"category": "x", "opening": "Tell me "}\n')
    assert read_openings(str(path)) == [Opening("x", "Tell me")]
    path.write_text('{"category": "x"}\n')
    with pytest.raises(DataError, match=r"o\.jsonl:1 is no JSON object with"):
        read_openings(str(path))
    with pytest.raises(DataError, match="cannot read the openings"):
        read_openings(str(tmp_path / "absent"))
