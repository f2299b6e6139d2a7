"""Loglikelihoods by transformers, in float32: `python -m ... MODEL_DIRECTORY FILE`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PAIRS = [
    ("The capital of France is", " Paris"),
    ("The capital of France is", " a banana."),
    ("Better sleep begins with", " a calm evening, żółw 😀 and ñandú."),
    ("1. **Being and", " Preverse**\n2. **"),
    ("", "Once upon a time"),
]


def main(directory: str, file: str) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    found = []
    for context, continuation in PAIRS + ending_pairs(tokenizer, model):
        # As lm-eval encodes a pair: both together, cut after the tokens of the context alone.
        prefix = tokenizer(context).input_ids or [tokenizer.eos_token_id]
        whole = tokenizer(context + continuation).input_ids
        whole = whole if context else prefix + whole
        rows = logprobs_of(model, whole)[len(prefix) - 1 : -1]
        rest = torch.tensor(whole[len(prefix) :])
        total = rows.gather(1, rest[:, None]).sum().item()
        is_greedy = bool((rows.argmax(-1) == rest).all())
        pair = {"context": context, "continuation": continuation}
        found.append(pair | {"loglikelihood": total, "is_greedy": is_greedy})
    assert any(one["is_greedy"] for one in found), "one pair must be greedy"
    Path(file).write_text(json.dumps(found))


def ending_pairs(tokenizer: Any, model: Any) -> list[tuple[str, str]]:
    """A text that the model would end next: its end must not be taken for a token of the text."""
    context = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    ids = list(tokenizer(context).input_ids)
    start = len(ids)
    while len(ids) < start + 300:
        ids.append(int(logprobs_of(model, ids)[-1].argmax()))
        if ids[-1] == tokenizer.eos_token_id:
            return [(context, tokenizer.decode(ids[start:-1]))]
    return []


def logprobs_of(model: Any, ids: list[int]) -> Any:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


if __name__ == "__main__":
    main(*sys.argv[1:])
