"""Texts that the target wrote itself, greedily: what a perfect drafter would foresee."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from specengine.core.config import SpecConfig
from specengine.core.sampling import SamplingParams
from specengine.engine.build import build_engine
from specengine.engine.chat_template import chat_text, has_chat_template
from specengine.engine.tokens import encode_text
from specengine.runner.loader.loaded_model import LoadedModel


@dataclass(frozen=True)
class Text:
    """A prompt and the target's answer. prompt: its number, the same in every rendering."""

    prompt: int
    token_ids: list[int]
    prompt_len: int


def render(tokenizer: Any, prompts: Sequence[str], template: str | None) -> list[list[int]]:
    """Token ids. template: Jinja source; None is no template."""
    if template is None:
        return [encode_text(tokenizer, prompt) for prompt in prompts]
    served, tokenizer.chat_template = tokenizer.chat_template, template
    try:
        texts = [chat_text(tokenizer, [{"role": "user", "content": one}]) for one in prompts]
    finally:
        tokenizer.chat_template = served
    return [encode_text(tokenizer, text, add_special_tokens=False) for text in texts]


def served_template(tokenizer: Any) -> str | None:
    return str(tokenizer.chat_template) if has_chat_template(tokenizer) else None


def write_texts(loaded: LoadedModel, prompts: Sequence[list[int]], new_tokens: int) -> list[Text]:
    """What the target says, up to its end of text or `new_tokens`."""
    config = replace(loaded.config, spec=SpecConfig())
    longest = max(map(len, prompts)) + new_tokens + 1
    slots = len(prompts) * (longest + config.memory.page_size)
    memory = replace(config.memory, max_total_tokens=slots)
    engine = build_engine(replace(config, memory=memory), loaded)
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0)
    for index, prompt_ids in enumerate(prompts):
        engine.add_request(str(index), prompt_ids, params)
    answers: dict[int, list[int]] = {}
    while engine.has_work:
        answers.update({int(one.rid): one.token_ids for one in engine.step()})
    return [Text(i, [*ids, *answers[i]], len(ids)) for i, ids in enumerate(prompts)]
