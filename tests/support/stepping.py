"""Engines that a test runs step by step."""

from __future__ import annotations

from collections.abc import Callable

from specengine import LLM, SamplingParams
from specengine.core.request import Req
from specengine.engine.outputs import RequestOutput


def add(llm: LLM, rid: str, prompt: str, sampling: SamplingParams) -> Req:
    llm.engine.add_request(rid, llm.tokenizer.encode(prompt), sampling)
    return next(req for req, choice in llm.engine.choices.items() if choice.rid == rid)


def finish(llm: LLM) -> dict[str, RequestOutput]:
    done = dict[str, RequestOutput]()
    while llm.engine.has_work:
        done |= {one.rid: one for one in llm.engine.step() if one.finish_reason is not None}
    return done


def step_until(llm: LLM, holds: Callable[[], bool]) -> None:
    while not holds():
        llm.engine.step()
