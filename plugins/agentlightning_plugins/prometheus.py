"""Metrics in the text format of Prometheus, version 0.0.4: what our two servers need of a client library.

    registry = Registry()
    calls = registry.counter("agl_gateway_calls_total", "Calls answered.", "model", "status")
    calls.add("m", "200")
    registry.gauge("agl_gateway_in_flight", "Calls under way.", read=lambda: [((), len(running))])
    text = registry.render()

Update a metric from one thread; it may be rendered from any.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeAlias

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
LATENCY_BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

Labels: TypeAlias = tuple[str, ...]
"""The values of a metric's labels, in the order of their names."""


class _Metric(ABC):
    type: str

    def __init__(self, name: str, help: str, labels: Sequence[str]) -> None:
        self.name = name
        self._head = f"# HELP {name} {_escape(help)}\n# TYPE {name} {self.type}\n"
        self._labels = tuple(labels)

    def render(self) -> str:
        """The metric with all its samples; each line ends."""
        return self._head + "".join(self._lines())

    @abstractmethod
    def _lines(self) -> Iterator[str]: ...

    def _line(self, labels: Labels, value: float, suffix: str = "", more: str = "") -> str:
        pairs = [f'{name}="{_escape(text, quoted=True)}"' for name, text in zip(self._labels, labels, strict=True)]
        inside = ",".join([*pairs, more] if more else pairs)
        return f"{self.name}{suffix}{{{inside}}} {value:.15g}\n" if inside else f"{self.name}{suffix} {value:.15g}\n"


class Counter(_Metric):
    """A number that only grows."""

    type = "counter"

    def __init__(self, name: str, help: str, labels: Sequence[str]) -> None:
        super().__init__(name, help, labels)
        self._values: dict[Labels, float] = {} if labels else {(): 0.0}

    def add(self, *labels: str, value: float = 1.0) -> None:
        """Counts something with these labels."""
        self._values[labels] = self._values.get(labels, 0.0) + value

    def _lines(self) -> Iterator[str]:
        for labels, value in list(self._values.items()):
            yield self._line(labels, value)


class Gauge(_Metric):
    """A number that is read when somebody asks for it."""

    type = "gauge"

    def __init__(
        self, name: str, help: str, labels: Sequence[str], read: Callable[[], Iterable[tuple[Labels, float]]]
    ) -> None:
        super().__init__(name, help, labels)
        self._read = read

    def _lines(self) -> Iterator[str]:
        for labels, value in self._read():
            yield self._line(labels, value)


class Histogram(_Metric):
    """How often a quantity fell into which range."""

    type = "histogram"

    def __init__(self, name: str, help: str, labels: Sequence[str], buckets: Sequence[float]) -> None:
        super().__init__(name, help, labels)
        self._bounds = tuple(buckets)
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}

    def observe(self, *labels: str, value: float) -> None:
        """Takes in one value."""
        counts = self._counts.get(labels)
        if counts is None:
            self._sums[labels] = 0.0
            counts = self._counts[labels] = [0] * (len(self._bounds) + 1)
        counts[bisect_left(self._bounds, value)] += 1
        self._sums[labels] += value

    def _lines(self) -> Iterator[str]:
        for labels, counts in list(self._counts.items()):
            total = 0
            for bound, count in zip((*self._bounds, float("inf")), counts, strict=True):
                total += count
                shown = "+Inf" if bound == float("inf") else f"{bound:.15g}"
                yield self._line(labels, total, "_bucket", f'le="{shown}"')
            yield self._line(labels, self._sums[labels], "_sum")
            yield self._line(labels, total, "_count")


class Registry:
    """The metrics of one server, in the order in which they were made."""

    def __init__(self) -> None:
        self._metrics: list[_Metric] = []

    def counter(self, name: str, help: str, *labels: str) -> Counter:
        """Adds a counter; by convention its name ends in ``_total``."""
        metric = Counter(name, help, labels)
        self._metrics.append(metric)
        return metric

    def gauge(self, name: str, help: str, *labels: str, read: Callable[[], Iterable[tuple[Labels, float]]]) -> None:
        """Adds a gauge.

        Args:
            name: with its unit.
            help: one line.
            *labels: their names.
            read: called at each rendering; gives the values of the labels and the number.
        """
        self._metrics.append(Gauge(name, help, labels, read))

    def histogram(self, name: str, help: str, *labels: str, buckets: Sequence[float] = LATENCY_BUCKETS_S) -> Histogram:
        """Adds a histogram with these upper bounds, ascending."""
        metric = Histogram(name, help, labels, buckets)
        self._metrics.append(metric)
        return metric

    def render(self) -> str:
        """All metrics as text."""
        return "".join(metric.render() for metric in self._metrics)


def _escape(text: str, *, quoted: bool = False) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quoted else text
