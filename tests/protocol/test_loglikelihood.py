"""Prompts scored over HTTP as lm-eval scores them, beside transformers, with drafts and without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from specengine.core.config import SpecConfig
from tests.protocol.table import PROMPT
from tests.support.live_server import LiveServer, live_server

TINY = Path(__file__).resolve().parents[2] / "target/zoo/tiny"
EOS = 2
SPEC = SpecConfig(algorithm="EAGLE3", adaptive=False, num_steps=4)
FLAGS: dict[str, Any] = {"model": "tiny", "dtype": "float32", "max_total_tokens": 4096}
CONTINUATIONS = [" Sleep well and early.", " żółw 😀 ñandú", "\n\n1. **Being and", " x"]


@pytest.fixture(scope="module", params=[None, SPEC], ids=["plain", "EAGLE-3"])
def live(request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    with live_server(FLAGS, request.param) as live:
        yield live


@pytest.fixture(scope="module")
def reference() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def ended(reference: Any, tokenizer: Any) -> tuple[list[int], list[int]]:
    """A prompt, and the greedy text after it up to the token that ends it."""
    context = tokenizer("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n").input_ids
    return context, greedy(reference, context)[:-1]


def logprobs_of(reference: Any, ids: list[int]) -> Tensor:
    """Row p is the distribution of token p + 1."""
    with torch.no_grad():
        logits: Tensor = reference(torch.tensor([ids])).logits[0]
    return logits.log_softmax(-1)


def scored(live: LiveServer, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """The body that lm-eval's local-completions sends, and the logprobs it gets."""
    body = {
        "model": "tiny",
        "prompt": prompts,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "temperature": 0,
        "echo": True,
    }
    answer = httpx.post(f"{live.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
    return [choice["logprobs"] for choice in choices]


def as_lm_eval(logprobs: dict[str, Any], num_context: int) -> tuple[float, bool]:
    """Its sum, and whether the continuation is the greedy one: the last token is the one made."""
    total = sum(logprobs["token_logprobs"][num_context:-1])
    tokens, tops = logprobs["tokens"][num_context:-1], logprobs["top_logprobs"][num_context:-1]
    best = [max(top, key=top.__getitem__) for top in tops]
    return total, tokens == best


def expected(reference: Any, context: list[int], rest: list[int]) -> tuple[float, bool]:
    rows = logprobs_of(reference, context + rest)[len(context) - 1 : -1]
    is_greedy = rows.argmax(-1).tolist() == rest
    return rows.gather(1, torch.tensor(rest)[:, None]).sum().item(), is_greedy


def greedy(reference: Any, ids: list[int], most: int = 400) -> list[int]:
    """Up to the token that ends it."""
    given, cache = torch.tensor([ids]), None
    made: list[int] = []
    while len(made) < most:
        with torch.no_grad():
            found = reference(given, past_key_values=cache, use_cache=True)
        given, cache = found.logits[:, -1:].argmax(-1), found.past_key_values
        made.append(int(given))
        if made[-1] == EOS:
            return made
    raise AssertionError("the text has no end")


@pytest.mark.parametrize("text", CONTINUATIONS)
def test_loglikelihoods_are_those_of_transformers(
    live: LiveServer, reference: Any, tokenizer: Any, text: str
) -> None:
    context, rest = tokenizer(PROMPT).input_ids, tokenizer(text).input_ids
    (logprobs,) = scored(live, [context + rest])
    assert len(logprobs["tokens"]) == len(context) + len(rest) + 1
    total, is_greedy = as_lm_eval(logprobs, len(context))
    wanted = expected(reference, context, rest)
    assert (total, is_greedy) == (pytest.approx(wanted[0], abs=1e-3), wanted[1])


def test_a_text_whose_next_token_ends_it_is_scored_whole(
    live: LiveServer, reference: Any, ended: tuple[list[int], list[int]]
) -> None:
    context, rest = ended
    (logprobs,) = scored(live, [context + rest])
    assert logprobs["tokens"][-1] == "<|im_end|>"
    wanted = expected(reference, context, rest)
    assert wanted[1]
    assert as_lm_eval(logprobs, len(context)) == (pytest.approx(wanted[0], abs=1e-3), True)


def test_a_batch_is_scored_in_its_order(live: LiveServer, reference: Any, tokenizer: Any) -> None:
    """Prompts share prefixes, which the cache may not stand in for."""
    context = tokenizer(PROMPT).input_ids
    rests = [tokenizer(text).input_ids for text in CONTINUATIONS]
    for _ in range(2):
        found = scored(live, [context + rest for rest in rests])
        for logprobs, rest in zip(found, rests, strict=True):
            wanted = expected(reference, context, rest)[0]
            assert as_lm_eval(logprobs, len(context))[0] == pytest.approx(wanted, abs=1e-3)


def test_all_ways_to_score_agree(live: LiveServer, reference: Any, tokenizer: Any) -> None:
    ids = tokenizer(PROMPT + CONTINUATIONS[1]).input_ids
    rows = logprobs_of(reference, ids)[:-1]
    wanted = rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()

    def post(path: str, **body: Any) -> Any:
        answer = httpx.post(live.url + path, json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    text = {"model": "tiny", "prompt": ids, "max_tokens": 0}
    echoed = post("/v1/completions", **text, echo=True, logprobs=0)["choices"][0]
    assert echoed["logprobs"]["token_logprobs"][1:] == pytest.approx(wanted, abs=1e-3)
    asked = post("/v1/completions", **text, prompt_logprobs=0)["choices"][0]["prompt_logprobs"]
    found = [one[str(token)]["logprob"] for one, token in zip(asked[1:], ids[1:], strict=True)]
    assert found == pytest.approx(wanted, abs=1e-3)
    native = {"return_logprob": True, "logprob_start_len": 0, "input_ids": ids}
    meta = post("/generate", **native, sampling_params={"max_new_tokens": 0})["meta_info"]
    assert [one[0] for one in meta["input_token_logprobs"][1:]] == pytest.approx(wanted, abs=1e-3)
    assert [one[1] for one in meta["input_token_logprobs"]] == ids
