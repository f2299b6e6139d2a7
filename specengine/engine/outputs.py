"""What the engine hands out: the outputs of a request, and its own counters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from specengine.core.request import FinishReason, TokenLogprob
from specengine.core.spec_stats import DepthChoice, SpecStats, count_at
from specengine.core.spec_totals import SpecTotals
from specengine.runner.fallbacks import GraphStats
from specengine.scheduler.split_policy import SplitDecision


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Seconds of time.monotonic()."""

    arrival: float
    first_token: float | None = None
    finish: float | None = None
    admitted: float | None = None  # first taken out of the queue


@dataclass(slots=True)
class RequestOutput:
    """What one choice of a request gained since its last output, and all it has so far.

    `new_token_ids` and `logprobs` belong together; `text_delta` may lag behind them, for text that
    could yet become part of a character or of a stop string is held back. The last output has a
    finish_reason and holds nothing back.
    """

    rid: str
    index: int  # the choice, 0 .. n - 1
    new_token_ids: list[int]
    token_ids: list[int]
    text_delta: str
    text: str
    finish_reason: FinishReason | None
    logprobs: list[TokenLogprob]
    all_logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob | None]
    num_prompt_tokens: int
    num_cached_tokens: int  # prompt tokens whose KV was found in the prefix cache
    spec: SpecStats  # its rounds so far
    times: RequestTimes
    embedding: list[float] | None = None  # the prompt's vector, where that was asked for


@dataclass(frozen=True)
class SplitStats:
    """Of prompts that run a few layers at a time. Counters since start, but for num_under_way."""

    num_under_way: int = 0
    num_prefills: int = 0  # forwards, of one prompt or several
    num_prompts: int = 0
    num_calls: int = 0
    num_turns: int = 0  # calls in turns with rounds
    num_layers: int = 0
    num_left: int = 0  # prompts that were aborted or retracted amid one
    num_rounds_on_all: int = 0  # beside prompts, without a graph for the SMs that these leave
    fallbacks: dict[str, int] = field(
        default_factory=dict
    )  # prefills without SMs of their own, by reason
    decision: SplitDecision | None = None  # the last one


@dataclass
class EngineStats:
    """Gauges of this moment, and counters since start."""

    num_running: int = 0
    num_waiting: int = 0
    num_slots: int = 0  # KV slots
    num_free_slots: int = 0  # held by no request; those that the prefix cache would give up count
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt tokens, those found in the prefix cache
    num_state_snapshots: int | None = None  # None: the target keeps no recurrent state
    num_evicted_snapshots: int = 0  # for the sake of newer ones
    num_generated_tokens: int = 0
    num_retractions: int = 0
    num_aborts: int = 0  # requests, one a choice, that did not finish: left, or given up
    num_graph_forwards: int = 0
    num_eager_forwards: int = 0
    graphs: dict[str, GraphStats] = field(default_factory=dict)  # by kind: decode, prefill, round
    spec: SpecTotals = field(default_factory=SpecTotals)
    depth: DepthChoice | None = None  # of drafts, where it is chosen
    model_name: str = ""
    algorithm: str = ""  # how drafts are made; "none" where they are not
    drafts_trees: bool = False
    split: SplitStats | None = None  # with --enable-pdmux
    layer_hooks: tuple[str, ...] = ()  # patterns of those that look at layers

    @property
    def kv_usage(self) -> float:
        return 1.0 - self.num_free_slots / self.num_slots if self.num_slots else 0.0

    @property
    def prefix_hit_rate(self) -> float:
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0


def add_stats(total: SpecStats, one: SpecStats) -> None:
    """Add the counters of `one` to `total`. `depth` is that of the one added last,
    if it has one."""
    total.num_rounds += one.num_rounds
    total.num_draft_tokens += one.num_draft_tokens
    total.num_accepted += one.num_accepted
    total.is_lossy |= one.is_lossy
    total.depth = total.depth if one.depth is None else one.depth
    for accepted, rounds in enumerate(one.histogram):
        count_at(total.histogram, accepted, rounds)
    for depth, rounds in enumerate(one.depth_histogram):
        count_at(total.depth_histogram, depth, rounds)


def speculative_metrics(spec: SpecStats) -> dict[str, Any]:
    """mean_acceptance_length is 1 + accepted / rounds; acceptance_histogram[k] counts the rounds
    that accepted k drafted tokens, depth_histogram[k] those for which depth k was chosen for the
    whole batch, whatever was drafted for this request: num_draft_tokens. depth: what was chosen
    last; null where there was no round but beside prefills, which count as of depth 0."""
    return {
        "mean_acceptance_length": round(spec.mean_acceptance_length, 4),
        "draft_acceptance_rate": round(spec.draft_acceptance_rate, 4),
        "acceptance_histogram": list(spec.histogram),
        "num_spec_steps": spec.num_rounds,
        "num_draft_tokens": spec.num_draft_tokens,
        "num_accepted_draft_tokens": spec.num_accepted,
        "lossy": spec.is_lossy,
        "depth_histogram": list(spec.depth_histogram),
        "depth": None if spec.depth is None else _fields(spec.depth),
    }


def _fields(depth: DepthChoice) -> dict[str, Any]:
    gain = depth.expected_gain
    return {
        "num_steps": depth.num_steps,
        "num_nodes": depth.num_nodes,
        "reason": depth.reason,
        "expected_gain": None if gain is None else round(gain, 4),
    }


def depth_line(spec: SpecStats) -> str:
    """How deep drafts were to go, for people to read."""
    counts = [f"{n} at K={depth}" for depth, n in enumerate(spec.depth_histogram) if n]
    last = [] if spec.depth is None else [f"last {spec.depth.reason}"]
    return "; ".join([f"rounds: {', '.join(counts) or 'none'}", *last])
