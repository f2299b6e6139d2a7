"""What the requests of a point saw, as numbers. The definitions are those of the serving benches of
vLLM and SGLang, so that figures can be compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from specengine.core.errors import ConfigError
from specengine.lab.serving.loads import Load
from specengine.lab.serving.records import ClientReport, Outcome

DEFINITIONS = {
    "ttft": "From sending a request to its first event that carries output, in ms.",
    "tpot": (
        "(last event - first) / (output tokens - 1), one number a request of two tokens or more, "
        "in ms."
    ),
    "itl": (
        "Between two events of a request that carry output, in ms. An event may carry several "
        "tokens: of a round of speculation, or that waited together."
    ),
    "e2e": "From sending a request to its last event, in ms.",
    "rates": (
        "Of finished requests, over the seconds from the start of the point to its last answer. "
        "Prompt tokens as the server counts them, cached ones too."
    ),
    "goodput": "Requests a second that finished and kept every bound of --slo.",
    "tau": (
        "The accepted length, 1 + accepted / rounds: of these requests where their usage tells, "
        "else by the counters of /metrics; null where the server does not tell."
    ),
    "client_busy": (
        "The busiest client's processor time over these seconds. Above 0.8 the client is what was "
        "measured: use more --clients, or a machine apart."
    ),
}
METRICS = ("ttft", "tpot", "itl", "e2e")
_REQUEST_METRICS = ("ttft", "tpot", "e2e")  # what a bound may be put on


@dataclass(frozen=True)
class Latency:
    """ms. percentiles: by number, such as "99"."""

    mean: float
    percentiles: dict[str, float]
    count: int

    @classmethod
    def of(cls, seconds: Sequence[float], percentiles: Sequence[float]) -> Latency:
        if not len(seconds):
            return cls(float("nan"), dict.fromkeys(map(_name, percentiles), float("nan")), 0)
        ms = 1000 * np.asarray(seconds)
        found = {_name(one): float(np.percentile(ms, one)) for one in percentiles}
        return cls(float(ms.mean()), found, len(seconds))


@dataclass(frozen=True)
class Point:
    """Rates a second. errors: failed requests by status or kind; samples: a message of each."""

    load: Load
    seconds: float
    num_requests: int
    num_finished: int
    prompt_tokens: int
    output_tokens: int
    request_rate: float
    output_rate: float
    prompt_rate: float
    latencies: dict[str, Latency]
    goodput: float | None = None
    tau: float | None = None
    errors: dict[str, int] = field(default_factory=dict)
    samples: dict[str, str] = field(default_factory=dict)
    is_counted: bool = True  # False: the server sent no usage, and events were counted as tokens
    num_clients: int = 1
    client_busy: float = 0.0
    client_us_per_event: float = 0.0
    latest_start: float = 0.0  # seconds after it was due that a request was sent, at most


def measure(
    load: Load,
    reports: Sequence[ClientReport],
    slo: dict[str, float],
    percentiles: Sequence[float],
) -> Point:
    """slo: bounds in ms."""
    outcomes = [one for report in reports for one in report.outcomes]
    good = [one for one in outcomes if not one.error]
    failed = [one for one in outcomes if one.error]
    seconds = max(report.seconds for report in reports)
    output, prompt = (sum(getattr(o, n) for o in good) for n in ("output_tokens", "prompt_tokens"))
    events, cpu = sum(one.num_events for one in reports), sum(one.cpu for one in reports)
    return Point(
        load=load,
        seconds=seconds,
        num_requests=len(outcomes),
        num_finished=len(good),
        prompt_tokens=prompt,
        output_tokens=output,
        request_rate=len(good) / seconds,
        output_rate=output / seconds,
        prompt_rate=prompt / seconds,
        latencies={name: Latency.of(_values(good, name), percentiles) for name in METRICS},
        goodput=sum(keeps(one, slo) for one in good) / seconds if slo else None,
        tau=_tau(good),
        errors=dict(Counter(one.error for one in failed)),
        samples={one.error: one.message for one in reversed(failed)},
        is_counted=all(one.is_counted for one in good),
        num_clients=len(reports),
        client_busy=max(report.cpu / report.seconds for report in reports),
        client_us_per_event=1e6 * cpu / events if events else 0.0,
        latest_start=max((one.sent - one.due for one in outcomes), default=0.0),
    )


def value(outcome: Outcome, name: str) -> float | None:
    """Of one request, in seconds; None where it has none."""
    assert outcome.first is not None
    assert outcome.last is not None
    if name == "ttft":
        return outcome.first - outcome.sent
    if name == "e2e":
        return outcome.last - outcome.sent
    if outcome.output_tokens < 2:
        return None
    return (outcome.last - outcome.first) / (outcome.output_tokens - 1)


def keeps(outcome: Outcome, slo: dict[str, float]) -> bool:
    found = {name: value(outcome, name) for name in slo}
    return all(one is None or 1000 * one <= slo[name] for name, one in found.items())


def read_slo(text: str | None) -> dict[str, float]:
    """`ttft=50,tpot=4`, in ms. Raises ConfigError."""
    found: dict[str, float] = {}
    for part in (text or "").split(",") if text else ():
        name, _, number = part.strip().partition("=")
        try:
            bound = float(number)
        except ValueError:
            bound = 0.0
        if name not in _REQUEST_METRICS or not bound > 0:
            known = ", ".join(_REQUEST_METRICS)
            raise ConfigError(f"--slo {part!r}: NAME=MS of {known} is wanted, as ttft=50,tpot=4")
        found[name] = bound
    return found


def _values(outcomes: Iterable[Outcome], name: str) -> list[float]:
    if name == "itl":
        return [gap for one in outcomes for gap in one.gaps]
    return [found for one in outcomes if (found := value(one, name)) is not None]


def _tau(outcomes: Sequence[Outcome]) -> float | None:
    rounds = sum(one.rounds for one in outcomes)
    return 1 + sum(one.accepted for one in outcomes) / rounds if rounds else None


def _name(percentile: float) -> str:
    return f"{percentile:g}"
