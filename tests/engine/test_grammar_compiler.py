"""Grammar texts into states: what they accept, what is refused."""

from __future__ import annotations

import sys
import threading
import tomllib
from pathlib import Path

import pytest

from specengine.core.errors import RequestError
from specengine.core.grammar import GrammarSpec
from specengine.engine.grammar.compiler import (
    BYTES_A_CHARACTER,
    LEAST_VERSION,
    MAX_KEPT_BYTES,
    GrammarCompiler,
    release_of,
)
from tests.support.grammars import EOS, VOCAB, World, mask_of

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def world(small_models: dict[str, Path]) -> World:
    return World(small_models["llama"])


@pytest.mark.parametrize(
    ("spec", "text", "accepted", "complete"),
    [
        (GrammarSpec.regex("[ab]{2}c"), "abc", 3, True),
        (GrammarSpec.regex("[ab]{2}c"), "acb", 1, False),
        (GrammarSpec.regex("a+"), "aaa", 3, False),
        (GrammarSpec.regex("é+!"), "éé!", 5, True),
        (GrammarSpec.choice(["yes", "yesterday"]), "yes", 3, False),
        (GrammarSpec.choice(["yes", "yesterday"]), "yesterday", 9, True),
        (GrammarSpec.choice(['a"b\n\\', "😀"]), 'a"b\n\\', 5, True),
        (GrammarSpec.choice(['a"b\n\\', "😀"]), "😀", 4, True),
        (GrammarSpec.ebnf('start: "a" ("b"|"c")+ "d"'), "abcbd", 5, True),
        (GrammarSpec.ebnf('root ::= "a" ("b"|"c")+ "d"'), "abcbd", 5, True),
        (GrammarSpec.ebnf('start: "::=" /x ::= y/'), "::=x ::= y", 10, True),
        (GrammarSpec.json_object(), '{"a": [1, {"b": null}]}', 23, True),
        (GrammarSpec.json_object(), "[", 0, False),
        (GrammarSpec.json_schema(PERSON), '{"name": "Ann", "age": 42}', 26, True),
        (GrammarSpec.json_schema(PERSON), '{"age"', 2, False),
        (GrammarSpec.json_schema(PERSON), '{"name": "Ann", "age": 42, "x"', 25, False),
        (GrammarSpec.json_schema('{"enum": [1, "x"]}'), '"x"', 3, True),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_accepted(
    world: World, spec: GrammarSpec, text: str, accepted: int, complete: bool
) -> None:
    state = world.start(spec)
    count = 0
    for token in world.ids(text):
        if not state.accept(token):
            break
        count += 1
    assert count == accepted
    assert state.is_complete == complete
    assert state.error is None


def test_a_mask_is_what_accept_accepts(world: World) -> None:
    texts = ["", "{", '{"name"', '{"name": "A', '{"name": "A", "age": 4']
    for text in texts:
        state = world.start(GrammarSpec.json_schema(PERSON), text)
        accepted = set()
        for token in range(VOCAB):
            if state.accept(token):
                accepted.add(token)
                state.take_back(1)
        assert mask_of(state) == accepted, text


def test_the_end_is_allowed_where_the_grammar_can_end(world: World) -> None:
    state = world.start(GrammarSpec.regex("a+"))
    assert EOS not in mask_of(state)
    assert not state.accept(EOS)
    assert state.accept(world.token("a"))
    assert mask_of(state) == {EOS, world.token("a")}
    assert state.accept(EOS)
    assert state.is_complete
    assert not state.accept(EOS)


def test_take_back_returns_from_everywhere(world: World) -> None:
    """From the middle, from completeness, and from after the end token."""
    state = world.start(GrammarSpec.regex("a?b?"))
    before = mask_of(state)
    end = [EOS]
    for tokens in (end, world.ids("a") + end, world.ids("ab"), world.ids("b")):
        for count in range(len(tokens) + 1):
            assert all(state.accept(token) for token in tokens[:count])
            state.take_back(count)
            assert mask_of(state) == before
            assert not state.is_complete


def test_whitespace_is_bounded(world: World) -> None:
    state = world.start(GrammarSpec.json_object())
    assert all(state.accept(token) for token in world.ids("{" + " " * 64))
    assert not state.accept(world.token(" "))
    assert state.accept(world.token("}"))


def test_special_tokens_are_no_text(world: World) -> None:
    bos = world.tokenizer.bos_token_id
    assert bos not in mask_of(world.start(GrammarSpec.regex("(.|\n)*")))


def test_states_of_one_grammar_are_independent(world: World) -> None:
    spec = GrammarSpec.regex("ab")
    one, other = world.start(spec), world.start(spec)
    assert one.accept(world.token("a"))
    assert mask_of(other) == {world.token("a")}


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec.regex("("),
        GrammarSpec.regex("(?=a)"),
        GrammarSpec.regex("\ud800"),
        GrammarSpec.json_schema("{"),
        GrammarSpec.json_schema("5"),
        GrammarSpec.json_schema({"type": "nothing"}),
        GrammarSpec.json_schema({"$ref": "http://example.com/schema"}),
        GrammarSpec.json_schema({"type": "string", "minLength": 5, "maxLength": 2}),
        GrammarSpec.ebnf(""),
        GrammarSpec.ebnf("start: missing"),
        GrammarSpec.ebnf("root ::= missing"),
        GrammarSpec.choice(["\ud800"]),
    ],
    ids=lambda spec: ascii(spec.text)[:30],
)
def test_what_does_not_compile_is_refused(world: World, spec: GrammarSpec) -> None:
    named = GrammarSpec(spec.kind, spec.text, "response_format")
    with pytest.raises(RequestError, match="response_format does not compile") as error:
        world.compiler.start(named)
    assert error.value.param == "response_format"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            GrammarSpec.regex("a(?=b)"),
            r'invalid regex "a\(\?=b\)": look-around, .* is not supported$',
        ),
        (GrammarSpec.ebnf("start: /[/"), r'invalid regex "\[": unclosed character class$'),
        (
            GrammarSpec.json_schema({"type": "string", "pattern": "(?=b)"}),
            "invalid regex: look-around, .* is not supported$",
        ),
    ],
    ids=["regex", "grammar", "schema"],
)
def test_regex_is_refused_with_what_is_wrong_with_it(
    world: World, spec: GrammarSpec, message: str
) -> None:
    with pytest.raises(RequestError, match=f"does not compile: {message}"):
        world.compiler.start(spec)


def test_without_llguidance_the_extra_is_named(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"specengine\[grammar\]") as error:
        world.compiler.start(GrammarSpec.regex("not compiled before", "structured_outputs"))
    assert error.value.param == "structured_outputs"


@pytest.mark.parametrize("version", ["1.8.2", "0.7"])
def test_llguidance_that_is_too_old_is_refused_by_its_version(
    version: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specengine.engine.grammar.compiler.installed_version", lambda: version)
    with pytest.raises(RequestError, match=f"1.9 or newer, and {version} is installed") as error:
        world.compiler.start(GrammarSpec.regex("not compiled either", "structured_outputs"))
    assert error.value.param == "structured_outputs"


def test_versions_are_compared_by_their_numbers() -> None:
    assert release_of("1.8.2") < LEAST_VERSION <= release_of("1.9") < release_of("1.10.0rc1")


def test_least_version_is_the_one_that_the_extra_asks_for() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    least = ".".join(map(str, LEAST_VERSION))
    assert project["optional-dependencies"]["grammar"] == [f"llguidance>={least}"]


def test_a_model_without_an_end_is_refused(world: World) -> None:
    """End tokens past the vocabulary are none."""
    compiler = GrammarCompiler(world.tokenizer, VOCAB, frozenset({VOCAB}))
    with pytest.raises(RequestError, match="end-of-text"):
        compiler.start(GrammarSpec.regex("a"))


def test_few_large_grammars_are_kept(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their text, where nothing else is known of their memory; the last used stays."""
    most = 250 * BYTES_A_CHARACTER
    monkeypatch.setattr("specengine.engine.grammar.compiler.MAX_KEPT_BYTES", most)
    compiler = GrammarCompiler(world.tokenizer, VOCAB, frozenset({EOS}))
    a, b, c = (GrammarSpec.regex(letter * 100) for letter in "abc")
    for spec in (a, b, a, c):
        assert mask_of(compiler.start(spec)) == {world.token(spec.text[0])}
    kept = [spec for spec in (a, b, c) if compiler.compiled(spec) is not None]
    assert kept == [a, c]


def test_grammars_are_kept_by_the_memory_that_was_measured(world: World) -> None:
    """One of half of all memory would have the others go, and is not kept itself."""
    compiler = GrammarCompiler(world.tokenizer, VOCAB, frozenset({EOS}))
    a, b, c, d = (GrammarSpec.regex(letter) for letter in "abcd")
    for spec, part in ((a, 0.4), (b, 0.4), (c, 0.6), (d, 0.4)):
        assert mask_of(compiler.start(spec, int(part * MAX_KEPT_BYTES))) == {world.token(spec.text)}
    kept = [spec for spec in (a, b, c, d) if compiler.compiled(spec) is not None]
    assert kept == [b, d]


@pytest.mark.parametrize("vocab", [300, 400])
def test_vocabularies_of_model_and_tokenizer_may_differ(world: World, vocab: int) -> None:
    """Rows of the embedding without a token are never allowed, tokens without a row not known."""
    compiler = GrammarCompiler(world.tokenizer, vocab, frozenset({EOS}))
    state = compiler.start(GrammarSpec.regex("[^<]"))
    assert max(mask_of(state, vocab)) < 258


def test_threads_may_compile_together(world: World) -> None:
    compiler = GrammarCompiler(world.tokenizer, VOCAB, frozenset({EOS}))
    masks: list[set[int]] = []

    def work(letter: str) -> None:
        masks.extend(mask_of(compiler.start(GrammarSpec.regex(letter))) for _ in range(20))

    threads = [threading.Thread(target=work, args=(letter,)) for letter in "abab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(masks) == 80
    assert {frozenset(mask) for mask in masks} == {
        frozenset({world.token("a")}),
        frozenset({world.token("b")}),
    }
