"""Lists of prompts at /generate, and parameters of each, as SGLang's clients send them."""

from __future__ import annotations

import json
from typing import Any

import pytest

PATH = "/generate"
TEXT = "Hi, é😀 there"


def ask(site: Any, **fields: Any) -> list[Any]:
    answer = site.post(PATH, **fields)
    assert answer.status_code == 200, answer.text
    found: list[Any] = answer.json()
    assert isinstance(found, list)
    return found


def events_of(site: Any, **fields: Any) -> list[Any]:
    text = site.post(PATH, stream=True, **fields).text
    *events, end = [line.removeprefix("data: ") for line in text.strip().split("\n\n")]
    assert end == "[DONE]"
    return [json.loads(one) for one in events]


@pytest.mark.parametrize("prompts", [{"text": ["a", "b"]}, {"input_ids": [[64], [65]]}], ids=str)
def test_each_prompt_has_parameters_of_its_own_in_order(
    site: Any, engine: Any, prompts: Any
) -> None:
    params = [
        {"max_new_tokens": 2, "temperature": 0.5, "regex": "a+"},
        {"max_new_tokens": 5, "stop": ["x"]},
    ]
    answers = ask(site, **prompts, sampling_params=params, priority=3)
    assert [one["meta_info"]["completion_tokens"] for one in answers] == [2, 5]
    by_prompt = dict(zip(engine.prompts, engine.samplings, strict=True))
    first, second = by_prompt["a"], by_prompt["b"]
    assert (first.max_tokens, first.temperature, first.grammar.kind) == (2, 0.5, "regex")
    assert (second.max_tokens, second.temperature, second.stop) == (5, 1.0, ("x",))
    assert second.grammar is None
    assert first.priority == second.priority == 3


def test_more_grammars_than_can_wait_are_refused(site: Any, engine: Any) -> None:
    fields = {"text": ["a"] * 65, "sampling_params": [{"regex": f"a{{{n}}}"} for n in range(65)]}
    error = site.refusal(PATH, 400, **fields)
    assert (error["param"], error["code"]) == ("sampling_params", "limit_exceeded")
    assert "at most 64 are taken at once (--max-queued-grammars); send" in error["message"]
    assert engine.samplings == []
    fields["sampling_params"][-1] = fields["sampling_params"][0]
    assert len(ask(site, **fields)) == 65


def test_one_object_of_parameters_holds_for_all_prompts(site: Any, engine: Any) -> None:
    answers = ask(site, text=["a", "b", "c"], sampling_params={"max_new_tokens": 2})
    assert [one["meta_info"]["completion_tokens"] for one in answers] == [2, 2, 2]


def test_logprobs_of_each_prompt_as_it_asks_for_them(site: Any, engine: Any) -> None:
    first, second, third = ask(
        site,
        text=["abc", "abc", "abc"],
        sampling_params={"max_new_tokens": 1},
        return_logprob=[True, False, True],
        logprob_start_len=[1, 0, -1],
        top_logprobs_num=[0, 2, 2],
    )
    meta = first["meta_info"]
    assert [one[1] for one in meta["input_token_logprobs"]] == [65, 66]
    assert meta["output_token_logprobs"] == [[-0.39, 39, None]]
    assert "output_top_logprobs" not in meta
    assert not {one for one in second["meta_info"] if "logprobs" in one}
    meta = third["meta_info"]
    assert meta["input_token_logprobs"] == meta["input_top_logprobs"] == []
    assert [len(one) for one in meta["output_top_logprobs"]] == [2]


def test_prompts_that_are_scored_alone_beside_one_that_is_completed(site: Any, engine: Any) -> None:
    params = [{"max_new_tokens": 0}, {"max_new_tokens": 3}]
    scored, completed = ask(
        site, text=["abc", "de"], sampling_params=params, return_logprob=True, logprob_start_len=0
    )
    assert (scored["text"], scored["output_ids"]) == ("", [])
    assert [one[1] for one in scored["meta_info"]["input_token_logprobs"]] == [64, 65, 66]
    assert len(completed["output_ids"]) == 3
    assert [one[1] for one in completed["meta_info"]["input_token_logprobs"]] == [67, 68]


@pytest.mark.parametrize(
    ("rid", "names"),
    [("mine", ["mine_0", "mine_1"]), (["b", "a"], ["b", "a"]), (None, None)],
)
@pytest.mark.parametrize("stream", [False, True])
def test_ids_are_those_that_the_client_gave(
    site: Any, engine: Any, stream: bool, rid: Any, names: list[str] | None
) -> None:
    fields = {"text": ["a", "b"], "rid": rid}
    if stream:
        answers = [{}, {}]
        for one in events_of(site, **fields):
            answers[one["index"]] = one
    else:
        answers = ask(site, **fields)
    told = [one["meta_info"]["id"] for one in answers]
    assert told == names if names else len(set(told)) == 2
    if isinstance(rid, list):
        labels = {rid.partition(":")[0] for rid in engine.rids}
        assert labels == {"a", "b"}


def test_events_of_a_list_carry_their_place(site: Any, engine: Any) -> None:
    params = [{"max_new_tokens": 2, "n": 2}, {"max_new_tokens": 9, "n": 2}]
    last: dict[int, Any] = {}
    for one in events_of(site, text=["a", "b"], sampling_params=params):
        assert one["text"].startswith(last.get(one["index"], {"text": ""})["text"])
        last[one["index"]] = one
    assert sorted(last) == [0, 1, 2, 3]
    counts = [last[place]["meta_info"]["completion_tokens"] for place in range(4)]
    assert counts == [2, 2, 9, 9]


def test_each_prompt_tells_how_long_it_took_itself(site: Any, engine: Any) -> None:
    engine.delay = 0.02  # seconds before each chunk, of which the second prompt has more
    params = [{"max_new_tokens": 1}, {"max_new_tokens": 12}]
    first, second = ask(site, text=["a", "b"], sampling_params=params)
    times = [one["meta_info"]["e2e_latency"] for one in (first, second)]
    assert times[1] - times[0] > 0.02


def test_choices_of_a_prompt_stand_beside_each_other(site: Any, engine: Any) -> None:
    answers = ask(site, text=["ab", "c"], sampling_params={"n": 2})
    assert [one["text"] for one in answers] == [TEXT, TEXT + "!"] * 2
    assert [one["meta_info"]["prompt_tokens"] for one in answers] == [2, 2, 1, 1]


def test_tokens_of_each_prompt_are_told_where_asked(site: Any, engine: Any) -> None:
    answers = ask(site, text=["ab", "c"], sampling_params={"n": 2}, return_prompt_token_ids=True)
    assert [one["prompt_token_ids"] for one in answers] == [[64, 65], [64, 65], [66], [66]]
    assert "prompt_token_ids" not in ask(site, text=["ab"])[0]


TWO = {"text": ["ab", "c"]}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        (TWO | {"sampling_params": [{}]}, "sampling_params", "has 1 entries for 2 prompts"),
        (TWO | {"rid": ["a", "b", "c"]}, "rid", "has 3 entries for 2 prompts"),
        (TWO | {"return_logprob": []}, "return_logprob", "has 0 entries"),
        ({"text": "ab", "sampling_params": [{}]}, "sampling_params", "there is one prompt"),
        ({"input_ids": [1, 2], "rid": ["a", "b"]}, "rid", "there is one prompt"),
        (
            TWO | {"sampling_params": [{}, {"temperature": -1}]},
            "sampling_params[1].temperature",
            "temperature",
        ),
        (
            TWO | {"sampling_params": [{}, {"max_new_tokens": "x"}]},
            "sampling_params[1].max_new_tokens",
            "integer",
        ),
        (TWO | {"sampling_params": [{}, {"mood": 1}]}, "sampling_params[1].mood", "not a param"),
        (TWO | {"sampling_params": [{}, None]}, "sampling_params[1]", "valid dictionary"),
        (
            TWO | {"sampling_params": [{}, {"stop_regex": "x"}]},
            "sampling_params[1].stop_regex",
            "not supported",
        ),
        (
            TWO | {"sampling_params": [{}, {"regex": "a", "ebnf": "b"}]},
            "sampling_params[1].ebnf",
            "both ask",
        ),
        (TWO | {"sampling_params": [{}, {"n": 2}]}, "sampling_params[1].n", "the same n"),
        (TWO | {"rid": ["a", "a"]}, "rid", "the same"),
        (TWO | {"rid": ["a", 3]}, "rid", "must be a text"),
        ({"text": "", "sampling_params": []}, "sampling_params", "there is one prompt"),
        ({"text": "", "return_logprob": []}, "return_logprob", "there is one prompt"),
        ({"text": [], "rid": []}, "text", "list of texts"),
        (TWO | {"return_logprob": [True, 1]}, "return_logprob", "must be true or false"),
        (TWO | {"logprob_start_len": [0, -2]}, "logprob_start_len", "at least -1"),
        (TWO | {"top_logprobs_num": [0, 21]}, "top_logprobs_num", "0..20"),
        (TWO | {"top_logprobs_num": [0, 2]}, "top_logprobs_num", "return_logprob"),
        (
            TWO | {"return_logprob": True, "logprob_start_len": [0, 1]},
            "logprob_start_len",
            "behind the end",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_lists_that_do_not_fit_are_refused_before_work(
    site: Any, engine: Any, fields: dict[str, Any], param: str, words: str
) -> None:
    error = site.refusal(PATH, 400, **fields)
    assert error["param"] == param
    assert words in error["message"]
    assert engine.samplings == []
