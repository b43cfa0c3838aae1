"""Export to an OTLP endpoint in addition to the store, with a real receiver that decodes the spans."""

from __future__ import annotations

import asyncio
import gzip
import pickle
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from agentlightning.emitter import emit_reward
from agentlightning.errors import ConfigError
from agentlightning.plugin.registry import get_manager
from agentlightning.tracer import OtelTracer
from agentlightning.types import AttemptedRollout
from agentlightning_plugins.stores.memory.store import InMemoryLightningStore
from agentlightning_plugins.tracers.shared import pipeline
from tests.http_site import serving


class Receiver:
    """Accepts ``POST /v1/traces`` like Jaeger."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.hanging: asyncio.Event | None = None
        self.url = ""

    async def take(self, request: web.Request) -> web.Response:
        if self.hanging is not None:
            await self.hanging.wait()
        body = await request.read()
        if request.headers.get("Content-Encoding") == "gzip" and body[:2] == b"\x1f\x8b":
            body = gzip.decompress(body)
        message = ExportTraceServiceRequest.FromString(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self.spans += [
            span for resource in message.resource_spans for scope in resource.scope_spans for span in scope.spans
        ]
        return web.Response(
            body=ExportTraceServiceResponse().SerializeToString(), content_type="application/x-protobuf"
        )


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    async with serving(web.post("/v1/traces", receiver.take), web.post("/elsewhere", receiver.take)) as url:
        receiver.url = url
        yield receiver


async def act(tracer: OtelTracer, store: InMemoryLightningStore) -> AttemptedRollout:
    """Records one attempt with four spans between ``init`` and ``teardown``."""
    rollout = await store.start_rollout(0)
    tracer.init()
    try:
        async with tracer.trace_context(
            rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id, store=store
        ):
            with tracer.operation_context("outer", {"depth": 1}):
                tracer.create_span("inner")
            emit_reward(1.0)
    finally:
        await asyncio.to_thread(tracer.teardown)
    return rollout


@pytest.mark.parametrize("path", ["", "/v1/traces", "/elsewhere"])
async def test_the_endpoint_gets_the_spans_that_the_store_gets(receiver: Receiver, path: str) -> None:
    store = InMemoryLightningStore()
    rollout = await act(OtelTracer(otlp_endpoint=receiver.url + path, headers={"x-key": "secret"}), store)
    kept = list(await store.query_spans(rollout.rollout_id))
    assert len(kept) == 4
    assert {(span.trace_id.hex(), span.span_id.hex(), span.name) for span in receiver.spans} == {
        (span.trace_id, span.span_id, span.name) for span in kept
    }
    by_name = {span.name: span for span in receiver.spans}
    assert by_name["inner"].parent_span_id == by_name["outer"].span_id
    root = {item.key: item.value.string_value for item in by_name["agentlightning.rollout"].attributes}
    assert root["agentlightning.rollout_id"] == rollout.rollout_id, "so that people can search for the rollout there"
    assert root["agentlightning.attempt_id"] == rollout.attempt.attempt_id
    assert receiver.headers[0]["x-key"] == "secret"
    await store.close()


async def test_the_endpoint_can_also_be_set_in_the_environment(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=from-env")
    store = InMemoryLightningStore()
    await act(OtelTracer(), store)
    assert len(receiver.spans) == 4
    assert receiver.headers[0]["x-key"] == "from-env"
    await act(OtelTracer(otlp_endpoint=""), store)
    assert len(receiver.spans) == 4, "an empty endpoint disables the export, whatever the environment sets"
    await store.close()


async def test_tracers_export_only_what_they_trace(receiver: Receiver) -> None:
    store = InMemoryLightningStore()
    exporting, plain = OtelTracer(otlp_endpoint=receiver.url), OtelTracer()
    exporting.init()
    await act(plain, store)
    await act(exporting, store)
    await asyncio.to_thread(exporting.teardown)
    assert len(receiver.spans) == 4
    assert (await store.statistics())["spans"] == 8
    await store.close()


async def test_an_endpoint_that_hangs_slows_neither_the_agent_nor_the_store(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pipeline, "_MAX_SHUTDOWN_S", 0.2)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    receiver.hanging = asyncio.Event()
    store = InMemoryLightningStore()
    await act(OtelTracer(otlp_endpoint=receiver.url), store)
    assert (await store.statistics())["spans"] == 4
    assert "did not take the last spans in time; the store has them" in caplog.text
    receiver.hanging.set()
    await store.close()


async def test_an_endpoint_that_is_down_only_logs_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pipeline, "_MAX_SHUTDOWN_S", 0.2)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    store = InMemoryLightningStore()
    tracer = OtelTracer(otlp_endpoint="http://127.0.0.1:9")
    rollout = await store.start_rollout(0)
    ids: Any = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    tracer.init()
    async with tracer.trace_context(**ids, store=store) as trace:
        emit_reward(1.0)
    assert trace.dropped == 0
    assert (await store.statistics())["spans"] == 2
    await asyncio.to_thread(tracer.teardown)
    ours, old, new = "the store has them", "Exception while exporting Span batch", "Failed to export spans"
    assert any(warning in caplog.text for warning in (ours, old, new))
    await store.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"otlp_endpoint": "127.0.0.1:4318"},
            r"otlp_endpoint = '127.0.0.1:4318': give an http\(s\) URL such as http://",
        ),
        ({"headers": {"a": "b"}}, "headers are sent to otlp_endpoint: give otlp_endpoint too"),
    ],
)
def test_an_invalid_endpoint_is_refused_immediately(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        get_manager().create("tracer", {"name": "otel", **settings})


def test_a_tracer_with_an_endpoint_can_be_pickled_and_hides_its_key() -> None:
    tracer = OtelTracer(otlp_endpoint="http://127.0.0.1:4318", headers={"authorization": "the-key"})
    assert "the-key" not in repr(vars(tracer))
    assert pickle.loads(pickle.dumps(tracer))._target == tracer._target
