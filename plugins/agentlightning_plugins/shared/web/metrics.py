"""Prometheus metrics of a server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Metric, generate_latest

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class ScrapedMetrics:
    """A registry of counters and histograms, together with gauges that are read at each scrape."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._gauges: list[Metric] = []

    async def render_with(self, gauges: Iterable[Metric]) -> bytes:
        """Returns all metrics in Prometheus' text format, rendered in a thread."""
        self._gauges = list(gauges)
        return await asyncio.to_thread(generate_latest, self)

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics; ``generate_latest`` calls this method."""
        for metric in self.registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric
        yield from self._gauges
