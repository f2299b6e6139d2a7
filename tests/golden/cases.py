"""Which rounds are recorded: each kind (drafter, layout, rule) with each sampling feature."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from specengine import GrammarSpec, SamplingParams, SpecConfig

PLAIN = "none/chain/match"
TOKENS = 16  # of an output, at most
LEVELS = 3  # of a model's drafts
TREE: dict[str, Any] = {"eagle_topk": 3, "num_draft_tokens": 8}
LOOKUP: dict[str, dict[str, Any]] = {
    "NGRAM/chain": {"ngram_min_match": 1, "num_draft_tokens": 6},
    "NGRAM/tree": {"ngram_min_match": 1, "num_draft_tokens": 8, "ngram_branches": 2},
    "SUFFIX/chain": {"num_draft_tokens": 6, "suffix_factor": 4.0},
    "SUFFIX/tree": {"num_draft_tokens": 8, "suffix_factor": 6.0, "suffix_branches": 2},
}
HYBRID: dict[str, Any] = {"hybrid_suffix": True, "hybrid_suffix_min_match": 2}
MODELS: dict[str, dict[str, Any]] = {
    f"{name}/{layout}": {"num_steps": LEVELS} | shape
    for name in ("STANDALONE", "EAGLE", "EAGLE3", "MTP", "MTP layers")
    for layout, shape in (("chain", {}), ("tree", TREE))
    if (name, layout) != ("MTP layers", "tree")
} | {
    "EAGLE3+SUFFIX/chain": {"num_steps": LEVELS, "num_draft_tokens": 6} | HYBRID,
    "EAGLE3+SUFFIX/tree": {"num_steps": LEVELS} | TREE | {"num_draft_tokens": 10} | HYBRID,
}
# "(sampled)": the drafts are sampled where requests sample.
RULES: dict[str, dict[str, Any]] = {
    "match": {"verify": "match"},
    "relaxed": {"verify": "relaxed", "relaxed_delta": 0.2},
    "target_only": {"verify": "target_only"},
}
SAMPLED_RULES: dict[str, dict[str, Any]] = {
    f"{rule} (sampled)": RULES.get(rule, {"verify": rule}) | {"draft_sampling": True}
    for rule in ("match", "relaxed", "target_only", "rejection", "block", "sibling")
}
OF_CHAINS = ("rejection (sampled)", "block (sampled)")  # rules that take no trees


@dataclass(frozen=True)
class Kind:
    """target, draft: names of models (models.py)."""

    name: str
    target: str
    draft: str | None
    options: dict[str, Any]

    def spec(self, draft_path: str | None) -> SpecConfig | None:
        if not self.options:
            return None
        return SpecConfig(draft_model_path=draft_path, adaptive=False, **self.options)


def _kinds() -> dict[str, Kind]:
    kinds = {PLAIN: Kind(PLAIN, "tiny", None, {})}
    for source, shape in (LOOKUP | MODELS).items():
        label, layout = source.split("/")
        rules = RULES | SAMPLED_RULES if source in MODELS else RULES
        algorithm = label.split("+")[0].split()[0]
        draft = f"tiny-{algorithm.lower()}" if source in MODELS else None
        target = "tiny"
        if label == "MTP layers":  # which lie in the target's checkpoint
            target, draft = "small-mtp-layers", None
        for rule, options in rules.items():
            if layout == "tree" and rule in OF_CHAINS:
                continue
            name = f"{source}/{rule}"
            kinds[name] = Kind(name, target, draft, {"algorithm": algorithm} | shape | options)
    return kinds


KINDS = _kinds()

PROMPTS = [
    "Give me five tips for better sleep.\n1. Keep a regular schedule.\n2. Keep",
    "one two three four, one two three five, one two",
    "The best way to learn a language is",
]
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.0)
WARM = replace(GREEDY, temperature=0.8)
LIKELY = dict.fromkeys(range(260, 310), 2.5)
# Requests of a batch, of which `requests` gives seeds to those that sample.
FEATURES: dict[str, list[SamplingParams]] = {
    "greedy": [GREEDY, GREEDY, GREEDY],
    "sampled": [
        replace(WARM, top_p=0.9),
        replace(WARM, temperature=1.2, top_k=20),
        replace(WARM, temperature=1.0, min_p=0.05),
    ],
    "penalties": [
        replace(GREEDY, repetition_penalty=1.3, frequency_penalty=0.4),
        replace(WARM, presence_penalty=0.8, logit_bias=LIKELY),
        replace(WARM, frequency_penalty=0.6, top_p=0.95, min_tokens=8, ignore_eos=False),
    ],
    "grammar": [
        replace(GREEDY, grammar=GrammarSpec.regex("[a-z ,]{8,60}[.]")),
        replace(WARM, grammar=GrammarSpec.regex("( (one|two|three|four|five),?){3,20}")),
        replace(WARM, top_p=0.9),
    ],
    "logprobs": [
        replace(GREEDY, logprobs=2),
        replace(WARM, top_p=0.9, logprobs=0),
        replace(WARM, top_k=10, logprobs=1, prompt_logprobs=0),
    ],
    "n": [replace(WARM, n=2), replace(GREEDY, n=2, max_tokens=10)],
    "stop": [
        replace(GREEDY, stop=("schedule", "th")),
        replace(WARM, stop=(" a", "e,"), include_stop_str_in_output=True),
        replace(WARM, stop_token_ids=tuple(range(280, 319))),
    ],
}


def requests(feature: str, seed: int) -> list[tuple[str, SamplingParams]]:
    """Prompts, and how each is to go on. seed: 1, or more for other requests of the same kind."""
    params, more = FEATURES[feature], "" if seed == 1 else f" ({seed})"
    return [
        (PROMPTS[i] + more, one if one.is_greedy else replace(one, seed=1000 * seed + i))
        for i, one in enumerate(params)
    ]
