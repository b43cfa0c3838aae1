"""The endpoints other than model calls: the list of models, health, metrics, status, and pauses."""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web
from prometheus_client import Counter, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily

from agentlightning.store.span_writer import AttemptKey, SpanWriter
from agentlightning_plugins.gateway.access import Authenticator
from agentlightning_plugins.gateway.backends.model_table import ModelTable
from agentlightning_plugins.gateway.call import ModelCall, used_tokens
from agentlightning_plugins.gateway.dialects.dialect import CallRefused
from agentlightning_plugins.gateway.dialects.wire import dump_json
from agentlightning_plugins.gateway.limits import Admission
from agentlightning_plugins.shared.web.metrics import CONTENT_TYPE, ScrapedMetrics
from agentlightning_plugins.shared.web.request import RequestRefused, parse_json, read_body

PROBES: Final = ("health", "livez", "readyz")
"""Paths that need no key."""
CONTROL_PATHS: Final = (*PROBES, "metrics", "status", "pause", "drain", "resume")
_CHANGES: Final = ("pause", "drain", "resume")
_MAX_BODY: Final = 10_000
_DRAIN_S: Final = 60.0
_MAX_DRAIN_S: Final = 600.0


_LATENCY_BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_NO_MODEL: Final = ""
"""The label for names that are not models of this gateway: agents must not be able to create metrics."""


class GatewayMetrics(ScrapedMetrics):
    """The metrics of one gateway server."""

    def __init__(
        self, models: ModelTable, admission: Admission, writer: SpanWriter, running: Iterable[ModelCall]
    ) -> None:
        """Creates the metrics; the gauges are read from the arguments at each scrape."""
        super().__init__()
        self._models = models
        self._admission = admission
        self._writer = writer
        self._running = running
        ProcessCollector(registry=self.registry)
        counter = functools.partial(Counter, registry=self.registry)
        histogram = functools.partial(
            Histogram, labelnames=["model"], registry=self.registry, buckets=_LATENCY_BUCKETS_S
        )
        self._calls = counter("agl_gateway_calls_total", "Calls answered or abandoned.", ["model", "status"])
        self._latency = histogram(
            "agl_gateway_call_seconds", "Time from the arrival of a call to the end of its answer."
        )
        self._first_token = histogram(
            "agl_gateway_first_token_seconds", "Time from the arrival of a call to the first bytes of its stream."
        )
        self._tokens = counter("agl_gateway_tokens_total", "Tokens of answered calls.", ["model", "kind"])
        self._incomplete = counter(
            "agl_gateway_incomplete_total", "Calls whose answer did not arrive in full.", ["model"]
        )

    def count(self, call: ModelCall, status: str) -> None:
        """Counts a call that has ended."""
        model = call.model if call.backend is not None else _NO_MODEL
        self._calls.labels(model, status).inc()
        self._latency.labels(model).observe(call.end_time - call.start_time)
        if call.first_time:
            self._first_token.labels(model).observe(call.first_time - call.start_time)
        if not call.is_complete:
            self._incomplete.labels(model).inc()
        input_tokens, output_tokens = used_tokens(call)
        if input_tokens or output_tokens:
            self._tokens.labels(model, "input").inc(input_tokens)
            self._tokens.labels(model, "output").inc(output_tokens)

    def refuse(self, status: int) -> None:
        """Counts a request that was refused before it became a call."""
        self._calls.labels(_NO_MODEL, status).inc()

    async def render(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return await self.render_with(self._read_gauges())

    def _read_gauges(self) -> Iterator[GaugeMetricFamily]:
        admission, writer = self._admission, self._writer
        yield GaugeMetricFamily("agl_gateway_in_flight", "Calls in flight.", admission.in_flight)
        yield GaugeMetricFamily("agl_gateway_waiting", "Calls that wait for the end of a pause.", admission.waiting)
        yield GaugeMetricFamily("agl_gateway_paused", "1 while new calls wait.", admission.is_paused)
        version = GaugeMetricFamily("agl_gateway_weight_version", "Version of the weights that serve calls.", labels=[])
        if admission.weight_version is not None:
            version.add_metric([], admission.weight_version)
        yield version
        labels = ["model", "backend"]
        up = GaugeMetricFamily("agl_gateway_backend_up", "1 if the backend is up.", labels=labels)
        in_flight = GaugeMetricFamily("agl_gateway_backend_in_flight", "Calls at a backend.", labels=labels)
        counts = count_by_backend(self._running)
        for backend in self._models.backends:
            up.add_metric([backend.model, backend.label], backend.is_up)
            in_flight.add_metric([backend.model, backend.label], counts[backend.identity])
        yield up
        yield in_flight
        yield GaugeMetricFamily("agl_gateway_span_queue", "Spans on their way to the store.", writer.queued)
        yield GaugeMetricFamily("agl_gateway_spans_dropped", "Spans lost so far.", writer.lost)


def count_by_backend(calls: Iterable[ModelCall]) -> collections.Counter[bytes]:
    """Returns the number of running calls of each backend, by the backend's identity."""
    return collections.Counter(call.backend.identity for call in calls if call.backend is not None)


@dataclass(frozen=True)
class Controls:
    """Answers requests that are not model calls."""

    authenticator: Authenticator
    models: ModelTable
    admission: Admission
    in_flight: Iterable[ModelCall]
    writer: SpanWriter
    metrics: GatewayMetrics
    routes: Iterable[str]
    """The paths of model calls, which an error lists."""
    is_stopping: Callable[[], bool]

    async def answer(self, request: web.BaseRequest, path: str, named: AttemptKey | None) -> web.Response:
        """Answers a request for a path below the attempt ``named``.

        Raises CallRefused if the client may not send the request, or if it is malformed or its path unknown.
        """
        listed = list_models(path, self.models.names)
        if listed is not None:
            if not self.authenticator.is_operator(request.headers):
                self.authenticator.authenticate(request.headers, named)
            return _json_response(listed)
        if path == "health":
            return _json_response({"status": "paused" if self.admission.is_paused else "ok"})
        if path == "livez":
            return web.Response(text="ok\n")
        if path == "readyz":
            problem = self._find_problem()
            return web.Response(text=f"{problem or 'ok'}\n", status=503 if problem else 200)
        if path not in CONTROL_PATHS:
            known = ", ".join(f"/{known}" for known in (*self.routes, "v1/models", *CONTROL_PATHS))
            raise CallRefused(404, f"no endpoint {request.method} {request.path}; endpoints: {known}", "not_found")
        if not self.authenticator.is_operator(request.headers, always=path in _CHANGES):
            raise CallRefused(401, f"/{path} requires the token of the gateway's store, or its own key", "wrong_key")
        if path == "status":
            return _json_response(self.describe())
        if path == "metrics":
            return web.Response(body=await self.metrics.render(), headers={"Content-Type": CONTENT_TYPE})
        if request.method != "POST":
            raise CallRefused(405, f"/{path} takes POST, not {request.method}", "method_not_allowed")
        if request.content_type != "application/json":  # web pages cannot send it to another origin without permission
            raise CallRefused(415, f"/{path} takes JSON with Content-Type: application/json", "invalid_request")
        try:
            body = await parse_json(await read_body(request, _MAX_BODY, _MAX_BODY) or b"{}")
            return _json_response(await self.execute(path, body))
        except RequestRefused as error:
            raise CallRefused(error.status, f"/{path}: {error}", "invalid_request") from None
        except (ValueError, AttributeError) as error:
            raise CallRefused(400, f"/{path}: {error}", "invalid_request") from None

    def _find_problem(self) -> str | None:
        """Returns why calls should go to another gateway; not the store's state, as calls are answered without it."""
        if self.is_stopping():
            return "stopping"
        return None if any(backend.is_up for backend in self.models.backends) else "no backend is up"

    async def execute(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Executes a request of an operator and returns its answer; raises ValueError for a malformed one."""
        if path == "drain":
            timeout_s = body.get("timeout_s", _DRAIN_S)
            if type(timeout_s) not in (int, float) or not 0 <= timeout_s <= _MAX_DRAIN_S:
                raise ValueError(f"timeout_s is {timeout_s!r}; give seconds from 0 to {_MAX_DRAIN_S:g}")
            return {"drained": await self.admission.drain(timeout_s)}
        if path == "pause":
            self.admission.pause()
        elif path == "resume":
            version = body.get("weight_version")
            if version is not None and (not isinstance(version, int) or isinstance(version, bool)):
                raise ValueError(f"weight_version is {version!r}; give a whole number, or leave it out")
            self.admission.resume(version)
        return self.describe()

    def describe(self) -> dict[str, Any]:
        """Returns the state of the gateway as JSON, without keys: the content of ``/status``."""
        in_flight = count_by_backend(self.in_flight)
        return {
            "backends": [
                {
                    "model": backend.model,
                    "endpoint": backend.endpoint,
                    "served_model": backend.served_model,
                    "provider": backend.provider.name,
                    "weight": backend.weight,
                    "up": backend.is_up,
                    "failure": backend.failure,
                    "in_flight": in_flight[backend.identity],
                }
                for backend in self.models.backends
            ],
            "paused": self.admission.is_paused,
            "in_flight": self.admission.in_flight,
            "waiting": self.admission.waiting,
            "weight_version": self.admission.weight_version,
            "spans_queued": self.writer.queued,
            "spans_lost": self.writer.lost,
        }


def _json_response(value: Any) -> web.Response:
    return web.Response(body=dump_json(value), content_type="application/json")


_PATH: Final = re.compile(r"(anthropic/)?v1/models(?:/(.+))?")


def list_models(path: str, names: Sequence[str]) -> dict[str, Any] | None:
    """Answers ``v1/models`` and ``v1/models/NAME``, also below ``anthropic/``; None for other paths and names."""
    match = _PATH.fullmatch(path)
    if match is None:
        return None
    form = _anthropic_model if match[1] else _openai_model
    if match[2] is not None:
        return form(match[2]) if match[2] in names else None
    data = [form(name) for name in names]
    if not match[1]:
        return {"object": "list", "data": data}
    first, last = (names[0], names[-1]) if names else (None, None)
    return {"data": data, "has_more": False, "first_id": first, "last_id": last}


def _openai_model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "agentlightning"}


def _anthropic_model(name: str) -> dict[str, Any]:
    return {"id": name, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
