"""/generate, as SGLang's clients use it."""

from __future__ import annotations

import json
from typing import Any

import pytest

PATH = "/generate"
TEXT = "Hi, é😀 there"
NUM_TOKENS = len(TEXT.encode()) + 1


def ask(site: Any, **fields: Any) -> Any:
    answer = site.post(PATH, **({"text": "abc"} | fields))
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_text_and_meta_info(site: Any, engine: Any) -> None:
    answer = ask(site, rid="mine")
    meta = answer["meta_info"]
    assert (answer["text"], len(answer["output_ids"])) == (TEXT, NUM_TOKENS)
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "stop", "matched": 256, "message": "gave up"}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (3, NUM_TOKENS)
    assert meta["cached_tokens"] == 5
    assert meta["e2e_latency"] > 0
    assert meta["spec_verify_ct"] > 0
    assert meta["spec_accept_length"] > 1
    assert meta["spec_num_correct_drafts"] == meta["spec_accept_token_num"] > 0
    assert meta["spec_num_proposed_drafts"] == meta["spec_draft_token_num"] > 0
    assert sum(meta["spec_correct_drafts_histogram"]) == meta["spec_verify_ct"]
    assert "output_token_logprobs" not in meta
    assert engine.samplings[0].max_tokens == 128


@pytest.mark.parametrize(
    ("fields", "seen", "is_list"),
    [
        ({"text": "ab"}, ["ab"], False),
        ({"text": ["ab", "c"]}, ["ab", "c"], True),
        ({"text": ["ab"]}, ["ab"], True),
        ({"text": None, "input_ids": [64, 65]}, ["ab"], False),
        ({"text": None, "input_ids": [[64], [65, 66]]}, ["a", "bc"], True),
        ({"text": "ab", "sampling_params": {"n": 2}}, ["ab"], True),
    ],
)
def test_forms_of_a_prompt(
    site: Any, engine: Any, fields: Any, seen: list[str], is_list: bool
) -> None:
    answer = ask(site, **fields)
    assert sorted(engine.prompts) == sorted(seen)
    assert isinstance(answer, list) == is_list
    if is_list:
        assert len(answer) == len(seen) * fields.get("sampling_params", {}).get("n", 1)


def test_sampling_params_by_sglangs_names(site: Any, engine: Any) -> None:
    params = {
        "max_new_tokens": 7,
        "min_new_tokens": 2,
        "temperature": 0.5,
        "sampling_seed": 3,
        "stop": "x",
        "stop_token_ids": [9],
        "no_stop_trim": True,
        "ignore_eos": True,
        "logit_bias": {"5": 1.5},
        "regex": "a+",
    }
    ask(site, sampling_params=params, priority=-2, speculative={"enabled": False})
    (sampling,) = engine.samplings
    assert (sampling.max_tokens, sampling.min_tokens, sampling.seed) == (7, 2, 3)
    assert (sampling.stop, sampling.stop_token_ids) == (("x",), (9,))
    assert sampling.include_stop_str_in_output
    assert sampling.ignore_eos
    assert sampling.logit_bias == {5: 1.5}
    assert sampling.grammar.kind == "regex"
    assert sampling.priority == -2
    assert not sampling.speculative.enabled


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(site: Any, engine: Any, stream: bool) -> None:
    fields = {
        "return_logprob": True,
        "logprob_start_len": 1,
        "top_logprobs_num": 2,
        "return_text_in_logprobs": True,
        "sampling_params": {"max_new_tokens": 2},
        "stream": stream,
    }
    if stream:
        text = site.post(PATH, text="abc", **fields).text
        events = [line.removeprefix("data: ") for line in text.strip().split("\n\n")]
        assert events[-1] == "[DONE]"
        answer = json.loads(events[-2])
    else:
        answer = ask(site, **fields)
    meta = answer["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 65, "b"], [-0.66, 66, "c"]]
    assert meta["input_top_logprobs"] == [None, [[-0.66, 66, "c"], [-0.67, 67, "d"]]]
    assert meta["output_token_logprobs"] == [[-0.39, 39, "H"], [-0.72, 72, "i"]]
    assert [len(one) for one in meta["output_top_logprobs"]] == [2, 2]
    assert meta["finish_reason"] == {"type": "length", "length": 2}
    assert meta["output_token_logprobs_length"] == 2


def test_no_logprobs_of_the_prompt_unless_asked(site: Any, engine: Any) -> None:
    meta = ask(site, return_logprob=True)["meta_info"]
    assert meta["input_token_logprobs"] == []
    assert meta["output_token_logprobs"][0] == [-0.39, 39, None]
    assert engine.samplings[0].prompt_logprobs is None


def test_no_new_tokens_score_the_prompt_alone(site: Any, engine: Any) -> None:
    fields = {"return_logprob": True, "logprob_start_len": 0}
    answer = ask(site, sampling_params={"max_new_tokens": 0}, **fields)
    assert (answer["text"], answer["output_ids"]) == ("", [])
    assert [one[1] for one in answer["meta_info"]["input_token_logprobs"]] == [64, 65, 66]
    assert answer["meta_info"]["output_token_logprobs"] == []


def test_a_stream_holds_all_text_so_far(site: Any, engine: Any) -> None:
    text = site.post(PATH, text=["a", "b"], stream=True).text
    *events, end = [line.removeprefix("data: ") for line in text.strip().split("\n\n")]
    assert end == "[DONE]"
    last: dict[int, str] = {}
    for one in map(json.loads, events):
        has_ended = one["meta_info"]["finish_reason"] is not None
        assert ("spec_accept_length" in one["meta_info"]) == has_ended
        assert one["text"].startswith(last.get(one["index"], ""))
        last[one["index"]] = one["text"]
    assert last == {0: TEXT, 1: TEXT}


def test_an_aborted_request_answers_with_what_it_has(site: Any, engine: Any) -> None:
    engine.final_kind = "abort"
    answer = ask(site)
    assert answer["text"] == TEXT
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": None}, "text"),
        ({"input_ids": [1]}, "text"),
        ({"text": []}, "text"),
        ({"text": ""}, "text"),
        ({"text": None, "input_ids": []}, "input_ids"),
        ({"text": None, "input_ids": ["a"]}, "input_ids"),
        ({"text": "x" * 300}, "text"),
        ({"sampling_params": {"custom_params": {}}}, "sampling_params.custom_params"),
        ({"sampling_params": 3}, "sampling_params"),
        ({"sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"max_tokens": 1}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"n": 129}}, "sampling_params.n"),
        ({"sampling_params": {"stop": ["x"] * 17}}, "sampling_params.stop"),
        ({"sampling_params": {"regex": "a", "ebnf": "b"}}, "sampling_params.ebnf"),
        ({"sampling_params": {"regex": "a" * 70_000}}, "sampling_params.regex"),
        ({"image_data": "x"}, "image_data"),
        ({"lora_path": "x"}, "lora_path"),
        ({"return_hidden_states": True}, "return_hidden_states"),
        ({"logprob_start_len": 1}, "logprob_start_len"),
        ({"return_logprob": True, "logprob_start_len": 3}, "logprob_start_len"),
        ({"top_logprobs_num": 1}, "top_logprobs_num"),
        ({"speculative": {"num_steps": 0}}, "speculative.num_steps"),
        ({"mood": 1}, "mood"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_not_served_is_refused_by_name(
    site: Any, engine: Any, fields: dict[str, Any], param: str
) -> None:
    error = site.refusal(PATH, 400, **({"text": "abc"} | fields))
    assert error["param"] == param
    assert param.rpartition(".")[2] in error["message"]
