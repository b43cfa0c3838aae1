from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Generator, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

from agentlightning import emitter, semconv
from agentlightning.adapter.call import build_tree
from agentlightning.emitter import (
    emit_annotation,
    emit_exception,
    emit_feedback,
    emit_message,
    emit_object,
    emit_reward,
    operation,
)
from agentlightning.errors import ConfigError
from agentlightning.reward import (
    Feedback,
    Reward,
    find_feedback,
    find_final_reward,
    find_reward_spans,
    get_reward_value,
    get_rewards_from_span,
    is_reward_span,
)
from agentlightning.tracer import DummyTracer, OtelTracer, Trace, Tracer
from agentlightning.types import Span


@pytest.fixture(params=["otel", "dummy"])
def tracer(request: pytest.FixtureRequest) -> Iterator[Tracer]:
    tracer = OtelTracer() if request.param == "otel" else DummyTracer()
    tracer.init()
    yield tracer
    tracer.teardown()


def by_name(trace: Trace) -> dict[str, Span]:
    return {str(span.attributes.get(semconv.OPERATION_NAME, span.name)): span for span in trace.spans}


# Rewards.


async def test_a_reward_is_recorded_and_returned(tracer: Tracer) -> None:
    async with tracer.trace_context() as trace:
        span = emit_reward(0.5, attributes={"judge": {"name": "rule"}})
    assert trace.spans[0].span_id == span.span_id
    assert trace.spans[0].name == "agentlightning.reward"
    assert trace.spans[0].attributes == {
        "agentlightning.reward.0.name": "primary",
        "agentlightning.reward.0.value": 0.5,
        "judge.name": "rule",
    }
    assert find_final_reward(trace.spans) == 0.5


async def test_the_primary_reward_counts_if_there_are_several(tracer: Tracer) -> None:
    async with tracer.trace_context() as trace:
        emit_reward({"style": 1, "correct": 0.25}, primary_key="correct")
    (span,) = find_reward_spans(trace.spans)
    assert get_reward_value(span) == 0.25
    assert get_rewards_from_span(span) == [Reward("correct", 0.25), Reward("style", 1.0)]


def test_a_single_named_reward_needs_no_primary_key() -> None:
    assert get_rewards_from_span(emit_reward({"correct": 1}, propagate=False)) == [("correct", 1.0)]


class Tensor:
    """Mimics a scalar tensor of torch, without importing torch."""

    def __init__(self, *values: float) -> None:
        self.values = values

    def item(self) -> float:
        if len(self.values) != 1:
            raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")
        return self.values[0]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1.0),
        (True, 1.0),
        (Decimal("0.5"), 0.5),
        (np.float32(0.5), 0.5),
        (np.int64(2), 2.0),
        (np.array(0.25), 0.25),
        (np.array([0.25]), 0.25),
        (Tensor(0.75), 0.75),
    ],
)
def test_every_scalar_is_a_reward(value: Any, expected: float) -> None:
    reward = get_reward_value(emit_reward(value, propagate=False))
    assert type(reward) is float
    assert reward == expected


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), np.float32("nan"), None, "1.0", b"1", [1.0], np.array([1.0, 2.0]), Tensor(1, 2), {}],
)
def test_a_reward_that_is_not_a_finite_number_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError):
        emit_reward(value, propagate=False)


def test_the_error_about_a_refused_reward_names_the_reward_and_the_choices() -> None:
    with pytest.raises(ConfigError, match="'style' = nan"):
        emit_reward({"correct": 1.0, "style": float("nan")}, primary_key="correct", propagate=False)
    with pytest.raises(ConfigError, match="one of: a, b"):
        emit_reward({"a": 1.0, "b": 2.0}, propagate=False)
    with pytest.raises(ConfigError, match="'c'.*one of: a, b"):
        emit_reward({"a": 1.0, "b": 2.0}, primary_key="c", propagate=False)


def test_the_final_reward_is_the_last_one() -> None:
    spans = [
        emit_reward(1.0, propagate=False),
        emit_message("done", propagate=False),
        emit_reward(0.0, propagate=False),
    ]
    assert find_final_reward(spans) == 0.0
    assert find_final_reward(spans[1:2]) is None
    assert [is_reward_span(span) for span in spans] == [True, False, True]
    assert get_reward_value(spans[1]) is None
    assert get_rewards_from_span(spans[1]) == []


@pytest.mark.parametrize("digits", [30, 31, 308, 400])
def test_a_reward_whose_square_or_sum_could_overflow_is_ignored(digits: int) -> None:
    attributes = {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": int("9" * digits)}
    span = Span.from_attributes(attributes=attributes, rollout_id="r", attempt_id="a", name="agent")
    assert is_reward_span(span) == (digits < 31)
    assert find_final_reward([span]) == (float("9" * digits) if digits < 31 else None)


def test_a_reward_whose_primary_dimension_is_not_a_number_is_ignored() -> None:
    values = {"primary": float("nan"), "style": 0.2}
    attributes: dict[str, Any] = {}
    for dimension, (name, value) in enumerate(values.items()):
        attributes |= {f"{semconv.REWARD}.{dimension}.name": name, f"{semconv.REWARD}.{dimension}.value": value}
    assert (
        get_rewards_from_span(Span.from_attributes(attributes=attributes, rollout_id="r", attempt_id="a", name="x"))
        == []
    )


def test_emitting_outside_a_rollout_works_and_warns_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emitter, "_warned_untraced", type(emitter._warned_untraced)())
    with caplog.at_level(logging.WARNING, "agentlightning"):
        assert get_reward_value(emit_reward(1.0)) == 1.0
        emit_message("hello")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "outside a rollout" in caplog.text


async def test_a_span_that_is_not_propagated_is_only_returned(tracer: Tracer) -> None:
    async with tracer.trace_context() as trace:
        assert get_reward_value(emit_reward(1.0, propagate=False)) == 1.0
        assert trace.spans == []


# The other emitters.


class Point(BaseModel):
    x: int


@dataclass
class Pair:
    left: Any
    right: Any


async def test_each_emitter_has_its_name_and_attributes(tracer: Tracer) -> None:
    async with tracer.trace_context() as trace:
        emit_message("hello")
        emit_object(3)
        emit_object("text")
        emit_object({"a": [1, {"b": Point(x=1)}], "pair": Pair(1, {2})})
        emit_annotation({"a": {"b": 1, "none": None}, "tags": ["x", "y"], "points": [{"x": 1}, {"x": 2}]})
    message, number, text, structure, annotation = trace.spans[:-1]
    assert (message.name, message.attributes) == ("agentlightning.message", {semconv.MESSAGE_BODY: "hello"})
    assert number.attributes == {semconv.OBJECT_TYPE: "int", semconv.OBJECT_LITERAL: 3}
    assert text.attributes == {semconv.OBJECT_TYPE: "str", semconv.OBJECT_LITERAL: "text"}
    assert structure.attributes[semconv.OBJECT_TYPE] == "dict"
    assert json.loads(structure.attributes[semconv.OBJECT_JSON]) == {
        "a": [1, {"b": {"x": 1}}],
        "pair": {"left": 1, "right": [2]},
    }
    assert annotation.name == "agentlightning.annotation"
    assert annotation.attributes == {"a.b": 1, "tags": ["x", "y"], "points.0.x": 1, "points.1.x": 2}


async def test_an_exception_is_recorded_with_its_traceback(tracer: Tracer) -> None:
    async with tracer.trace_context() as trace:
        try:
            _ = dict[str, int]()["missing"]
        except KeyError as error:
            emit_exception(error)
    span = trace.spans[0]
    assert span.name == "agentlightning.exception"
    assert span.status.status_code == "ERROR"
    assert span.attributes["exception.type"] == "KeyError"
    assert span.attributes["exception.message"] == "'missing'"
    assert "test_an_exception_is_recorded" in span.attributes["exception.stacktrace"]


async def test_feedback_is_what_was_emitted_and_the_errors_of_tools(tracer: Tracer) -> None:
    async with tracer.trace_context() as trace:
        emit_feedback("the year is missing", prompt="writer")
        emit_message("half way")
        with pytest.raises(KeyError), operation(name="search"):
            raise KeyError("no such page")
        emit_exception(ValueError("handled"))
        emit_feedback("too long")
    found = find_feedback(trace.spans)
    assert found[0] == Feedback("the year is missing", "writer")
    assert found[-1] == Feedback("too long", None)
    assert found[1].text.startswith("search: ")
    assert "no such page" in found[1].text
    assert "handled" in found[2].text
    assert len(found) == 4
    late = Span.from_attributes(
        name=semconv.SPAN_FEEDBACK, attributes={semconv.FEEDBACK_TEXT: "late", semconv.LATE: True}
    )
    assert find_feedback([late]) == []


@pytest.mark.parametrize(("text", "prompt"), [("", None), ("  ", None), (3, None), ("good", ""), ("good", 1)])
def test_feedback_without_a_text_is_refused(text: Any, prompt: Any) -> None:
    with pytest.raises(ConfigError, match="emit_feedback: .*a text that is not empty is needed"):
        emit_feedback(text, prompt=prompt)


def test_objects_without_a_json_form_are_recorded_by_their_repr() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    for value in (object(), cycle, {(1, 2): 3}, np.zeros(3), lambda: None):
        span = emit_object(value, propagate=False)
        assert json.loads(span.attributes[semconv.OBJECT_JSON]) == repr(value)
    assert emit_object(np.float32(0.5), propagate=False).attributes[semconv.OBJECT_JSON] == "0.5"


def test_bytes_are_recorded_as_base64() -> None:
    span = emit_object(b"\xff\x00", attributes={"raw": b"ab"}, propagate=False)
    assert span.attributes == {"raw": "YWI=", semconv.OBJECT_TYPE: "bytes", semconv.OBJECT_LITERAL: "/wA="}
    nested = emit_object({"image": bytearray(b"ab")}, propagate=False)
    assert json.loads(nested.attributes[semconv.OBJECT_JSON]) == {"image": "YWI="}


def test_the_error_about_a_wrong_argument_suggests_the_right_function() -> None:
    with pytest.raises(ConfigError, match="emit_object"):
        emit_message(3)
    with pytest.raises(ConfigError, match="exception"):
        emit_exception("boom")


# Operations.


async def test_a_decorated_function_is_one_span_with_input_output_and_children(tracer: Tracer) -> None:
    @operation
    def add(a: int, b: int = 2) -> int:
        emit_message("adding")
        return a + b

    @operation(name="twice", kind="math", info={"version": 1})
    async def double(a: int) -> int:
        await asyncio.sleep(0)
        return add(a, b=a)

    async with tracer.trace_context() as trace:
        assert await double(4) == 8
    spans = by_name(trace)
    twice = spans["twice"]
    inner = spans["test_a_decorated_function_is_one_span_with_input_output_and_children.<locals>.add"]
    assert inner.name == "agentlightning.operation"
    assert json.loads(inner.attributes[semconv.OPERATION_INPUT]) == {"a": 4, "b": 4}
    assert json.loads(inner.attributes[semconv.OPERATION_OUTPUT]) == 8
    assert (twice.attributes["kind"], twice.attributes["info.version"]) == ("math", 1)
    assert inner.parent_id == twice.span_id
    assert spans["agentlightning.message"].parent_id == inner.span_id


async def test_the_first_thousand_items_of_a_generator_are_recorded(tracer: Tracer) -> None:
    @operation
    def count() -> Iterator[int]:
        yield from range(1500)

    async with tracer.trace_context() as trace:
        assert sum(1 for _ in count()) == 1500
    (output,) = (span.attributes[semconv.OPERATION_OUTPUT] for span in trace.spans if "operation" in span.name)
    assert json.loads(output) == list(range(1000))


async def test_a_with_block_is_one_span(tracer: Tracer) -> None:
    async with tracer.trace_context() as trace:
        with operation(name="search", index="wiki") as op:
            op.set_input("query", limit=3)
            emit_message("searching")
            op.set_output(["a", "b"])
    spans = by_name(trace)
    assert json.loads(spans["search"].attributes[semconv.OPERATION_INPUT]) == {"args": ["query"], "limit": 3}
    assert json.loads(spans["search"].attributes[semconv.OPERATION_OUTPUT]) == ["a", "b"]
    assert spans["search"].attributes["index"] == "wiki"
    assert spans["agentlightning.message"].parent_id == spans["search"].span_id


async def test_an_exception_in_an_operation_is_recorded_and_raised(tracer: Tracer) -> None:
    @operation
    def fail() -> None:
        raise LookupError("not there")

    async with tracer.trace_context() as trace:
        with pytest.raises(LookupError):
            fail()
        with pytest.raises(LookupError), operation(name="block"):
            raise LookupError("not there")
    for span in trace.spans[:2]:
        assert span.status.description == "LookupError: not there"
        assert span.events[0].attributes["exception.message"] == "not there"


async def test_a_generator_is_one_span_until_its_end_and_does_not_leak_its_context(tracer: Tracer) -> None:
    @operation(name="count")
    def count(n: int) -> Generator[int, None, str]:
        for i in range(n):
            emit_message(f"inside {i}")
            got = yield i
            assert got is None
        return "done"  # what a generator returns must survive

    async with tracer.trace_context() as trace:
        results: list[str] = []

        def consume() -> Iterator[int]:
            results.append((yield from count(2)))

        for _ in consume():
            emit_message("outside")
    assert results == ["done"]
    spans = trace.spans
    (counted,) = [span for span in spans if span.name == semconv.SPAN_OPERATION]
    assert json.loads(counted.attributes[semconv.OPERATION_INPUT]) == {"n": 2}
    assert json.loads(counted.attributes[semconv.OPERATION_OUTPUT]) == [0, 1]
    root = spans[-1].span_id
    for span in spans:
        body = span.attributes.get(semconv.MESSAGE_BODY)
        if body is not None:
            assert span.parent_id == (counted.span_id if body.startswith("inside") else root)


async def test_an_async_generator_is_one_span(tracer: Tracer) -> None:
    @operation(name="stream")
    async def stream(n: int) -> AsyncGenerator[int]:
        try:
            for i in range(n):
                emit_message("inside")
                await asyncio.sleep(0)
                yield i
        finally:
            emit_message("closing")

    async with tracer.trace_context() as trace:
        assert [i async for i in stream(3)] == [0, 1, 2]
        begun = stream(3)
        assert await anext(begun) == 0
        emit_message("outside")
        await begun.aclose()
    operations = [span for span in trace.spans if span.name == semconv.SPAN_OPERATION]
    assert [json.loads(span.attributes[semconv.OPERATION_OUTPUT]) for span in operations] == [[0, 1, 2], [0]]
    assert [span.status.status_code for span in operations] == ["UNSET", "UNSET"]
    root = trace.spans[-1].span_id
    outside = [span.parent_id for span in trace.spans if span.attributes.get(semconv.MESSAGE_BODY) == "outside"]
    assert outside == [root]
    closing = [span.parent_id for span in trace.spans if span.attributes.get(semconv.MESSAGE_BODY) == "closing"]
    assert closing == [span.span_id for span in operations]


async def test_values_and_exceptions_sent_to_a_generator_reach_it(tracer: Tracer) -> None:
    @operation
    def echo() -> Any:
        received: list[Any] = []
        while len(received) < 2:
            try:
                received.append((yield len(received)))
            except ValueError as error:
                received.append(str(error))
        return received

    async with tracer.trace_context() as trace:
        generator = echo()
        assert next(generator) == 0
        assert generator.send("a") == 1
        with pytest.raises(StopIteration) as stop:
            generator.throw(ValueError("b"))
        assert stop.value.value == ["a", "b"]
        failing = echo()
        next(failing)
        with pytest.raises(KeyError):
            failing.throw(KeyError("c"))
    first, second = [span for span in trace.spans if span.name == semconv.SPAN_OPERATION]
    assert (first.status.status_code, second.status.status_code) == ("UNSET", "ERROR")


async def test_an_agent_is_named_by_a_block_and_by_a_decorator(tracer: Tracer) -> None:
    @emitter.agent("writer")
    async def write() -> None:
        emit_message("in the writer")

    async with tracer.trace_context() as trace:
        await write()
        with emitter.agent("critic"):
            emit_message("in the critic")
    names = {
        node.span.attributes.get(semconv.MESSAGE_BODY): node.agent_name for node in build_tree(trace.spans, repair=True)
    }
    assert names["in the writer"] == "writer"
    assert names["in the critic"] == "critic"
    with pytest.raises(ConfigError, match="agent: name = ''"):
        emitter.agent("")


def test_outside_a_rollout_operations_change_nothing() -> None:
    @operation
    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b

    @operation
    def numbers() -> Iterator[int]:
        yield 1

    assert add(1, b=2) == 3
    assert add.__doc__ == "Adds."
    assert add.__name__ == "add"
    assert list(numbers()) == [1]
    with pytest.raises(TypeError, match="missing 1 required"):
        add(1)
    with operation(name="block") as op:
        op.set_output(1)


async def test_an_operation_that_is_not_propagated_records_nothing(tracer: Tracer) -> None:
    @operation(propagate=False)
    def quiet() -> int:
        return 1

    async with tracer.trace_context() as trace:
        assert quiet() == 1
        with operation(propagate=False):
            emit_message("loud")
    assert [span.name for span in trace.spans] == ["agentlightning.message", semconv.SPAN_ROLLOUT]


def test_the_error_about_a_misused_operation_describes_the_right_use() -> None:
    with pytest.raises(ConfigError, match="decorates a function"):
        operation(3)
    op = operation(name="x")
    with pytest.raises(ConfigError, match="as op"):
        op.set_output(1)
    with op, pytest.raises(ConfigError, match="one for each"), op:
        pass
