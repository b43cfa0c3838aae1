"""OTLP/HTTP: the OpenTelemetry exporter and hand-made messages against the store server."""

from __future__ import annotations

import asyncio
import base64
import gzip
import zlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, SpanContext, Status, StatusCode, TraceFlags

from agentlightning.run import attempt_token
from agentlightning.store.protocol import LightningStore
from agentlightning.types import AttemptedRollout, Span
from agentlightning_plugins.stores.http.server import LightningStoreServer
from tests.plugins.stores.served import ask, claim, serve

PROTOBUF, JSON = "application/x-protobuf", "application/json"
TOKEN = "a-token-of-this-test"


@pytest.fixture
async def served() -> AsyncIterator[tuple[LightningStoreServer, LightningStore]]:
    async with serve() as both:
        yield both


@pytest.fixture
def server(served: tuple[LightningStoreServer, LightningStore]) -> LightningStoreServer:
    return served[0]


@pytest.fixture
def store(served: tuple[LightningStoreServer, LightningStore]) -> LightningStore:
    return served[1]


def record(rollout: AttemptedRollout | None, **attributes: Any) -> list[ReadableSpan]:
    """Returns a parent span with an event, a link and an error, and its child, as OpenTelemetry's SDK ends them."""
    ids = {}
    if rollout is not None:
        ids = {"agentlightning.rollout_id": rollout.rollout_id, "agentlightning.attempt_id": rollout.attempt.attempt_id}
    provider = TracerProvider(resource=Resource({"service.name": "agent", **ids}, "https://schemas.example/1"))
    kept = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracer = provider.get_tracer("test")
    other = SpanContext(7, 9, is_remote=True, trace_flags=TraceFlags(1))
    with tracer.start_as_current_span("parent", links=[Link(other, {"why": "because"})]) as parent:
        parent.set_attributes({"text": "ünïcode", "whole": 2**40, "share": 0.25, "yes": True, **attributes})
        parent.set_attribute("numbers", [1, 2, 3])
        parent.add_event("seen", {"at": "start"}, timestamp=1_700_000_000_500_000_000)
        parent.set_status(Status(StatusCode.ERROR, "went wrong"))
        tracer.start_span("child").end()
    return list(kept.get_finished_spans())


def encode(spans: list[ReadableSpan]) -> bytes:
    content: bytes = encode_spans(spans).SerializeToString()
    return content


def encode_as_json(spans: list[ReadableSpan]) -> dict[str, Any]:
    """Returns the message as JSON in the form of the specification: hex ids and numbers for enums."""
    message: dict[str, Any] = MessageToDict(encode_spans(spans), use_integers_for_enums=True)

    def to_hex(value: Any) -> Any:
        if isinstance(value, list):
            return [to_hex(item) for item in value]
        if isinstance(value, dict):
            return {
                key: base64.b64decode(item).hex() if key in ("traceId", "spanId", "parentSpanId") else to_hex(item)
                for key, item in value.items()
            }
        return value

    converted: dict[str, Any] = to_hex(message)
    return converted


def expected(spans: list[ReadableSpan], rollout: AttemptedRollout) -> list[dict[str, Any]]:
    """Returns the spans that the tracer of this process stores for the same calls."""
    return [
        Span.from_opentelemetry(span, rollout.rollout_id, rollout.attempt.attempt_id, number).model_dump(mode="json")
        for number, span in enumerate(spans, 1)
    ]


async def stored(store: LightningStore, rollout: AttemptedRollout) -> list[dict[str, Any]]:
    return [span.model_dump(mode="json") for span in await store.query_spans(rollout.rollout_id)]


@pytest.mark.parametrize("compression", list(Compression))
async def test_the_opentelemetry_exporter_stores_the_same_spans_as_our_tracer(
    compression: Compression, server: LightningStoreServer, store: LightningStore
) -> None:
    rollout = await claim(store)
    spans = record(rollout)
    exporter = OTLPSpanExporter(endpoint=server.otlp_traces_endpoint(), compression=compression)
    assert await asyncio.to_thread(exporter.export, spans) is SpanExportResult.SUCCESS
    assert await stored(store, rollout) == expected(spans, rollout)
    attempt = await store.get_latest_attempt(rollout.rollout_id)
    assert attempt is not None
    assert attempt.status == "running"
    assert await asyncio.to_thread(exporter.export, spans) is SpanExportResult.SUCCESS
    assert len(await stored(store, rollout)) == 2
    exporter.shutdown()


async def test_spans_sent_as_json_are_stored_as_the_tracer_stores_them(
    server: LightningStoreServer, store: LightningStore
) -> None:
    rollout = await claim(store)
    spans = record(rollout)
    assert await ask(server, "POST", "/v1/traces", encode_as_json(spans)) == (200, {})
    assert await stored(store, rollout) == expected(spans, rollout)


@pytest.mark.parametrize(("coding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
async def test_compressed_messages_are_read(
    coding: str, compress: Any, server: LightningStoreServer, store: LightningStore
) -> None:
    rollout = await claim(store)
    headers = {"content-type": PROTOBUF, "content-encoding": coding}
    assert (await ask(server, "POST", "/v1/traces", compress(encode(record(rollout))), headers=headers))[0] == 200
    assert len(await stored(store, rollout)) == 2


async def test_the_attempt_of_a_span_may_be_named_by_the_span_instead_of_its_resource(
    server: LightningStoreServer, store: LightningStore
) -> None:
    rollout = await claim(store)
    ids = {"agentlightning.rollout_id": rollout.rollout_id, "agentlightning.attempt_id": rollout.attempt.attempt_id}
    message = encode_as_json(record(None, **ids, **{"agentlightning.span_sequence_id": 7}))
    status, answer = await ask(server, "POST", "/v1/traces", message)
    assert (status, answer["partialSuccess"]["rejectedSpans"]) == (200, "1")  # the child has no ids
    (span,) = await store.query_spans(rollout.rollout_id)
    assert (span.name, span.sequence_id) == ("parent", 7)


async def test_attribute_values_that_are_not_json_become_text(
    server: LightningStoreServer, store: LightningStore
) -> None:
    rollout = await claim(store)
    message = encode_spans(record(rollout, loss=float("nan")))
    (spans,) = (scope.spans for scope in message.resource_spans[0].scope_spans)
    (sent,) = (span for span in spans if span.name == "parent")
    sent.attributes.add(key="picture").value.bytes_value = b"\x00\xff"  # an SDK of 2025 drops such a value
    body = message.SerializeToString()
    assert (await ask(server, "POST", "/v1/traces", body, headers={"content-type": PROTOBUF}))[0] == 200
    parent = next(span for span in await store.query_spans(rollout.rollout_id) if span.name == "parent")
    assert (parent.attributes["loss"], parent.attributes["picture"]) == ("NaN", "AP8=")


async def test_spans_that_cannot_be_stored_are_counted_and_all_other_spans_are_stored(
    server: LightningStoreServer, store: LightningStore
) -> None:
    rollout = await claim(store)
    good, unknown = encode_as_json(record(rollout)), encode_as_json(record(rollout))
    for attribute in unknown["resourceSpans"][0]["resource"]["attributes"]:
        if attribute["key"] == "agentlightning.attempt_id":
            attribute["value"] = {"stringValue": "at-0"}
    unknown["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["spanId"] = "00" * 8
    huge = encode_as_json(record(rollout, text="x" * 10 * 2**20))
    message = {"resourceSpans": [*unknown["resourceSpans"], *good["resourceSpans"], *huge["resourceSpans"]]}
    status, answer = await ask(server, "POST", "/v1/traces", message)
    assert status == 200
    assert answer["partialSuccess"]["rejectedSpans"] == "3"
    for reason in ("at-0", "invalid ids", "bytes"):
        assert reason in answer["partialSuccess"]["errorMessage"]
    assert sorted(span.name for span in await store.query_spans(rollout.rollout_id)) == ["child", "child", "parent"]

    headers = {"content-type": PROTOBUF}
    status, content = await ask(server, "POST", "/v1/traces", encode(record(None)), headers=headers)
    assert status == 200
    assert ExportTraceServiceResponse.FromString(content).partial_success.rejected_spans == 2


MALFORMED = [
    (PROTOBUF, b"\xff\xff\xff"),
    (PROTOBUF, b"\x0a\x05ab"),
    (JSON, b"{"),
    (JSON, b"\xff"),
    (JSON, b"[]"),
    (JSON, b'{"resourceSpans": 3}'),
    (JSON, b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"spanId": "no hex"}]}]}]}'),
    (JSON, b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"startTimeUnixNano": "soon"}]}]}]}'),
    (JSON, b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"attributes": [{"key": "a", "value": NaN}]}]}]}]}'),
    ("text/plain", b"hello"),
]


@pytest.mark.parametrize(("content_type", "body"), MALFORMED, ids=[repr(body)[:70] for _, body in MALFORMED])
async def test_a_malformed_message_gets_status_400_and_changes_nothing(
    content_type: str, body: bytes, server: LightningStoreServer, store: LightningStore
) -> None:
    status, answer = await ask(server, "POST", "/v1/traces", body, headers={"content-type": content_type})
    assert status == 400
    if content_type == PROTOBUF:
        assert answer.startswith(b"\x08\x03\x12")  # google.rpc.Status: code 3, then the message
        assert b"OTLP" in answer
    else:
        assert answer["code"] == "malformed"
    assert (await store.statistics())["spans"] == 0


async def test_the_token_of_an_attempt_replaces_the_ids_in_spans_and_allows_no_other_ids() -> None:
    async with serve(TOKEN) as (server, store):
        mine, other = await claim(store), await claim(store)
        token = attempt_token.mint(
            attempt_token.derive_secret(TOKEN), mine.rollout_id, mine.attempt.attempt_id, mine.start_time + 3600
        )
        exporter = OTLPSpanExporter(
            endpoint=server.otlp_traces_endpoint(), headers={"authorization": f"Bearer {token}"}
        )
        assert await asyncio.to_thread(exporter.export, record(None)) is SpanExportResult.SUCCESS
        assert len(await stored(store, mine)) == 2
        assert await asyncio.to_thread(exporter.export, record(other)) is SpanExportResult.FAILURE
        mixed = encode(record(mine) + record(other))
        status, _ = await ask(server, "POST", "/v1/traces", mixed, token=token, headers={"content-type": PROTOBUF})
        assert status == 403
        assert len(await stored(store, mine)) == 2
        assert await stored(store, other) == []
        exporter.shutdown()


async def test_a_request_without_a_token_is_refused_with_an_otlp_status() -> None:
    async with serve(TOKEN) as (server, _):
        status, answer = await ask(server, "POST", "/v1/traces", b"", headers={"content-type": PROTOBUF})
        assert status == 401
        assert answer.startswith(b"\x08\x10\x12")
