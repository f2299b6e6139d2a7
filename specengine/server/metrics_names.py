"""Labels that every metric of the model carries, and the names that another server gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import Sample
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

PREFIX = "specengine:"


def families(
    kind: Callable[..., Metric], prefix: str, values: Mapping[str, tuple[str, float]]
) -> Iterable[Metric]:
    """A family of one sample for each name. values: its help text and value."""
    for name, (text, value) in values.items():
        yield kind(prefix + name, text, value=value)


# Ours by vLLM's. Only those that count the same: its inter_token_latency_seconds, for example, is
# measured between tokens, where ours is the mean of a choice.
VLLM = {
    "num_requests_running": "num_requests_running",
    "num_requests_waiting": "num_requests_waiting",
    "kv_cache_usage_perc": "kv_usage_ratio",
    "prefix_cache_queries": "prompt_tokens",
    "prefix_cache_hits": "prefix_cache_hit_tokens",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
    "num_preemptions": "request_retractions",
    "request_success": "request_choices",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "request_time_per_output_token_seconds": "inter_token_latency_seconds",
    "e2e_request_latency_seconds": "e2e_request_latency_seconds",
    "request_queue_time_seconds": "queue_time_seconds",
    "spec_decode_num_drafts": "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens": "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens": "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos": "spec_decode_num_accepted_tokens_per_pos",
}
_VLLM_LABELS = {"finish_reason": "finished_reason"}
COMPATIBLE: dict[str, tuple[str, Mapping[str, str], Mapping[str, str]]] = {
    "vllm": ("vllm:", VLLM, _VLLM_LABELS)
}


class LabelledCollector(Collector):
    """What `inner` collects, with further labels on each sample."""

    def __init__(self, inner: Collector, labels: Callable[[Metric], Mapping[str, str]]) -> None:
        self._inner = inner
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        for family in self._inner.collect():
            labels = self._labels(family)
            yield _copy(family, family.name, [_labelled(one, labels) for one in family.samples])


class RenamedCollector(Collector):
    """What `inner` collects, and behind it the same under the names of another server.

    compatible: a key of COMPATIBLE.
    """

    def __init__(self, inner: Collector, compatible: str) -> None:
        self._inner = inner
        self._prefix, self._names, self._label_names = COMPATIBLE[compatible]

    def collect(self) -> Iterable[Metric]:
        families = {family.name: family for family in self._inner.collect()}
        yield from families.values()
        for theirs, ours in self._names.items():
            family = families.get(PREFIX + ours)
            if family is not None:
                yield self._renamed(family, self._prefix + theirs)

    def _renamed(self, family: Metric, name: str) -> Metric:
        samples = []
        for sample in family.samples:
            labels = {self._label_names.get(key, key): one for key, one in sample.labels.items()}
            renamed = name + sample.name.removeprefix(family.name)
            samples.append(Sample(renamed, labels, *sample[2:]))
        return _copy(family, name, samples)


def _labelled(sample: Sample, labels: Mapping[str, str]) -> Sample:
    return sample._replace(labels={**labels, **sample.labels})


def _copy(family: Metric, name: str, samples: list[Sample]) -> Metric:
    made = Metric(name, family.documentation, family.type, family.unit)
    made.samples = samples
    return made
