from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from agentlightning import semconv
from agentlightning.adapter import CreditRule, LlmProxyTraceToTriplet, Step, TraceToTriplet
from agentlightning.errors import AdapterError, ConfigError, PluginError
from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning.plugin.registry import get_manager
from tests.core.trace_recorder import Recorder


@pytest.fixture
def trace() -> Recorder:
    return Recorder()


def rewards(trace: Recorder, credit: Any, **settings: Any) -> list[float | None]:
    return [triplet.reward for triplet in TraceToTriplet(credit=credit, **settings).adapt(trace.spans)]


def three_calls(trace: Recorder) -> None:
    """Records three calls, with a reward of 1 after the first and rewards of 2 and 4 after the last."""
    trace.client("r0")
    trace.reward(1.0)
    trace.client("r1")
    trace.client("r2")
    trace.reward(2.0)
    trace.reward(4.0)


def test_identical_credit_is_the_final_reward_for_all_calls(trace: Recorder) -> None:
    three_calls(trace)
    assert rewards(trace, "identical") == [4.0, 4.0, 4.0]


def test_nearest_credit_is_the_sum_of_the_rewards_emitted_after_a_call(trace: Recorder) -> None:
    three_calls(trace)
    trace.reward(10.0, semconv.link_attributes({"gen_ai.response.id": "r1"}))
    assert rewards(trace, "nearest") == [1.0, 10.0, 6.0]


def test_discounted_credit_is_the_return_to_go(trace: Recorder) -> None:
    three_calls(trace)
    assert rewards(trace, {"name": "discounted", "gamma": 0.5}) == [1.0 + 0.5 * 0.5 * 6.0, 0.5 * 6.0, 6.0]
    assert rewards(trace, {"name": "discounted", "gamma": 1}) == [7.0, 6.0, 6.0]
    assert rewards(trace, {"name": "discounted", "gamma": 0}) == rewards(trace, "nearest")


@pytest.mark.parametrize("rule", ["identical", "nearest", "discounted", "intermediate"])
def test_an_attempt_without_a_reward_gets_no_credit(trace: Recorder, rule: str) -> None:
    trace.client("r0")
    trace.client("r1")
    assert rewards(trace, rule) == [None, None]


def test_without_a_credit_rule_a_triplet_has_the_reward_matched_to_its_call(trace: Recorder) -> None:
    three_calls(trace)
    assert rewards(trace, None) == [1.0, 4.0, 2.0]
    assert "credit" not in TraceToTriplet().adapt(trace.spans)[0].metadata


def test_triplets_name_the_rule_and_all_choices_get_the_credit_of_their_call(trace: Recorder) -> None:
    trace.gateway("r0", [1])
    answers = [
        {"role": "assistant", "parts": [{"type": "text", "content": c}], "finish_reason": "stop"} for c in ("a", "b")
    ]
    attributes = {**trace.spans[0].attributes, "gen_ai.output.messages": json.dumps(answers)}
    trace.spans[0] = trace.spans[0].model_copy(update={"attributes": attributes})
    trace.reward(0.5)
    for adapter in (TraceToTriplet(credit="identical"), LlmProxyTraceToTriplet(credit="identical")):
        triplets = adapter.adapt(trace.spans)
        assert [(t.reward, t.metadata["credit"], t.metadata["choice"]) for t in triplets] == [
            (0.5, "identical", 0),
            (0.5, "identical", 1),
        ]


def test_credit_goes_to_the_chosen_agent_only(trace: Recorder) -> None:
    for i, name in enumerate(("a", "b", "a")):
        agent = trace.add("agent", {"agent.name": name}, at=(1000 + 10 * i, 1009 + 10 * i))
        trace.client(f"r{i}", parent=agent, at=(1001 + 10 * i, 1002 + 10 * i))
        trace.reward(float(i + 1), parent=agent, at=(1003 + 10 * i, 1003 + 10 * i))
    assert rewards(trace, {"name": "discounted", "gamma": 0.5}, agent_match="a") == [3.0 + 0.5 * 3.0, 3.0]
    by_sibling = rewards(trace, {"name": "discounted", "gamma": 0.5}, agent_match="a", reward_match="first_sibling")
    assert by_sibling == [1.0 + 0.5 * 3.0, 3.0], "the reward under the other agent belongs to that agent"


def test_a_discount_outside_0_to_1_is_refused() -> None:
    with pytest.raises(ConfigError, match="gamma = 1.5: give a discount from 0 to 1"):
        TraceToTriplet(credit={"name": "discounted", "gamma": 1.5})


def test_an_unknown_rule_is_refused_with_the_known_ones() -> None:
    with pytest.raises(PluginError, match=r"no credit named 'discount'.*'discounted'.*identical"):
        TraceToTriplet(credit="discount")
    with pytest.raises(ConfigError, match="is not a CreditRule"):
        TraceToTriplet(credit=0.5)


# Intermediate rewards.


WEIGHTS = {"tool_success": 0.1, "tool_failure": -1.0, "invalid_output": -10.0, "retry": -100.0}


class Chat:
    """Calls of one agent; the prompt of each call continues the conversation of the previous call."""

    def __init__(self, trace: Recorder) -> None:
        self.trace = trace
        self.messages: list[dict[str, Any]] = [{"role": "user", "parts": [{"type": "text", "content": "go"}]}]
        self.number = 0

    def answer(self, *parts: Mapping[str, Any], finish_reason: str = "stop", keep: bool = True) -> None:
        answer = {"role": "assistant", "parts": list(parts), "finish_reason": finish_reason}
        self.trace.add(
            "chat",
            {
                "gen_ai.operation.name": "chat",
                "gen_ai.response.id": f"r{self.number}",
                "gen_ai.response.finish_reasons": [finish_reason],
                "gen_ai.input.messages": json.dumps(self.messages),
                "gen_ai.output.messages": json.dumps([answer]),
            },
        )
        self.number += 1
        if keep:
            self.messages = [*self.messages, answer]

    def tell(self, call_id: str, content: str) -> None:
        part = {"type": "tool_call_response", "id": call_id, "response": content}
        self.messages = [*self.messages, {"role": "tool", "parts": [part]}]


def text(content: str = "done") -> Mapping[str, Any]:
    return {"type": "text", "content": content}


def tool(call_id: str, arguments: str = '{"a": 1}', name: str = "add") -> Mapping[str, Any]:
    return {"type": "tool_call", "id": call_id, "name": name, "arguments": arguments}


def intermediate(trace: Recorder, **settings: Any) -> list[float]:
    trace.reward(0.0)
    spec = {"name": "intermediate", **WEIGHTS, **settings}
    return [triplet.reward or 0.0 for triplet in TraceToTriplet(credit=spec).adapt(trace.spans)]


def test_tool_calls_are_judged_by_their_results(trace: Recorder) -> None:
    chat = Chat(trace)
    chat.answer(tool("c1"), tool("c2", '{"a": 2}'))
    chat.tell("c1", "3")
    chat.tell("c2", "Error: no such number")
    chat.answer(tool("c3", '{"a": 3}'))
    chat.tell("c3", "5")
    chat.answer(text())
    assert intermediate(trace) == pytest.approx([0.1 - 1.0, 0.1, 0.0])


def test_tool_calls_are_judged_by_their_spans(trace: Recorder) -> None:
    chat = Chat(trace)
    chat.answer(tool("c1"))
    trace.add("add", {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.call.id": "c1"}, error=True)
    chat.tell("c1", "sorry")
    chat.answer(tool("c2", '{"a": 2}'))
    trace.add("add", {"openinference.span.kind": "TOOL", "tool.name": "add"})
    chat.answer(tool("c3", '{"a": 3}'))
    chat.answer(text())
    assert intermediate(trace) == pytest.approx([-1.0, 0.1, 0.0, 0.0]), "the result of the third run is unknown"


@pytest.mark.parametrize(
    ("parts", "finish_reason"),
    [([text("cut o")], "length"), ([text("  ")], "stop"), ([tool("c1", '{"a": ')], "tool_calls"), ([], "stop")],
    ids=["cut off", "empty", "broken arguments", "nothing"],
)
def test_an_unusable_answer_is_penalised_once(
    trace: Recorder, parts: list[Mapping[str, Any]], finish_reason: str
) -> None:
    chat = Chat(trace)
    chat.answer(*parts, finish_reason=finish_reason)
    chat.answer(text())
    assert intermediate(trace, retry=0.0) == [-10.0, 0.0]


def test_a_repeated_prompt_penalises_the_answer_that_was_not_used(trace: Recorder) -> None:
    chat = Chat(trace)
    chat.answer(text("nonsense"), keep=False)
    chat.answer(text("better"))
    chat.messages = [*chat.messages, {"role": "user", "parts": [text("and now?")]}]
    chat.answer(text())
    assert intermediate(trace) == [-100.0, 0.0, 0.0]


def test_repeating_a_failed_tool_call_is_penalised(trace: Recorder) -> None:
    chat = Chat(trace)
    for call_id, answer in (("c1", "error: no"), ("c2", "error: no"), ("c3", "4")):
        chat.answer(tool(call_id, '{"a": 1}' if call_id != "c3" else '{"a": 9}'))
        chat.tell(call_id, answer)
    chat.answer(text())
    assert intermediate(trace, tool_success=0.0) == [-1.0, -101.0, 0.0, 0.0]


def test_tool_calls_that_reuse_an_id_are_judged_separately(trace: Recorder) -> None:
    chat = Chat(trace)
    chat.answer(tool("call_0"))
    chat.tell("call_0", "error: no")
    chat.messages = [*chat.messages, {"role": "user", "parts": [text("go on")]}]
    chat.answer(tool("call_0", '{"a": 2}'))
    chat.messages = [{"role": "user", "parts": [text("new")]}]
    chat.tell("call_0", "5")
    chat.answer(text())
    assert intermediate(trace) == pytest.approx([-1.0, 0.1, 0.0])


def test_intermediate_rewards_are_added_to_the_credit_of_another_rule(trace: Recorder) -> None:
    chat = Chat(trace)
    chat.answer(tool("c1"))
    chat.tell("c1", "Traceback (most recent call last)")
    chat.answer(text())
    trace.reward(1.0)
    spec = {"name": "intermediate", "base": {"name": "discounted", "gamma": 0.5}, "tool_failure": -0.25}
    assert rewards(trace, spec) == [0.5 - 0.25, 1.0]
    with pytest.raises(ConfigError, match="error_pattern = '\\(' is not a regular expression"):
        TraceToTriplet(credit={"name": "intermediate", "error_pattern": "("})


# A third-party rule.


class LastCallOnly(CreditRule):
    """Gives the final reward, times a factor, to the last call."""

    def __init__(self, factor: float = 1.0, wrong_length: bool = False) -> None:
        self.factor = factor
        self.wrong_length = wrong_length

    def assign(self, steps: Sequence[Step], final_reward: float | None) -> Sequence[float | None]:
        values = [0.0] * (len(steps) - 1 + self.wrong_length)
        return [*values, self.factor * (final_reward or 0.0)]


class ThirdParty:
    @staticmethod
    @hookimpl
    def components() -> list[Component]:
        return [Component("credit", "last", f"{__name__}:LastCallOnly", summary="the last call gets everything")]


@pytest.fixture
def third_party() -> Iterator[None]:
    manager = get_manager()
    manager.register(ThirdParty, "test-credit")
    yield
    manager._pluggy.unregister(ThirdParty)
    del manager.plugins["test-credit"], manager._offers["credit", "last"]


def test_a_third_party_adds_a_credit_rule(trace: Recorder, third_party: None) -> None:
    three_calls(trace)
    adapter = get_manager().create("adapter", {"name": "triplet", "credit": {"name": "last", "factor": 2}})
    triplets = adapter.adapt(trace.spans)
    assert [triplet.reward for triplet in triplets] == [0.0, 0.0, 8.0]
    assert {triplet.metadata["credit"] for triplet in triplets} == {"last"}


def test_a_credit_rule_that_returns_the_wrong_number_of_values_is_named(trace: Recorder) -> None:
    three_calls(trace)
    with pytest.raises(AdapterError, match="the credit rule 'LastCallOnly' gave 4 values for 3 model calls"):
        rewards(trace, LastCallOnly(wrong_length=True))


def test_a_span_belongs_to_the_last_call_that_began_before_it_in_whatever_order_the_calls_end() -> None:
    seen = {}

    class Watch(CreditRule):
        def assign(self, steps: Sequence[Step], final_reward: float | None) -> Sequence[float | None]:
            for step in steps:
                seen[step.triplets[0].metadata["response_id"]] = [span.name for span in step.spans]
            return [None] * len(steps)

    trace = Recorder()
    trace.gateway("second", at=(1.0, 2.0))
    trace.gateway("third", at=(3.0, 4.0))
    trace.add("tool", {}, at=(5.0, 6.0))
    trace.gateway("first", at=(0.0, 10.0))
    LlmProxyTraceToTriplet(credit=Watch()).adapt(trace.spans)
    assert seen == {"first": [], "second": [], "third": ["tool"]}
