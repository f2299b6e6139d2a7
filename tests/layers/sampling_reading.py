"""The sampling parameters read one token at a time in plain Python."""

from __future__ import annotations

import math

from specengine.core.request import Req
from specengine.core.sampling import SamplingParams


def edited(logits: list[float], req: Req, above: list[int]) -> list[float]:
    """Logits after bias, penalties and min_tokens; `above` are tokens of this round before it."""
    params, output = req.sampling, req.output_ids + above
    result = []
    for token, logit in enumerate(logits):
        logit += params.logit_bias.get(token, 0.0)
        if token in req.prompt_ids or token in output:
            scale = params.repetition_penalty
            logit = logit / scale if logit > 0 else logit * scale
        logit -= params.frequency_penalty * output.count(token)
        logit -= params.presence_penalty * (token in output)
        ends = token in params.stop_token_ids or (token in req.eos_ids and not params.ignore_eos)
        result.append(-math.inf if ends and len(output) < params.min_tokens else logit)
    return result


def distribution(logits: list[float], req: Req, above: list[int] | None = None) -> list[float]:
    """Probability of each next token. Equals of the last one that a cut keeps stay, too."""
    logits, params = edited(logits, req, above or []), req.sampling
    best = max(logits)
    if params.is_greedy:
        return [float(token == logits.index(best)) for token in range(len(logits))]
    weights = [math.exp((logit - best) / params.temperature) for logit in logits]
    return _normalised(_min_p(_top_p(_top_k(_normalised(weights), params), params), params))


def _top_k(probs: list[float], params: SamplingParams) -> list[float]:
    if params.top_k <= 0 or params.top_k >= len(probs):
        return probs
    kth = sorted(probs, reverse=True)[params.top_k - 1]
    return _normalised([p if p >= kth else 0.0 for p in probs])


def _top_p(probs: list[float], params: SamplingParams) -> list[float]:
    if params.top_p == 1.0:
        return probs
    mass, least = 0.0, 0.0
    for least in sorted(probs, reverse=True):
        mass += least
        if mass >= params.top_p:
            break
    return _normalised([p if p >= least else 0.0 for p in probs])


def _min_p(probs: list[float], params: SamplingParams) -> list[float]:
    floor = params.min_p * max(probs)
    return [p if p >= floor else 0.0 for p in probs]


def _normalised(weights: list[float]) -> list[float]:
    total = sum(weights)
    return [weight / total for weight in weights]
