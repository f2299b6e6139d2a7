"""Counts of several front ends, as one. Each keeps its own in files that all of them read, so that
any front end tells of all, and what one has counted stays when it ends."""

from __future__ import annotations

import os
from collections.abc import Iterable

from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"  # set before prometheus_client is imported, as it asks for


class SharedCollector(Collector):
    """Those families of all front ends that `own`, this one's, has as well."""

    def __init__(self, own: Collector, directory: str) -> None:
        self._own = own
        self._directory = directory

    def collect(self) -> Iterable[Metric]:
        names = {family.name for family in self._own.collect()}
        every = MultiProcessCollector(None, self._directory)  # type: ignore[no-untyped-call]
        found: Iterable[Metric] = every.collect()  # type: ignore[no-untyped-call]
        return [family for family in found if family.name in names]


def shared(own: Collector) -> Collector:
    """`own`, or where front ends share their counts, those of all."""
    directory = os.environ.get(VARIABLE)
    return own if directory is None else SharedCollector(own, directory)
