from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Iterator

import pytest
from opentelemetry import trace as otel
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from agentlightning_integrations.shared.span_tree import SpanTree, detach_ended, to_text


class Recording:
    """A tree of spans and the spans it recorded."""

    def __init__(self) -> None:
        self.exporter, provider = InMemorySpanExporter(), TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = provider.get_tracer("test")
        self.tree = SpanTree(self.tracer)

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.exporter.get_finished_spans()}

    def parent_of(self, name: str) -> str | None:
        parent = self.spans[name].parent
        ids = {span.context.span_id: other for other, span in self.spans.items()}
        return None if parent is None else ids[parent.span_id]


@pytest.fixture
def recording() -> Iterator[Recording]:
    recording = Recording()
    yield recording
    recording.tree.clear()
    detach_ended()


def test_inner_spans_are_children_of_the_innermost_open_span(recording: Recording) -> None:
    recording.tree.begin("a", "agent", {})
    recording.tree.begin("t", "tool", {"left.out": None, "kept": 1})
    recording.tracer.start_span("by other code").end()
    recording.tree.end("t", {"result": "5"})
    recording.tracer.start_span("after the tool").end()
    recording.tree.end("a")
    assert recording.parent_of("by other code") == "tool"
    assert recording.parent_of("after the tool") == recording.parent_of("tool") == "agent"
    assert dict(recording.spans["tool"].attributes or {}) == {"kept": 1, "result": "5"}


def test_a_given_parent_takes_precedence_over_the_active_span_even_if_its_id_was_omitted(recording: Recording) -> None:
    recording.tree.begin("a", "agent", {})
    recording.tree.omit("s", "a")
    recording.tree.omit("deeper", "s")
    recording.tree.begin("other", "other", {})
    recording.tree.begin("t", "tool", {}, parent="deeper")
    recording.tree.begin("unknown", "of an unknown parent", {}, parent="no such id")
    for key in ("unknown", "t", "other", "a"):
        recording.tree.end(key)
    assert recording.parent_of("tool") == "agent"
    assert recording.parent_of("of an unknown parent") == "tool"


async def test_a_span_that_ends_in_another_task_is_no_longer_active(recording: Recording) -> None:
    recording.tree.begin("a", "agent", {})
    recording.tree.begin("t", "tool", {})

    async def end() -> None:
        recording.tree.end("t")
        recording.tree.end("a")

    await asyncio.create_task(end())
    recording.tree.begin("b", "next", {})
    recording.tree.end("b")
    assert recording.parent_of("next") is None
    assert not otel.get_current_span().get_span_context().is_valid


def test_spans_are_isolated_between_threads_and_contexts(recording: Recording) -> None:
    def run(number: int) -> None:
        recording.tree.begin(("a", number), f"agent {number}", {})
        barrier.wait()
        recording.tracer.start_span(f"inside {number}").end()
        barrier.wait()
        recording.tree.end(("a", number))

    barrier = threading.Barrier(4)
    threads = [threading.Thread(target=contextvars.Context().run, args=(run, number)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [recording.parent_of(f"inside {number}") for number in range(4)] == [f"agent {n}" for n in range(4)]


def test_an_error_is_recorded_on_the_span_and_unknown_ids_are_ignored(recording: Recording) -> None:
    recording.tree.begin("a", "agent", {})
    recording.tree.end("a", error=LookupError("down"))
    recording.tree.end("a")
    recording.tree.end("never begun")
    span = recording.spans["agent"]
    assert span.status.description == "LookupError: down"
    assert [event.name for event in span.events] == ["exception"]


def test_forget_removes_one_omitted_id_and_clear_removes_all_and_ends_open_spans(recording: Recording) -> None:
    recording.tree.begin("a", "agent", {})
    recording.tree.omit("s", "a")
    recording.tree.omit("t", "a")
    recording.tree.forget("s")
    recording.tree.forget("a")
    assert (set(recording.tree._open), set(recording.tree._omitted)) == ({"a"}, {"t"})
    recording.tree.clear()
    assert set(recording.spans) == {"agent"}
    assert not recording.tree._omitted


@pytest.mark.parametrize(("value", "text"), [("as it is", "as it is"), (None, None), ({"a": 1}, '{"a": 1}'), (5, "5")])
def test_a_value_is_converted_to_text_as_it_is_or_as_json(value: object, text: str | None) -> None:
    assert to_text(value) == text
