"""Grammars through the real engine, on small random models: every output follows its grammar, and
speculation changes none."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from specengine import LLM, GrammarSpec, SamplingParams, SpecConfig
from specengine.core.errors import RequestError
from specengine.engine.llm import Generation
from specengine.engine.outputs import RequestOutput
from tests.draft.eagle_checkpoints import eagle3
from tests.halves import slow_but, thinned

CHAIN = SpecConfig(algorithm="NGRAM", adaptive=False, num_draft_tokens=6, ngram_min_match=1)
TREE = SpecConfig(
    algorithm="NGRAM", adaptive=False, num_draft_tokens=10, ngram_min_match=1, ngram_branches=3
)
SPECS = {"plain": None, "chain": CHAIN, "tree": TREE}

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "ok": {"type": "boolean"},
        "n": {"type": "array", "items": {"enum": [1, 22, 333]}, "maxItems": 3},
    },
    "required": ["name", "ok", "n"],
    "additionalProperties": False,
}
# Compact, as "x-guidance" can ask for: random models like whitespace too well.
TIGHT = SCHEMA | {"x-guidance": {"whitespace_pattern": "[ ]?"}}
LETTERS = "[ab]{40}"
MOST_TOKENS = 70  # the schema's answers end before
FORMS: dict[str, GrammarSpec | None] = {
    "schema": GrammarSpec.json_schema(TIGHT),
    "object": GrammarSpec.json_object(),
    "regex": GrammarSpec.regex("(ab|cd|[xyz]){8,20}"),
    "choice": GrammarSpec.choice(["yes", "no", "yes, but", "nobody"]),
    "lark": GrammarSpec.ebnf('start: "<" inner ">"\ninner: ("a" | "<" inner ">")*'),
    "none": None,
}
FORMS_WITHOUT_END = ("object", "none")
WITHOUT_END_TOKENS = 30
PROMPT = '{"name": "abc", "ok": true, "n": [1, 22]} {"name": "abc", "ok": true, "n": [1, 22]} '


def make(folder: Path, **flags: Any) -> LLM:
    return LLM(str(folder), **{"dtype": "float32", "max_total_tokens": 8192, **flags})


def most_tokens(form: str) -> int:
    return WITHOUT_END_TOKENS if form in FORMS_WITHOUT_END else MOST_TOKENS


def params(form: str, **more: Any) -> SamplingParams:
    return SamplingParams(
        **{"grammar": FORMS[form], "max_tokens": most_tokens(form), "seed": 5, **more}
    )


def run_all(llm: LLM, temperature: float) -> dict[str, Generation]:
    """Every form in one batch."""
    asked = [params(form, temperature=temperature) for form in FORMS]
    results = dict(zip(FORMS, llm.generate([PROMPT] * len(FORMS), asked), strict=True))
    llm.engine.scheduler.check_invariant()
    return results


def check(form: str, one: Generation) -> None:
    """A finished output is a sentence of its grammar, an unfinished one hit max_tokens."""
    text, reason = one.text, one.completions[0].finish_reason
    if reason.kind == "length":
        assert len(one.token_ids) == WITHOUT_END_TOKENS
        assert form in FORMS_WITHOUT_END
        return
    assert reason.kind == "stop"
    if form == "schema":
        check_schema(json.loads(text))
    elif form == "object":
        assert isinstance(json.loads(text), dict)
    elif form == "regex":
        assert re.fullmatch("(ab|cd|[xyz]){8,20}", text)
    elif form == "choice":
        assert text in ("yes", "no", "yes, but", "nobody")
    elif form == "lark":
        assert balanced(text)


def check_schema(value: Any) -> None:
    assert list(value) == ["name", "ok", "n"]
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 6
    assert isinstance(value["ok"], bool)
    assert len(value["n"]) <= 3
    assert all(item in (1, 22, 333) for item in value["n"])


def balanced(text: str) -> bool:
    """One pair of brackets around it all."""
    depth = 0
    for place, letter in enumerate(text):
        depth += {"<": 1, ">": -1, "a": 0}[letter]
        if depth == 0:
            return place == len(text) - 1
    return False


@pytest.fixture(scope="module")
def plain(small_models: dict[str, Path]) -> dict[float, dict[str, Generation]]:
    llm = make(small_models["llama"])
    return {temperature: run_all(llm, temperature) for temperature in (0.0, 1.0)}


@pytest.mark.parametrize(
    ("flags", "temperature"),
    thinned(
        2,
        [
            {},
            {"spec": CHAIN},
            {"spec": TREE},
            {"spec": TREE, "page_size": 16, "chunked_prefill_size": 16},
            {"spec": CHAIN, "enable_mixed_chunk": True, "chunked_prefill_size": 24},
            {"spec": CHAIN, "max_running_requests": 2},
        ],
        [0.0, 1.0],
    ),
    ids=lambda one: ", ".join(one) if isinstance(one, dict) else str(one),
)
def test_forms_with_and_without_speculation(
    flags: dict[str, Any],
    temperature: float,
    small_models: dict[str, Path],
    plain: dict[float, dict[str, Generation]],
) -> None:
    results = run_all(make(small_models["llama"], **flags), temperature)
    for form, one in results.items():
        check(form, one)
        assert one.token_ids == plain[temperature][form].token_ids, form
        reason = one.completions[0].finish_reason
        assert reason == plain[temperature][form].completions[0].finish_reason
    if "spec" in flags:
        assert sum(one.spec.num_accepted for one in results.values()) > 0


CHAINED: dict[str, Any] = {}
TREES: dict[str, Any] = {"eagle_topk": 3, "num_draft_tokens": 10}


@pytest.mark.parametrize(
    ("algorithm", "shape", "temperature"),
    thinned(2, ["STANDALONE", "EAGLE3"], [CHAINED, TREES], [0.0, 1.0]),
)
def test_drafters_with_a_model(
    algorithm: str,
    shape: dict[str, Any],
    temperature: float,
    small_models: dict[str, Path],
    tmp_path: Path,
    plain: dict[float, dict[str, Generation]],
) -> None:
    """They draft without the grammar, and see less verified than they proposed. Every two of the
    parameters meet; every three in make test-all."""
    folder = small_models["llama"]
    draft = folder if algorithm == "STANDALONE" else eagle3(tmp_path / "draft", folder)
    spec = SpecConfig(
        algorithm=algorithm, adaptive=False, draft_model_path=str(draft), num_steps=3, **shape
    )
    llm = make(folder, spec=spec)
    results, expected = run_all(llm, temperature), plain[temperature]
    assert {form: one.token_ids for form, one in results.items()} == {
        form: one.token_ids for form, one in expected.items()
    }
    assert llm.engine.stats().spec.num_drafts > 0


@pytest.mark.parametrize("name", slow_but(["plain", "tree"], SPECS))
def test_many_seeds_follow_the_schema(name: str, small_models: dict[str, Path]) -> None:
    asked = [params("schema", seed=seed, max_tokens=400) for seed in range(30)]
    llm = make(small_models["qwen2"], spec=SPECS[name])
    results = llm.generate([PROMPT] * 30, asked, progress=False)
    for one in results:
        assert one.completions[0].finish_reason.kind == "stop"
        check_schema(json.loads(one.text))
    assert len({one.text for one in results}) > 20


def test_the_choices_of_one_request_are_each_within_it(small_models: dict[str, Path]) -> None:
    llm = make(small_models["llama"], spec=CHAIN)
    (one,) = llm.generate([PROMPT], params("regex", n=6))
    texts = [completion.text for completion in one.completions]
    assert all(re.fullmatch("(ab|cd|[xyz]){8,20}", text) for text in texts)
    assert len(set(texts)) > 1


@pytest.fixture(scope="module")
def engines(small_models: dict[str, Path]) -> dict[str, LLM]:
    return {name: make(small_models["llama"], spec=spec) for name, spec in SPECS.items()}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(
    ("sampling", "text"),
    [
        ({"min_tokens": 12}, "a{12,30}"),
        ({"ignore_eos": True}, "a{30}"),
        ({"min_tokens": 50}, "a{30}"),
        ({"logit_bias": {0: 100.0}}, "a"),
        ({"logit_bias": {0: 100.0}, "min_tokens": 7}, "a{7}"),
    ],
    ids=str,
)
def test_how_long_an_output_gets(
    sampling: dict[str, Any], text: str, name: str, engines: dict[str, LLM]
) -> None:
    """Token 0 is the end: with a bias it comes as soon as it may."""
    asked = SamplingParams(grammar=GrammarSpec.regex("a{1,30}"), max_tokens=60, **sampling)
    (one,) = engines[name].generate(["aaaaaa"], asked)
    assert re.fullmatch(text, one.text)
    assert one.completions[0].finish_reason.kind == "stop"


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_stop_strings_and_tokens_cut_inside_a_grammar(
    spec: SpecConfig | None, small_models: dict[str, Path]
) -> None:
    llm = make(small_models["llama"], spec=spec)
    grammar = GrammarSpec.regex("(abc){20}")
    asked = SamplingParams(grammar=grammar, stop=("cab",), temperature=0.0)
    (one,) = llm.generate(["abcabcabc"], asked)
    assert one.text == "ab"
    assert one.completions[0].finish_reason.matched == "cab"
    (token,) = llm.tokenizer("c")["input_ids"]
    asked = SamplingParams(grammar=grammar, stop_token_ids=(token,), min_tokens=4)
    (one,) = llm.generate(["abcabcabc"], asked)
    assert one.text == "abcab"
    assert one.completions[0].finish_reason.matched == token


def test_logprobs_are_those_of_the_model_without_the_mask(small_models: dict[str, Path]) -> None:
    """What the grammar forbids keeps its probability: the chosen token may not be in the top."""
    results = []
    for spec in SPECS.values():
        llm = make(small_models["llama"], spec=spec)
        results += llm.generate([PROMPT], params("regex", logprobs=2, temperature=0.0))
    plain, *others = (one.completions[0].logprobs for one in results)
    assert any(entry.token not in [token for token, _ in entry.top] for entry in plain)
    for other in others:
        assert [entry.token for entry in other] == [entry.token for entry in plain]
        assert [entry.logprob for entry in other] == pytest.approx(
            [entry.logprob for entry in plain], abs=1e-4
        )


def test_drafts_outside_the_grammar_are_never_verified(small_models: dict[str, Path]) -> None:
    """What follows in the prompt is no letter of the grammar; without one, all of it is drafted."""
    llm = make(small_models["llama"], spec=CHAIN)
    prompt = "a1a1b1b1" * 4
    asked: dict[str, Any] = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    free, constrained = llm.generate(
        [prompt] * 2,
        [
            SamplingParams(**asked),
            SamplingParams(**asked, grammar=GrammarSpec.regex("([ab][23]){20}")),
        ],
    )
    assert free.spec.num_draft_tokens > 0
    assert re.fullmatch("([ab][23]){20}", constrained.text)
    forbidden = llm.tokenizer("1")["input_ids"]
    assert not set(forbidden) & set(constrained.token_ids)
    assert constrained.spec.num_accepted > 0


EIGHT = [f"{i}{i}{i}" for i in range(8)]
OF_LETTERS = SamplingParams(
    grammar=GrammarSpec.regex(LETTERS), max_tokens=60, temperature=1.0, seed=1
)


@pytest.fixture(scope="module")
def eight(small_models: dict[str, Path]) -> list[str]:
    outputs = make(small_models["qwen3"]).generate(EIGHT, OF_LETTERS)
    return [one.text for one in outputs]


@pytest.mark.parametrize("name", slow_but(["chain", "tree"], SPECS))
def test_retraction_changes_nothing(
    name: str, small_models: dict[str, Path], eight: list[str]
) -> None:
    """Requests that leave the memory in the middle of a sentence go on with it."""
    tight = make(small_models["qwen3"], spec=SPECS[name], max_total_tokens=180)
    tight.engine.scheduler.admission.demand.share = 0.0
    results = tight.generate(EIGHT, OF_LETTERS)
    assert tight.engine.scheduler.num_retractions > 0
    assert [one.text for one in results] == eight
    assert all(re.fullmatch(LETTERS, one.text) for one in results)
    tight.engine.scheduler.check_invariant()


def test_an_aborted_request_leaves_nothing(small_models: dict[str, Path]) -> None:
    llm = make(small_models["llama"], spec=CHAIN)
    engine = llm.engine
    prompt = llm.tokenizer(PROMPT)["input_ids"]
    engine.add_request("gone", prompt, params("object", n=2))
    engine.add_request("stays", prompt, params("choice"))
    outputs = engine.step()
    engine.abort("gone")
    while engine.has_work:
        outputs = engine.step()
    assert outputs[-1].text in ("yes", "no", "yes, but", "nobody")
    engine.scheduler.check_invariant()
    assert engine.stats().num_free_slots == engine.stats().num_slots


def test_a_grammar_that_does_not_compile_queues_nothing(small_models: dict[str, Path]) -> None:
    llm = make(small_models["llama"])
    with pytest.raises(RequestError, match="does not compile"):
        llm.generate(["a", "b"], SamplingParams(grammar=GrammarSpec.regex("(")))
    assert not llm.engine.has_work


class Breaks:
    """Follows any text, until its parser gives up after three tokens."""

    is_complete = False

    def __init__(self) -> None:
        self.count = 0
        self.has_failed = False

    @property
    def error(self) -> str | None:
        return "too many items" if self.has_failed else None

    def accept(self, token: int) -> bool:
        is_third = self.count == 2
        self.has_failed |= is_third
        self.count += not is_third
        return not is_third

    def take_back(self, count: int) -> None:
        self.count -= count

    def fill_mask(self, words: Any) -> None:
        words.fill(-1 if self.error is None else 0)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_grammar_that_fails_midway_fails_its_request_alone(
    spec: SpecConfig | None, small_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(small_models["llama"], spec=spec)
    (good,) = llm.generate([PROMPT], params("regex"))
    engine = llm.engine
    prompt = llm.tokenizer(PROMPT)["input_ids"]
    engine.add_request("good", prompt, params("regex"))
    monkeypatch.setattr(engine.parts.grammars, "start", lambda spec: Breaks())
    engine.add_request("bad", prompt, params("schema", ignore_eos=True))
    finished: dict[str, RequestOutput] = {}
    while engine.has_work:
        finished |= {out.rid: out for out in engine.step() if out.finish_reason is not None}
    reason = finished["bad"].finish_reason
    assert reason is not None
    assert reason.kind == "error"
    assert reason.message is not None
    assert reason.message.startswith("the grammar cannot go on after 3 tokens: it is too complex;")
    assert finished["good"].text == good.text
    engine.scheduler.check_invariant()
