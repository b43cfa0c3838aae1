"""Spans of frameworks that report begin and end by callbacks, with ids instead of ``with`` blocks."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping
from typing import Any, Final, cast

from opentelemetry import context as otel_context
from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode, Tracer

from agentlightning.tracer.attribute import to_json

AGENT_NAME: Final = "gen_ai.agent.name"
OPERATION: Final = "gen_ai.operation.name"
TOOL_NAME: Final = "gen_ai.tool.name"
TOOL_CALL_ID: Final = "gen_ai.tool.call.id"
TOOL_ARGUMENTS: Final = "gen_ai.tool.call.arguments"
TOOL_RESULT: Final = "gen_ai.tool.call.result"
INPUT: Final = "input.value"
OUTPUT: Final = "output.value"
_ENTERED: Final = otel_context.create_key("agentlightning-entered")


class SpanTree:
    """The open spans of one framework in this process, by its own ids.

    A span that begins is active in the caller's context until it ends, so that what other instrumentation records comes
    under it. Its parent is the span whose id was named, else the active one. Ids that end twice, or never, do no harm.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._lock = threading.Lock()
        self._open: dict[Hashable, Span] = {}
        self._passed: dict[Hashable, Hashable] = {}

    def begin(self, key: Hashable, name: str, attributes: Mapping[str, Any], parent: Hashable = None) -> None:
        """Begins a span.

        Args:
            key: the framework's id of it.
            name: of the span.
            attributes: scalars and lists of scalars; None is left out.
            parent: the framework's id of what it is part of.
        """
        around = leave_ended()
        above = self._find(parent)
        under = around if above is None else otel.set_span_in_context(above, around)
        given = {key: value for key, value in attributes.items() if value is not None}
        span = self._tracer.start_span(name, context=under, attributes=given)
        with self._lock:
            self._open[key] = span
        inside = otel_context.set_value(_ENTERED, (span, around), otel.set_span_in_context(span, around))
        otel_context.attach(inside)

    def pass_over(self, key: Hashable, parent: Hashable) -> None:
        """Says that something has no span of its own: what names it as parent comes under its parent."""
        if parent is not None:
            with self._lock:
                self._passed[key] = parent

    def end(
        self, key: Hashable, attributes: Mapping[str, Any] | None = None, error: BaseException | None = None
    ) -> None:
        """Ends a span, with the exception if there is one."""
        with self._lock:
            self._passed.pop(key, None)
            span = self._open.pop(key, None)
        if span is None:
            return
        span.set_attributes({key: value for key, value in (attributes or {}).items() if value is not None})
        if error is not None:
            span.record_exception(error)
            span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
        span.end()
        leave_ended()

    def clear(self) -> None:
        """Ends what was left open."""
        for key in list(self._open):
            self.end(key)

    def _find(self, key: Hashable) -> Span | None:
        with self._lock:
            while key in self._passed:
                key = self._passed[key]
            return self._open.get(key)


def leave_ended() -> Context:
    """Makes the innermost span that is still open the active one.

    A framework may end a span in another context than it began in; this one notices when it is asked next.
    """
    current = otel_context.get_current()
    while (entered := otel_context.get_value(_ENTERED, current)) is not None:
        span, around = cast(tuple[Span, Context], entered)
        if span.is_recording() or otel.get_current_span(current) is not span:
            break
        current = around
        otel_context.attach(current)
    return current


def to_text(value: Any) -> str | None:
    """What a span says of a value: a text as it is, None as nothing, anything else as JSON."""
    return value if value is None or isinstance(value, str) else to_json(value)
