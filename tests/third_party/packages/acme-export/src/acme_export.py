"""Exports runs: a tracer, two trackers, an exporter of spans with settings, and a reader of another library's spans."""

from __future__ import annotations

import contextlib
import csv
import json
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning import Rollout, Run, Span
from agentlightning.event import Event, StepFinished
from agentlightning.plugin import Component, OpenSpan, Sample, Trace, hookimpl

plugin_interface = 1


@dataclass
class Settings:
    """Settings of the exporter of spans; without a file it exports nothing."""

    file: str | None = None


class PrefixedTracer(agl.OtelTracer):
    """Names the root span of each attempt with a prefix."""

    def __init__(self, *, prefix: str = "acme.") -> None:
        super().__init__()
        self.prefix = prefix

    @contextlib.contextmanager
    def root_context(self, trace: Trace, name: str) -> Iterator[OpenSpan]:
        with super().root_context(trace, self.prefix + name) as span:
            yield span


class CsvTracker:
    """Writes the metrics of each step to ``metrics.csv``."""

    def __init__(self, *, name: str = "metrics.csv") -> None:
        self.name = name
        self._lock = threading.Lock()
        self._path: Path | None = None

    def start(self, run: Run, directory: Path | None) -> None:
        self._path = (directory or Path.cwd()) / self.name

    def on_event(self, event: Event) -> None:
        if isinstance(event, StepFinished) and self._path is not None:
            with self._lock, self._path.open("a", newline="") as file:
                csv.writer(file).writerows((event.step, name, value) for name, value in event.values.items())

    def close(self) -> None: ...


class WebhookTracker:
    """Posts each step, and the rewards of some of its rollouts, to a URL."""

    def __init__(self, *, url: str, timeout_s: float = 5.0) -> None:
        self.url, self.timeout_s = url, timeout_s

    def start(self, run: Run, directory: Path | None) -> None:
        self._post({"run": run.run_id})

    def on_event(self, event: Event) -> None:
        if isinstance(event, StepFinished):
            self._post({"step": event.step, "metrics": dict(event.values)})

    def on_samples(self, step: int, samples: Sequence[Sample]) -> None:
        self._post({"step": step, "samples": len(samples), "spans": sum(len(spans) for _, spans in samples)})

    def close(self) -> None: ...

    def _post(self, body: dict[str, Any]) -> None:
        request = urllib.request.Request(self.url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=self.timeout_s).close()


@hookimpl
def observe_rollout(rollout: Rollout, spans: Sequence[Span], settings: Settings) -> None:
    if settings.file is not None:
        with Path(settings.file).open("a") as file:
            for span in spans:
                print(json.dumps({"rollout": rollout.rollout_id, "span": span.name}), file=file)


READER = {"gen_ai.agent.name": lambda span: span.attributes.get("acme.worker")}


@hookimpl
def components() -> list[Component]:
    return [
        Component("tracker", "csv", f"{__name__}:CsvTracker", summary="metrics.csv"),
        Component("tracker", "webhook", f"{__name__}:WebhookTracker", summary="posts steps to a URL"),
        Component("tracer", "prefixed", f"{__name__}:PrefixedTracer", summary="root spans with a prefix"),
        Component("span_reader", "acme", f"{__name__}:READER", summary="names of Acme's workers"),
    ]
