"""lm-eval's model of a completions API: its loglikelihoods are those of transformers."""

from __future__ import annotations

import json
import os
from pathlib import Path

from checks import API, MODEL, TOKENIZER, passed
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

wanted = json.loads(Path(os.environ["REFERENCE"]).read_text())
model = LocalCompletionsAPI(
    base_url=f"{API}/completions",
    model=MODEL,
    tokenizer=TOKENIZER,
    tokenizer_backend="huggingface",
    batch_size=4,
    num_concurrent=2,
    max_length=2000,
)
requests = [
    Instance("loglikelihood", {}, (one["context"], one["continuation"]), number)
    for number, one in enumerate(wanted)
]
for one, (total, is_greedy) in zip(wanted, model.loglikelihood(requests), strict=True):
    place = repr(one["continuation"])
    assert abs(total - one["loglikelihood"]) < 5e-3, (place, total, one["loglikelihood"])
    assert is_greedy == one["is_greedy"], place
passed(f"loglikelihood of {len(wanted)} pairs, equal to transformers'")

requests = [
    Instance("generate_until", {}, ("Once upon a time", {"until": ["."], "max_gen_toks": 20}), 0)
]
assert model.generate_until(requests)[0]
passed("generate_until")
