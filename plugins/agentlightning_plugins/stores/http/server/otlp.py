"""OTLP/HTTP, the export protocol of OpenTelemetry, as protobuf and as JSON.

See https://opentelemetry.io/docs/specs/otlp/#otlphttp: an answer has the encoding of its request, a malformed request
gets a 400, and ``partial_success`` counts the spans that were refused.
"""

from __future__ import annotations

import base64
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from aiohttp import web
from google.protobuf.json_format import MessageToJson, ParseDict, ParseError
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan

from agentlightning import semconv
from agentlightning.errors import NotFoundError, QuotaError
from agentlightning.run.attempt_token import AttemptToken
from agentlightning.store.protocol import LightningStore
from agentlightning.types import MAX_SEQUENCE_ID, Span, SpanContext, SpanEvent, SpanLink, SpanResource, TraceStatus
from agentlightning_plugins.shared.web import request as web_body
from agentlightning_plugins.stores.http.message import MAX_ITEM_BYTES, ErrorCode
from agentlightning_plugins.stores.http.server.access import count_refused, screen_spans
from agentlightning_plugins.stores.http.server.answer import RefusedError
from agentlightning_plugins.stores.http.server.body import Limits

_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5
"""Wire types."""


def has_more_messages(body: bytes, kind: Any, limit: int) -> bool:
    """Whether a body has more than ``limit`` nested messages; an empty one takes 2 bytes, but much memory when decoded.

    Args:
        body: the encoded message.
        kind: the message's descriptor.
        limit: the number of messages at which counting ends.

    Raises:
        ValueError: the body is not protobuf.
    """
    if len(body) <= 2 * limit:
        return False
    count = 0
    parts = [(0, len(body), _inner(kind))]
    try:
        while parts:
            position, end, inner = parts.pop()
            while position < end:
                tag, position = _read_varint(body, position)
                wire_type = tag & 7
                if wire_type == _BYTES:
                    size, position = _read_varint(body, position)
                    if tag >> 3 in inner:
                        count += 1
                        if count > limit:
                            return True
                        parts.append((position, position + size, _inner(inner[tag >> 3])))
                    position += size
                elif wire_type == _VARINT:
                    _, position = _read_varint(body, position)
                elif wire_type in (_FIXED_64, _FIXED_32):
                    position += 8 if wire_type == _FIXED_64 else 4
                else:
                    raise ValueError(f"wire type {wire_type}")
            if position > end:
                raise ValueError("a field is longer than its message")
    except IndexError:
        raise ValueError("it is cut off") from None
    return False


@functools.cache
def _inner(kind: Any) -> dict[int, Any]:
    """Returns the descriptors of the fields that are messages, by number."""
    return {field.number: field.message_type for field in kind.fields if field.message_type is not None}


def _read_varint(body: bytes, position: int) -> tuple[int, int]:
    byte = body[position]
    value, shift = byte & 0x7F, 7
    position += 1
    while byte & 0x80:
        if shift > 63:
            raise ValueError("an integer of more than 64 bits")
        byte = body[position]
        value |= (byte & 0x7F) << shift
        shift += 7
        position += 1
    return value, position


PROTOBUF: Final = "application/x-protobuf"
JSON: Final = "application/json"

_STATUS_CODES: Final = {0: "UNSET", 1: "OK", 2: "ERROR"}
_IS_REMOTE: Final = 0x200
_RPC_CODES: Final[dict[ErrorCode, int]] = {
    "unauthorized": 16,
    "forbidden": 7,
    "too_large": 8,
    "store_failed": 14,
    "storage_full": 14,
}
"""``google.rpc.Code`` for each of our codes; all others are 3 (invalid argument) or 13 (internal)."""
_ID_KEYS: Final = frozenset({"traceId", "spanId", "parentSpanId", "trace_id", "span_id", "parent_span_id"})


async def read_request(http: web.Request, limits: Limits) -> ExportTraceServiceRequest:
    """Reads and decodes an export request.

    Raises:
        RefusedError or RequestRefused: the body is malformed or too large.
    """
    body = await web_body.read_body(http, limits.body_bytes, limits.body_bytes)
    content = None
    if http.content_type == JSON:
        content = await web_body.parse_json(body, max_items=limits.values)
    return await web_body.run_if_large(body, _decode, body, content, http.content_type, limits.messages)


def _decode(body: bytes, content: Any, content_type: str, max_messages: int) -> ExportTraceServiceRequest:
    request = ExportTraceServiceRequest()
    try:
        if content_type == JSON:
            content = _ids_to_base64(content)
            if not isinstance(content, dict):
                raise ValueError("not a JSON object")
            ParseDict(content, request, ignore_unknown_fields=True)
            return request
        if content_type == PROTOBUF:
            if has_more_messages(body, request.DESCRIPTOR, max_messages):
                raise RefusedError("too_large", f"the export has more than {max_messages} values; send fewer spans")
            request.ParseFromString(body)
            return request
    except (DecodeError, ParseError, ValueError, TypeError, RecursionError) as error:
        raise RefusedError("malformed", f"the body is not an OTLP trace export in {content_type}: {error}") from error
    raise RefusedError("malformed", f"content type {content_type!r}: send OTLP traces as {PROTOBUF} or {JSON}")


async def export_spans(
    request: ExportTraceServiceRequest, store: LightningStore, token: AttemptToken | None, max_spans: int
) -> ExportTraceServiceResponse:
    """Stores the spans of a request; the answer counts those that cannot be stored.

    Args:
        request: the attributes of a span or its resource name its rollout and attempt.
        store: stores the spans of any run.
        token: the only attempt that is allowed, and the default for spans that name none; None allows all attempts.
        max_spans: how many spans a request may have.

    Raises:
        RefusedError: there are too many spans, or one belongs to a different attempt than the token; none is stored.
    """
    number = sum(len(scope.spans) for group in request.resource_spans for scope in group.scope_spans)
    if number > max_spans:
        raise RefusedError("too_large", f"{number} spans, and {max_spans} are allowed in one request")
    convert: Callable[[], list[Span | str]] = functools.partial(list, _convert(request, token))
    converted = await web_body.in_thread(convert) if request.ByteSize() > web_body.LARGE_BODY_BYTES else convert()
    spans = [item for item in converted if isinstance(item, Span)]
    reasons = [item for item in converted if isinstance(item, str)]
    if token is not None and any((s.rollout_id, s.attempt_id) != token[:2] for s in spans):
        raise RefusedError("forbidden", f"this token is for attempt {token.attempt_id} only; some spans are not")
    spans, refused = await screen_spans(store, token, spans)
    reasons += refused + await _store(spans, store)
    response = ExportTraceServiceResponse()
    if reasons:
        response.partial_success.rejected_spans = len(reasons)
        response.partial_success.error_message = "; ".join(itertools.islice(dict.fromkeys(reasons), 3))
    return response


def write_response(response: ExportTraceServiceResponse, content_type: str) -> bytes:
    """Encodes the answer in the encoding of its request."""
    content = MessageToJson(response, indent=None).encode() if content_type == JSON else response.SerializeToString()
    return bytes(content)


def write_status(code: ErrorCode, message: str, status: int) -> bytes:
    """Encodes the ``google.rpc.Status`` that answers a protobuf request with 4xx or 5xx."""
    rpc_code = _RPC_CODES.get(code, 13 if status >= 500 else 3)
    # Its fields 1 (code) and 2 (message) are encoded like fields 1 and 2 of a partial success.
    return bytes(ExportTracePartialSuccess(rejected_spans=rpc_code, error_message=message).SerializeToString())


async def _store(spans: list[Span], store: LightningStore) -> list[str]:
    """Stores the spans of known attempts; returns a reason for each other span."""
    try:
        await store.add_many_spans(spans)
        return []
    except (NotFoundError, QuotaError):
        reasons: list[str] = []
        attempts: dict[tuple[str, str], list[Span]] = {}
    for span in spans:
        attempts.setdefault((span.rollout_id, span.attempt_id), []).append(span)
    for attempt, own in attempts.items():
        try:
            await store.add_many_spans(own)
        except (NotFoundError, QuotaError) as error:
            reasons += [str(error)] * len(own)
            if isinstance(error, QuotaError):
                await count_refused(store, *attempt, len(own))
    return reasons


def _ids_to_base64(value: Any) -> Any:
    """Re-encodes ids from OTLP's hex to the base64 of protobuf's JSON. Attributes cannot have these keys."""
    if isinstance(value, list):
        return [_ids_to_base64(item) for item in value]
    if isinstance(value, dict):
        return {
            key: base64.b64encode(bytes.fromhex(item)).decode()
            if key in _ID_KEYS and isinstance(item, str)
            else _ids_to_base64(item)
            for key, item in value.items()
        }
    return value


def _convert(request: ExportTraceServiceRequest, token: AttemptToken | None) -> Iterator[Span | str]:
    """Yields each span of a request, or the reason why it is refused."""
    for group in request.resource_spans:
        resource = SpanResource(attributes=_attributes(group.resource.attributes), schema_url=group.schema_url)
        for scope in group.scope_spans:
            for span in scope.spans:
                yield _convert_span(span, resource, token)


def _convert_span(span: OtlpSpan, resource: SpanResource, token: AttemptToken | None) -> Span | str:
    attributes = _attributes(span.attributes)

    def find(name: str, default: Any) -> Any:
        return attributes.get(name, resource.attributes.get(name, default))

    rollout_id = find(semconv.ROLLOUT_ID, token and token.rollout_id)
    attempt_id = find(semconv.ATTEMPT_ID, token and token.attempt_id)
    sequence_id = find(semconv.SPAN_SEQUENCE_ID, 0)
    if not (rollout_id and attempt_id and isinstance(rollout_id, str) and isinstance(attempt_id, str)):
        return (
            f"span {span.name!r} has no attempt: set the resource attributes {semconv.ROLLOUT_ID} and "
            f"{semconv.ATTEMPT_ID} (OTEL_RESOURCE_ATTRIBUTES)"
        )
    if len(span.trace_id) != 16 or len(span.span_id) != 8 or not any(span.trace_id) or not any(span.span_id):
        return f"span {span.name!r} has invalid ids: a trace id has 16 bytes, a span id 8, and neither is all zeros"
    if len(span.parent_span_id) not in (0, 8):
        return f"span {span.name!r} has a parent id of {len(span.parent_span_id)} bytes instead of 8"
    if span.ByteSize() > MAX_ITEM_BYTES:
        return f"span {span.name!r} has {span.ByteSize()} bytes; {MAX_ITEM_BYTES} are allowed"
    if not isinstance(sequence_id, int) or not 0 <= sequence_id <= MAX_SEQUENCE_ID:
        return f"span {span.name!r}: {semconv.SPAN_SEQUENCE_ID} = {sequence_id!r} is not an integer of 0 to 2**53 - 1"
    trace_id = span.trace_id.hex()
    parent_id = span.parent_span_id.hex() or None
    parent = None
    if parent_id is not None:
        parent = SpanContext(trace_id=trace_id, span_id=parent_id, is_remote=bool(span.flags & _IS_REMOTE))
    return Span(
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        sequence_id=sequence_id,
        trace_id=trace_id,
        span_id=span.span_id.hex(),
        parent_id=parent_id,
        name=span.name,
        status=TraceStatus.model_validate(
            {"status_code": _STATUS_CODES.get(span.status.code, "UNSET"), "description": span.status.message or None}
        ),
        attributes=attributes,
        events=[_event(event) for event in span.events],
        links=[_link(link) for link in span.links],
        start_time=_seconds(span.start_time_unix_nano),
        end_time=_seconds(span.end_time_unix_nano),
        context=SpanContext(trace_id=trace_id, span_id=span.span_id.hex(), trace_state=_trace_state(span.trace_state)),
        parent=parent,
        resource=resource,
    )


def _event(event: OtlpSpan.Event) -> SpanEvent:
    return SpanEvent(
        name=event.name, attributes=_attributes(event.attributes), timestamp=_seconds(event.time_unix_nano)
    )


def _link(link: OtlpSpan.Link) -> SpanLink:
    context = SpanContext(
        trace_id=link.trace_id.hex(),
        span_id=link.span_id.hex(),
        is_remote=bool(link.flags & _IS_REMOTE),
        trace_state=_trace_state(link.trace_state),
    )
    return SpanLink(context=context, attributes=_attributes(link.attributes))


def _seconds(nanoseconds: int) -> float | None:
    return nanoseconds / 1e9 if nanoseconds else None


def _trace_state(text: str) -> dict[str, Any]:
    pairs = (entry.strip().partition("=") for entry in text.split(","))
    return {key: value for key, separator, value in pairs if separator}


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return _attributes(value.kvlist_value.values)
    if kind == "bytes_value":
        return base64.b64encode(value.bytes_value).decode()
    return getattr(value, kind)
