"""Adapters with a planted mistake, each of which fails the conformance test that is named next to it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from agentlightning import semconv
from agentlightning.adapter import TraceAdapter
from agentlightning.adapter.adapter import reading
from agentlightning.testing.adapter import AdapterConformance
from agentlightning.types import Attempt, Span
from tests.planted import assert_each_test_finds_one, assert_found


class Answers(TraceAdapter[list[str]]):
    """A correct adapter: the text of each answer."""

    def adapt(self, source: Sequence[Span], /) -> list[str]:
        with reading(source):
            return [self.read(span) for span in self.order([span for span in source if semconv.is_gateway_call(span)])]

    def order(self, calls: list[Span]) -> list[Span]:
        unique = {span.span_id: span for span in calls}
        return sorted(unique.values(), key=lambda span: span.start_time or 0.0)

    def read(self, span: Span) -> str:
        return str(semconv.read_output_messages(span)[0]["content"])


class TestAnswers(AdapterConformance):
    @pytest.fixture
    def adapter(self) -> Answers:
        return Answers()

    def answers(self, adapted: list[str]) -> list[str]:
        return adapted


class Remembers(Answers):
    def __init__(self) -> None:
        self.seen: set[str] = set()

    def order(self, calls: list[Span]) -> list[Span]:
        new = [span for span in calls if span.span_id not in self.seen]
        self.seen |= {span.span_id for span in new}
        return super().order(new)


class ReversesTheSpans(Answers):
    def adapt(self, source: Any, /) -> list[str]:
        source.reverse()
        return super().adapt(source)


class TakesThemAsTheyCome(Answers):
    def order(self, calls: list[Span]) -> list[Span]:
        return calls


class NeedsAReward(Answers):
    def adapt(self, source: Sequence[Span], /) -> list[str]:
        return super().adapt(source) if any(span.name == semconv.SPAN_REWARD for span in source) else []


class NeedsASpan(Answers):
    def adapt(self, source: Sequence[Span], /) -> list[str]:
        return super().adapt(source) if source[0] else []


class TrustsItsSpans(Answers):
    def adapt(self, source: Sequence[Span], /) -> list[str]:
        return [self.read(span) for span in self.order([span for span in source if semconv.is_gateway_call(span)])]

    def read(self, span: Span) -> str:
        return str(json.loads(span.attributes[semconv.GEN_AI_OUTPUT_MESSAGES])[0]["parts"][0]["content"])


class TakesTheRest(Answers):
    def adapt_attempt(self, attempt: Attempt, spans: Sequence[Span]) -> list[str]:
        return self.adapt(spans)


PLANTED = [
    (Remembers, "test_the_same_spans_give_the_same_data", "depends on nothing but its spans"),
    (ReversesTheSpans, "test_the_same_spans_give_the_same_data", "leaves the spans as they are"),
    (TakesThemAsTheyCome, "test_calls_come_in_their_order_whichever_span_arrives_first", "orders calls by their start"),
    (NeedsAReward, "test_an_attempt_without_rewards_or_calls_is_no_error", "calls without a reward"),
    (NeedsASpan, "test_an_attempt_without_rewards_or_calls_is_no_error", "it raised IndexError"),
    (TrustsItsSpans, "test_hostile_spans_give_data_or_an_adapter_error", "raises nothing but AdapterError"),
    (TakesTheRest, "test_an_attempt_that_lost_spans_is_left_out", "returns None for an attempt that lost spans"),
]


@pytest.mark.parametrize(("adapter", "test", "message"), PLANTED, ids=[planted[0].__name__ for planted in PLANTED])
def test_the_kit_finds_a_planted_mistake(
    adapter: type[Answers], test: str, message: str, request: pytest.FixtureRequest
) -> None:
    assert_found(TestAnswers, test, request, message, adapter=adapter())


def test_every_test_of_the_kit_finds_a_mistake() -> None:
    assert_each_test_finds_one(AdapterConformance, [test for _, test, _ in PLANTED])
