"""Spans of frameworks that report start and end through callbacks with ids."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping
from typing import Any, Final, cast

from opentelemetry import context as otel_context
from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode, Tracer

from agentlightning.tracer.tracer import to_json

OPERATION: Final = "gen_ai.operation.name"
INPUT: Final = "input.value"
OUTPUT: Final = "output.value"
TOOL_ARGUMENTS: Final = "gen_ai.tool.call.arguments"
TOOL_RESULT: Final = "gen_ai.tool.call.result"
_ENTERED: Final = otel_context.create_key("agentlightning-entered")


class SpanTree:
    """The open spans of one framework in this process, by the framework's ids.

    A span that begins is active in the caller's context until it ends, so that spans of other instrumentation become
    its children. Its parent is the span with the id ``parent``, or else the active span. Ids that end twice, or
    never, do no harm.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._lock = threading.Lock()
        self._open: dict[Hashable, Span] = {}
        self._omitted: dict[Hashable, Hashable] = {}

    def begin(self, key: Hashable, name: str, attributes: Mapping[str, Any], parent: Hashable = None) -> None:
        """Begins a span; ``key`` and ``parent`` are ids of the framework. Attributes that are None are omitted."""
        outer = detach_ended()
        above = self._find(parent)
        under = outer if above is None else otel.set_span_in_context(above, outer)
        span = self._tracer.start_span(name, context=under, attributes=_known(attributes))
        with self._lock:
            self._open[key] = span
        otel_context.attach(otel_context.set_value(_ENTERED, (span, outer), otel.set_span_in_context(span, outer)))

    def begin_agent(
        self, key: Hashable, name: str, parent: Hashable, given: Any = None, attributes: Mapping[str, Any] | None = None
    ) -> None:
        """Begins the span of an agent that works on ``given``."""
        own = {OPERATION: "invoke_agent", "gen_ai.agent.name": name, INPUT: to_text(given)}
        self.begin(key, f"invoke_agent {name}", own | dict(attributes or {}), parent)

    def begin_tool(
        self, key: Hashable, name: str, parent: Hashable, arguments: Any = None, call_id: str | None = None
    ) -> None:
        self.begin(key, f"execute_tool {name}", tool_attributes(name, arguments, call_id), parent)

    def omit(self, key: Hashable, parent: Hashable) -> None:
        """Marks an id that has no span: its children become children of ``parent``."""
        if parent is not None:
            with self._lock:
                self._omitted[key] = parent

    def forget(self, key: Hashable) -> None:
        """Removes an id that ``omit`` marked; an open span stays open."""
        with self._lock:
            self._omitted.pop(key, None)

    def end(
        self, key: Hashable, attributes: Mapping[str, Any] | None = None, error: BaseException | None = None
    ) -> None:
        """Ends a span, and records its exception if there is one."""
        with self._lock:
            self._omitted.pop(key, None)
            span = self._open.pop(key, None)
        if span is None:
            return
        span.set_attributes(_known(attributes or {}))
        if error is not None:
            span.record_exception(error)
            span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
        span.end()
        detach_ended()

    def clear(self) -> None:
        """Ends the open spans and removes all ids."""
        with self._lock:
            self._omitted.clear()
            keys = list(self._open)
        for key in keys:
            self.end(key)

    def _find(self, key: Hashable) -> Span | None:
        with self._lock:
            while key in self._omitted:
                key = self._omitted[key]
            return self._open.get(key)


def detach_ended() -> Context:
    """Makes the innermost span that is still open the active one, and returns its context.

    A framework may end a span in a different context; where it began, it stays active until this is called.
    """
    current = otel_context.get_current()
    while (entered := otel_context.get_value(_ENTERED, current)) is not None:
        span, outer = cast(tuple[Span, Context], entered)
        if span.is_recording() or otel.get_current_span(current) is not span:
            break
        current = outer
        otel_context.attach(current)
    return current


def tool_attributes(name: str, arguments: Any, call_id: str | None = None) -> dict[str, Any]:
    """The attributes of a tool call's span; values may be None."""
    return {
        OPERATION: "execute_tool",
        "gen_ai.tool.name": name,
        "gen_ai.tool.call.id": call_id,
        TOOL_ARGUMENTS: to_text(arguments),
    }


def to_text(value: Any) -> str | None:
    """Converts a value to an attribute: text and None stay as they are, anything else becomes JSON."""
    return value if value is None or isinstance(value, str) else to_json(value)


def _known(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in attributes.items() if value is not None}
