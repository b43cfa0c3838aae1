"""Conformance tests for adapters.

Use them like this::

    class TestMyAdapter(AdapterConformance):
        @pytest.fixture
        def adapter(self):
            return MyAdapter()
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from agentlightning import semconv
from agentlightning.adapter.adapter import TraceAdapter
from agentlightning.errors import AdapterError
from agentlightning.records import Attempt, Span
from agentlightning.testing import promised, refusal

__all__ = ["AdapterConformance"]

ANSWERS: Final = ("first answer", "second answer")
ODD: Final = (None, -1, 1e300, "", "{", "[5]", '[{"role": "user", "parts": 5}]', '{"choices": [5]}', [[1]], {"a": None})
"""Values that no convention allows for an attribute, but that a program may write."""


def make_span(number: int, name: str, parent: int | None, time: float, attributes: Mapping[str, Any]) -> Span:
    """Returns a span of the kit's attempt that takes half a second."""
    return Span(
        rollout_id="ro-1",
        attempt_id="at-1",
        sequence_id=number,
        name=name,
        trace_id="a" * 32,
        span_id=f"{number:016x}",
        parent_id=None if parent is None else f"{parent:016x}",
        start_time=1000.0 + time,
        end_time=1000.5 + time,
        attributes=dict(attributes),
    )


def make_attempt(*, reward: float | None = 1.0, answers: Sequence[str] = ANSWERS) -> list[Span]:
    """Returns an attempt: the agent's spans, the client's and the gateway's span of each call, the reward, the root."""
    spans = [make_span(1, "invoke_agent solver", 2, 0.0, {"gen_ai.agent.name": "solver"})]
    messages: list[dict[str, Any]] = [{"role": "user", "parts": [{"type": "text", "content": "ask"}]}]
    for number, answer in enumerate(answers):
        said = {"role": "assistant", "parts": [{"type": "text", "content": answer}], "finish_reason": "stop"}
        call = {
            semconv.GEN_AI_OPERATION_NAME: "chat",
            semconv.GEN_AI_RESPONSE_ID: f"response-{number}",
            semconv.GEN_AI_INPUT_MESSAGES: json.dumps(messages),
            semconv.GEN_AI_OUTPUT_MESSAGES: json.dumps([said]),
        }
        tokens = {
            semconv.PROMPT_TOKEN_IDS: [1, 2 + number],
            semconv.RESPONSE_TOKEN_IDS: [7, 8],
            "logprobs": [-0.5, -1.0],
        }
        spans.append(make_span(10 + number, "chat", 1, number + 0.1, call))
        spans.append(
            make_span(
                20 + number, "chat", 10 + number, number + 0.1, {**call, **tokens, semconv.GATEWAY_COMPLETE: True}
            )
        )
        messages = [*messages, said]
    if reward is not None:
        spans.append(make_span(3, semconv.SPAN_REWARD, 2, 5.0, {f"{semconv.REWARD}.0.value": reward}))
    return [*spans, make_span(2, semconv.SPAN_ROLLOUT, None, 6.0, {})]


class AdapterConformance:
    """Tests that every adapter must pass.

    Subclass it and define one fixture, ``adapter``.
    """

    def answers(self, adapted: Any) -> Sequence[str] | None:
        """Returns the texts of the model's answers in the training data, in order; None: the data has no texts.

        Override it, so that the tests compare what they find.
        """
        return None

    def is_same(self, one: Any, other: Any) -> bool:
        """Whether two results are equal; override it for data without ``==``, such as tensors."""
        return bool(one == other)

    def adapt(self, adapter: TraceAdapter[Any], spans: Sequence[Span]) -> Any:
        """Adapts spans, which must not raise."""
        with promised("adapt(spans) converts every attempt that was recorded as the conventions say"):
            return adapter.adapt(spans)

    def test_the_same_spans_give_the_same_data(self, adapter: Any) -> None:
        spans = make_attempt()
        given = copy.copy(spans)
        first = self.adapt(adapter, spans)
        assert spans == given, "adapt(spans) leaves the spans as they are"
        self.adapt(adapter, make_attempt(answers=["other"], reward=0.0))
        again = self.adapt(adapter, spans)
        assert self.is_same(first, again), f"adapt(spans) depends on nothing but its spans: {first}, then {again}"

    def test_calls_come_in_their_order_whichever_span_arrives_first(self, adapter: Any) -> None:
        spans = make_attempt()
        for order in (spans, spans[::-1], [*spans[::2], *spans[1::2]]):
            found = self.answers(self.adapt(adapter, order))
            assert found is None or list(found) == list(ANSWERS), (
                "adapt(spans) orders calls by their start, because clients and the gateway send spans separately; "
                f"{[span.name for span in order]} gave {found}"
            )

    def test_an_attempt_without_rewards_or_calls_is_no_error(self, adapter: Any) -> None:
        found = self.answers(self.adapt(adapter, make_attempt(reward=None)))
        assert found is None or list(found) == list(ANSWERS), f"calls without a reward are training data, too: {found}"
        for spans in (make_attempt(answers=[]), make_attempt(reward=None, answers=[]), []):
            found = self.answers(self.adapt(adapter, spans))
            assert not found, f"an attempt without model calls gives no data: {found}"

    def test_hostile_spans_give_data_or_an_adapter_error(self, adapter: Any) -> None:
        for spans in hostile():
            promise = "adapt(spans) raises nothing but AdapterError, because any program may write spans"
            refusal(promise, AdapterError, functools.partial(adapter.adapt, spans))

    def test_an_attempt_that_lost_spans_is_left_out(self, adapter: Any) -> None:
        attempt = Attempt(rollout_id="ro-1", attempt_id="at-1", sequence_id=1, start_time=0.0)
        whole = adapter.adapt_attempt(attempt, make_attempt())
        assert self.is_same(whole, self.adapt(adapter, make_attempt())), "adapt_attempt converts what adapt does"
        part = adapter.adapt_attempt(attempt.model_copy(update={"spans_dropped": 1}), make_attempt())
        assert part is None, f"adapt_attempt returns None for an attempt that lost spans, not {part}"


def hostile() -> Iterator[list[Span]]:
    """Yields attempts in which one attribute has an odd value, or whose spans form no tree."""
    spans = make_attempt()
    for number, span in enumerate(spans):
        for name in span.attributes:
            for value in ODD:
                changed = make_span(1, span.name, 2, 0.0, {**span.attributes, name: value}).attributes
                yield [*spans[:number], span.model_copy(update={"attributes": changed}), *spans[number + 1 :]]
    yield [*spans, *spans]
    yield [span.model_copy(update={"parent_id": "f" * 16}) for span in spans]
    yield [span.model_copy(update={"parent_id": span.span_id}) for span in spans]
    yield [span.model_copy(update={"start_time": None, "end_time": None}) for span in spans]
    yield [*spans, spans[1].model_copy(update={"attempt_id": "at-2", "span_id": "e" * 16})]
