from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Sequence
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning import semconv
from agentlightning.adapter import (
    LlmProxyTraceToTriplet,
    RewardMatchPolicy,
    TracerTraceToTriplet,
    TraceToMessages,
    TraceToTriplet,
)
from agentlightning.adapter.call import Node, build_tree
from agentlightning.errors import AdapterError, ConfigError
from agentlightning.plugin.registry import get_manager
from agentlightning.reward import find_final_reward, get_rewards_from_span
from agentlightning.testing.adapter import AdapterConformance
from agentlightning.types import TraceStatus, Triplet
from tests.core.trace_recorder import Recorder

READ_ATTRIBUTES: Final = (
    "agent.name agentlightning.choice.1.response_token_ids agentlightning.gateway.complete "
    "agentlightning.link.0.key_match agentlightning.link.0.value_match agentlightning.reward.0.value "
    "agentlightning.weight_version agentops.task.output gen_ai.completion.0.content gen_ai.completion.0.tool_calls "
    "gen_ai.input.messages gen_ai.output.messages gen_ai.request.model gen_ai.response.finish_reasons "
    "gen_ai.response.id gen_ai.system_instructions gen_ai.tool.definitions llm.input_messages.0.message "
    "llm.input_messages.0.message.content llm.output_messages.0.message.contents.0.message_content.text "
    "llm.request.functions.0.name llm.tools.0.tool.json_schema logprobs openinference.span.kind output.value "
    "prompt_token_ids response_token_ids tool.call.id tool.parameters"
).split()
"""Attributes that adapters read."""
ODD: Final = (
    '[{"role": "user", "parts": [{"type": "text", "content": null}, {"type": "text", "content": "a"}]}]',
    '[{"role": "user", "parts": 5}]',
    '[{"role": "user", "content": [{"type": "image_url", "image_url": "http://x"}]}]',
    '[{"role": "user", "content": [{"type": "image_url"}]}]',
    '{"choices": [5]}',
    '{"choices": [{"token_ids": [1], "logprobs": {"content": [5]}}]}',
    '{"type": "reward", "value": [1]}',
    [[1]],
    float("nan"),
)
"""Malformed values for these attributes."""

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture
def trace() -> Recorder:
    return Recorder()


def ids(triplets: Sequence[Triplet]) -> list[str | None]:
    return [triplet.metadata["response_id"] for triplet in triplets]


def rewards(triplets: Sequence[Triplet]) -> list[float | None]:
    return [triplet.reward for triplet in triplets]


# Calls.


def test_client_span_and_gateway_span_of_one_call_become_one_triplet(trace: Recorder) -> None:
    root = trace.add("agentlightning.rollout", at=(999, 1010))
    agent = trace.add("agent", {"agent.name": "solver"}, parent=root, at=(1000, 1005))
    client = trace.client("r1", parent=agent, at=(1001, 1003))
    trace.gateway("r1", [7, 8], at=(1001.2, 1002.9))
    (triplet,) = trace.adapt()
    assert triplet.prompt == {
        "token_ids": [1, 2, 3],
        "raw_content": [{"role": "user", "content": "ask me"}],
        "image_urls": [],
    }
    assert triplet.response == {
        "token_ids": [7, 8],
        "raw_content": [{"role": "assistant", "content": "sampled"}],
        "logprobs": [-0.5, -0.5],
    }
    assert triplet.metadata == {
        "response_id": "r1",
        "agent_name": "solver",
        "model": "m-1",
        "requested_model": "m",
        "finish_reason": "length",
        "weight_version": 3,
        "complete": True,
        "span_id": client,
        "choice": 0,
    }


def test_the_order_in_which_spans_arrive_does_not_matter(trace: Recorder) -> None:
    for i in range(5):
        trace.client(f"r{i}", at=(1000 + i, 1000.9 + i))
        trace.gateway(f"r{i}", [i], at=(1000.1 + i, 1000.8 + i))
        trace.reward(i, at=(1000.95 + i, 1000.95 + i))
    forwards = TraceToTriplet().adapt(trace.spans)
    assert ids(forwards) == [f"r{i}" for i in range(5)]
    assert [triplet.response["token_ids"] for triplet in forwards] == [[i] for i in range(5)]
    assert rewards(forwards) == [0, 1, 2, 3, 4]
    assert TraceToTriplet().adapt(trace.spans[::-1]) == forwards
    assert TraceToTriplet().adapt(trace.spans + trace.spans) == forwards


def test_parallel_calls_get_their_own_tokens(trace: Recorder) -> None:
    for i in range(4):
        trace.client(f"r{i}", at=(1000 + i / 10, 1010 - i / 10))
    for i in reversed(range(4)):
        trace.gateway(f"r{i}", [i], at=(1001, 1009))
    triplets = trace.adapt()
    assert [(t.metadata["response_id"], t.response["token_ids"]) for t in triplets] == [
        (f"r{i}", [i]) for i in range(4)
    ]


def test_nested_instrumentation_spans_of_one_call_become_one_triplet(trace: Recorder) -> None:
    agent = trace.add("agent", {"agent.name": "a"}, at=(1000, 1010))
    outer = trace.add("ChatOpenAI.chat", {"gen_ai.operation.name": "chat"}, parent=agent, at=(1001, 1009))
    inner = trace.client("r1", parent=outer, at=(1002, 1008))
    trace.gateway("r1", parent=inner, at=(1003, 1007))
    (triplet,) = trace.adapt()
    assert triplet.metadata["span_id"] == outer
    assert triplet.metadata["response_id"] == "r1"
    assert triplet.response["token_ids"] == [7, 8]


def test_sibling_spans_of_two_instrumentations_of_one_call_become_one_triplet(trace: Recorder) -> None:
    trace.client("r1", at=(1001, 1009))
    trace.client("r1", at=(1002, 1008))
    trace.gateway("r1", at=(1003, 1007))
    assert ids(trace.adapt()) == ["r1"]


def test_different_calls_under_one_model_span_become_separate_triplets(trace: Recorder) -> None:
    outer = trace.add("chat", {"gen_ai.operation.name": "chat"}, at=(1000, 1010))
    for i in range(3):
        inner = trace.client(f"r{i}", parent=outer, at=(1001 + i, 1001.5 + i))
        trace.gateway(f"r{i}", [i], parent=inner, at=(1001.1 + i, 1001.4 + i))
    triplets = trace.adapt()
    assert ids(triplets) == ["r0", "r1", "r2"]
    assert [triplet.response["token_ids"] for triplet in triplets] == [[0], [1], [2]]


@pytest.mark.parametrize("pause", [1.0, 0.01])
def test_calls_with_the_same_response_id_are_not_merged_even_if_they_overlap(trace: Recorder, pause: float) -> None:
    """Some servers give every answer the same id, and so does a cache of answers."""
    for i in range(3):
        start = 1000 + i * pause
        client = trace.client("same", at=(start, start + 0.9))
        trace.gateway("same", [i], parent=client, at=(start + 0.1, start + 0.8))
    assert [triplet.response["token_ids"] for triplet in trace.adapt()] == [[0], [1], [2]]


def test_a_call_with_the_same_response_id_is_not_merged_with_an_overlapping_call_of_a_framework(
    trace: Recorder,
) -> None:
    outer = trace.add("ChatOpenAI.chat", {"gen_ai.operation.name": "chat"}, at=(1000, 1001))
    for i, parent in enumerate([outer, None]):
        client = trace.client("same", parent=parent, at=(1000.1 + i / 100, 1000.8))
        trace.gateway("same", [i], parent=client, at=(1000.2, 1000.7))
    assert [triplet.response["token_ids"] for triplet in trace.adapt()] == [[0], [1]]


def test_spans_with_the_same_answer_that_do_not_overlap_become_one_triplet(trace: Recorder) -> None:
    trace.client("r1", at=(1001, 1003))
    trace.client("r1", at=(1003, 1004))
    trace.client("r1", text="another answer", at=(1005, 1006))
    trace.reward(1.0)
    triplets = trace.adapt()
    assert [triplet.response["raw_content"][0]["content"] for triplet in triplets] == ["hi", "another answer"]


def test_a_client_span_without_an_id_is_joined_by_its_child(trace: Recorder) -> None:
    client = trace.client(None, at=(1000, 1002))
    trace.gateway("r1", parent=client, at=(1000.5, 1001.5))
    assert ids(trace.adapt()) == ["r1"]


def frame(trace: Recorder, parent: str, at: tuple[float, float]) -> str:
    """Adds a framework's span of a model call, without response id and response."""
    return trace.add("generation", {"agentops.span.kind": "llm", "gen_ai.request.model": "m"}, parent=parent, at=at)


def test_a_call_outside_its_agent_moves_under_the_framework_span_that_encloses_its_time(trace: Recorder) -> None:
    root = trace.add("root", at=(1000, 1100))
    agent = trace.add("agent", {"agent.name": "solver"}, parent=root, at=(1001, 1050))
    for i in range(2):
        generation = frame(trace, agent, (1010 + 10 * i, 1019 + 10 * i))
        client = trace.client(f"r{i}", parent=root, at=(1011 + 10 * i, 1018 + 10 * i))
        trace.gateway(f"r{i}", [i], parent=client, at=(1012 + 10 * i, 1017 + 10 * i))
        assert trace.adapt()[i].metadata["span_id"] == generation
    triplets = trace.adapt(TraceToTriplet(agent_match="solver"))
    assert [(t.metadata["response_id"], t.response["token_ids"]) for t in triplets] == [("r0", [0]), ("r1", [1])]


def test_an_ambiguous_call_is_not_moved(trace: Recorder) -> None:
    root = trace.add("root", at=(1000, 1100))
    one = trace.add("agent", {"agent.name": "one"}, parent=root, at=(1001, 1050))
    two = trace.add("agent", {"agent.name": "two"}, parent=root, at=(1001, 1050))
    frame(trace, one, (1010, 1020))
    frame(trace, two, (1010.5, 1021))
    trace.client("enclosed by two", parent=root, at=(1011, 1019))
    frame(trace, one, (1030, 1040))
    trace.client("first of two", parent=root, at=(1031, 1033))
    trace.client("second of two", parent=root, at=(1034, 1036))
    frame(trace, one, (1060, 1070))
    trace.client("another agent's", parent=two, at=(1061, 1069))
    trace.client("a sibling", parent=one, at=(1081, 1082))
    assert [triplet.metadata["agent_name"] for triplet in trace.adapt()] == [None, None, None, "two", "one"]


@pytest.mark.parametrize("has_other_parent", [False, True])
def test_a_stream_that_a_framework_records_once_more_before_its_request_is_one_call(
    trace: Recorder, has_other_parent: bool
) -> None:
    """As OpenInference's instrumentor of LlamaIndex does; a call with another parent is another call."""
    step = trace.add("step", at=(1000, 1010))
    content = [{"type": "text", "text": "sampled"}]
    answer = json.dumps([{"role": "assistant", "content": content}])
    framework = {"gen_ai.operation.name": "chat", "gen_ai.output.messages": answer}
    trace.add("astream_chat", framework, parent=None if has_other_parent else step, at=(1000.1, 1000.2))
    client = trace.client(None, parent=step, at=(1001, 1003))
    trace.gateway("r1", [7, 8], parent=client, at=(1001.2, 1002.9))
    triplets = trace.adapt(TraceToTriplet(repair_hierarchy=False))
    assert ids(triplets) == [*([None] if has_other_parent else []), "r1"]
    assert triplets[-1].response["token_ids"] == [7, 8]


def test_a_call_recorded_only_by_the_gateway_becomes_a_triplet(trace: Recorder) -> None:
    trace.gateway("r1")
    trace.reward(0.5)
    (triplet,) = trace.adapt()
    assert triplet.response["token_ids"] == [7, 8]
    assert triplet.reward == 0.5


def test_a_call_without_a_gateway_span_becomes_a_triplet_without_tokens(trace: Recorder) -> None:
    trace.client("r1", text="answer")
    (triplet,) = trace.adapt()
    assert triplet.prompt["token_ids"] == triplet.response["token_ids"] == []
    assert "logprobs" not in triplet.response
    assert triplet.response["raw_content"] == [{"role": "assistant", "content": "answer"}]
    assert triplet.metadata["finish_reason"] == "tool_calls", "the finish reason in OpenAI's terms"
    assert triplet.metadata["complete"] is None


def test_a_call_that_is_incomplete_at_the_gateway_is_left_out_with_its_client_span(trace: Recorder) -> None:
    trace.client("r1")
    trace.gateway("r1", complete=False)
    client = trace.client(None, error=True)
    trace.gateway(None, complete=False, parent=client)
    trace.gateway("r3", complete=False)
    trace.client("r4")
    trace.gateway("r4")
    assert ids(trace.adapt()) == ["r4"]


def test_a_call_with_retries_gets_the_tokens_of_the_successful_try(trace: Recorder) -> None:
    client = trace.client("r1", at=(1000, 1009))
    trace.gateway(None, complete=False, parent=client, at=(1001, 1002))
    trace.gateway("r0", complete=True, parent=client, at=(1003, 1004))
    trace.gateway("r1", [9], complete=True, parent=client, at=(1005, 1006))
    (triplet,) = trace.adapt()
    assert triplet.response["token_ids"] == [9]


def test_a_failed_call_becomes_no_triplet_and_gets_no_reward(trace: Recorder) -> None:
    trace.client("r1")
    trace.client(None, error=True)
    trace.reward(1.0)
    triplets = trace.adapt()
    assert ids(triplets) == ["r1"]
    assert rewards(triplets) == [1.0]


def test_each_choice_of_a_call_becomes_a_triplet(trace: Recorder) -> None:
    trace.gateway("r1", [1])
    answers = [
        {"role": "assistant", "parts": [{"type": "text", "content": c}], "finish_reason": "stop"} for c in ("a", "b")
    ]
    trace.spans[0] = trace.spans[0].model_copy(
        update={
            "attributes": {
                **trace.spans[0].attributes,
                "gen_ai.output.messages": json.dumps(answers),
                "gen_ai.response.finish_reasons": ["stop", "length"],
                "agentlightning.choice.1.response_token_ids": [5, 6],
                "agentlightning.choice.1.logprobs": [-1.0, -2.0],
            }
        }
    )
    first, second = trace.adapt()
    assert (first.response["token_ids"], second.response["token_ids"]) == ([1], [5, 6])
    assert second.prompt["token_ids"] == [1, 2, 3]
    assert second.response["logprobs"] == [-1.0, -2.0]
    assert second.response["raw_content"] == [{"role": "assistant", "content": "b"}]
    assert (second.metadata["choice"], second.metadata["finish_reason"]) == (1, "length")


def test_image_urls_of_a_prompt_are_in_the_triplet(trace: Recorder) -> None:
    parts = [
        {"type": "text", "content": "what is it?"},
        {"type": "uri", "modality": "image", "uri": "http://images/1.png"},
        {"type": "blob", "modality": "image", "mime_type": "image/png", "content": "AAAA"},
    ]
    trace.add(
        "chat",
        {
            "gen_ai.operation.name": "chat",
            "gen_ai.response.id": "r1",
            "gen_ai.input.messages": json.dumps([{"role": "user", "parts": parts}]),
        },
    )
    (triplet,) = trace.adapt()
    assert triplet.prompt["image_urls"] == ["http://images/1.png", "data:image/png;base64,AAAA"]


# Choosing calls.


def test_calls_are_chosen_by_the_name_of_their_span(trace: Recorder) -> None:
    trace.client("r1")
    trace.add("my.model", {"gen_ai.response.id": "r2"})
    trace.gateway("r2", [5])
    trace.gateway("r3")
    triplets = trace.adapt(TraceToTriplet(llm_call_match=r"^my\."))
    assert ids(triplets) == ["r2"]
    assert triplets[0].response["token_ids"] == [5], "tokens still come from the gateway"
    assert ids(trace.adapt(TraceToTriplet(llm_call_match=r"chat"))) == ["r1", "r2", "r3"]


ADAPTERS: Final = {
    "client": TraceToTriplet,
    "by-name": lambda: TraceToTriplet(llm_call_match="."),
    "gateway": LlmProxyTraceToTriplet,
}
OTHERS: Final = ("embeddings", "count_tokens", "rerank", "execute_tool", "invoke_agent", 7)


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("operation", OTHERS)
@pytest.mark.parametrize("recorder", ["client", "gateway"])
@pytest.mark.parametrize("is_below", [True, False], ids=["below", "beside"])
def test_only_spans_of_operations_that_generate_are_calls(
    trace: Recorder, adapter: str, operation: Any, recorder: str, is_below: bool
) -> None:
    client = trace.client(None)
    call = trace.spans[-1]
    other = trace.client if recorder == "client" else trace.gateway
    other("r2", parent=client if is_below else None, at=(call.start_time or 0.0, call.end_time or 0.0))
    attributes = {**trace.spans[-1].attributes, "gen_ai.operation.name": operation}
    trace.spans[-1] = trace.spans[-1].model_copy(update={"attributes": attributes})
    trace.gateway("r1", parent=client)
    trace.reward(0.5)
    (triplet,) = trace.adapt(ADAPTERS[adapter]())
    assert (triplet.metadata["response_id"], triplet.reward) == ("r1", 0.5)
    assert [history["messages"][-1]["content"] for history in TraceToMessages().adapt(trace.spans)] == ["sampled"]


def test_agent_match_selects_calls_by_their_nearest_agent(trace: Recorder) -> None:
    boss = trace.add("team", {"agent.name": "boss"}, at=(1000, 1020))
    trace.client("r1", parent=boss, at=(1001, 1002))
    writer = trace.add(
        "member", {"agentops.span.kind": "agent", "operation.name": "writer"}, parent=boss, at=(1003, 1010)
    )
    tool = trace.add("tool", parent=writer, at=(1004, 1009))
    trace.client("r2", parent=tool, at=(1005, 1006))
    trace.client("r3", at=(1030, 1031))
    assert ids(trace.adapt()) == ["r1", "r2", "r3"]
    assert [t.metadata["agent_name"] for t in trace.adapt()] == ["boss", "writer", None]
    assert ids(trace.adapt(TraceToTriplet(agent_match="writer"))) == ["r2"]
    assert ids(trace.adapt(TraceToTriplet(agent_match="^(boss|writer)$"))) == ["r1", "r2"]


@pytest.mark.parametrize(
    "attributes",
    [
        {"agent.name": "a"},
        {"gen_ai.agent.name": "a"},
        {"agentops.span.kind": "agent", "operation.name": "a"},
        {"recipient_agent_type": "a"},
        {"langchain.chain.type": "a"},
        {"lc_name": "a"},
        {"executor.id": "a"},
    ],
)
def test_agent_names_are_read_from_the_attributes_of_each_framework(
    trace: Recorder, attributes: dict[str, str]
) -> None:
    agent = trace.add("span", attributes, at=(1000, 1005))
    trace.client("r1", parent=agent, at=(1001, 1002))
    assert trace.adapt()[0].metadata["agent_name"] == "a"


def test_the_name_of_a_langchain_model_is_not_an_agent_name(trace: Recorder) -> None:
    trace.add("ChatOpenAI", {"gen_ai.operation.name": "chat", "gen_ai.response.id": "r", "lc_name": "ChatOpenAI"})
    assert trace.adapt()[0].metadata["agent_name"] is None


def test_calls_of_a_judge_are_left_out_unless_the_setting_includes_them(trace: Recorder) -> None:
    trace.client("r1", at=(1000, 1001))
    judge = trace.add("agentlightning.operation", {"agentlightning.operation.name": "reward"}, at=(1002, 1005))
    trace.client("r2", parent=judge, at=(1003, 1004))
    trace.gateway("r3", at=(1003, 1004))
    trace.reward(1.0, at=(1006, 1006))
    triplets = trace.adapt()
    assert ids(triplets) == ["r1"]
    assert rewards(triplets) == [1.0]
    assert ids(trace.adapt(TraceToTriplet(exclude_llm_call_in_reward=False))) == ["r1", "r2", "r3"]
    assert [len(TraceToMessages(side_calls=wanted).adapt(trace.spans)) for wanted in (True, False)] == [3, 1]


# The tree.


def test_a_call_next_to_an_agents_span_belongs_to_the_agent_if_its_time_is_enclosed(trace: Recorder) -> None:
    root = trace.add("root", at=(0, 10))
    outer = trace.add("agent", {"agent.name": "outer"}, parent=root, at=(1, 9))
    trace.add("agent", {"agent.name": "inner"}, parent=outer, at=(4, 6))
    trace.client("r1", parent=root, at=(2, 3))
    step = trace.add("step", parent=root, at=(4, 5))
    trace.client("r2", parent=step, at=(4.5, 5))
    trace.client("after it", parent=root, at=(8.5, 9.5))
    assert ids(trace.adapt(TraceToTriplet(agent_match="outer"))) == ["r1"]
    assert ids(trace.adapt(TraceToTriplet(agent_match="inner"))) == ["r2"]
    assert [triplet.metadata["agent_name"] for triplet in trace.adapt()] == ["outer", "inner", None]
    assert trace.adapt(TraceToTriplet(agent_match=".", repair_hierarchy=False)) == []


def test_a_call_enclosed_by_two_parallel_agents_belongs_to_neither(trace: Recorder) -> None:
    root = trace.add("root", at=(0, 10))
    for name in ("one", "two"):
        trace.add("agent", {"agent.name": name}, parent=root, at=(1, 9))
    trace.client("r1", parent=root, at=(2, 3))
    assert [triplet.metadata["agent_name"] for triplet in trace.adapt()] == [None]


def test_a_call_with_an_unknown_parent_is_placed_by_its_time(trace: Recorder) -> None:
    root = trace.add("root", at=(1000, 1100))
    agent = trace.add("agent", {"agent.name": "a"}, parent=root, at=(1010, 1050))
    trace.client("r1", parent="f" * 16, at=(1020, 1030))
    trace.client("r2", at=(1060, 1070))
    assert agent
    assert [t.metadata["agent_name"] for t in trace.adapt()] == ["a", None]
    assert [t.metadata["agent_name"] for t in trace.adapt(TraceToTriplet(repair_hierarchy=False))] == [None, None]


@pytest.mark.parametrize("repair", [True, False])
def test_cycles_of_parents_do_not_hang_the_adapter(trace: Recorder, repair: bool) -> None:
    trace.add("a", span_id="a" * 16, parent="b" * 16)
    trace.add("b", span_id="b" * 16, parent="c" * 16)
    trace.add("c", span_id="c" * 16, parent="a" * 16)
    trace.add("self", span_id="d" * 16, parent="d" * 16)
    trace.client("r1", parent="c" * 16)
    assert ids(trace.adapt(TraceToTriplet(repair_hierarchy=repair))) == ["r1"]


def test_a_span_is_never_moved_under_its_own_descendant(trace: Recorder) -> None:
    parent = trace.add("parent", at=(1000, 1005))
    trace.add("outlives it", parent=parent, at=(1000, 1010))
    nodes = build_tree(trace.spans, repair=True)
    assert {node.span.name: node.parent and node.parent.span.name for node in nodes} == {
        "parent": None,
        "outlives it": "parent",
    }


rows = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(-3, 25)), max_size=25)


@given(rows)
@settings(max_examples=200, deadline=None)
def test_repairing_the_tree_agrees_with_comparing_every_pair_of_spans(rows: list[tuple[int, int, int]]) -> None:
    trace = Recorder()
    for i, (start, length, parent) in enumerate(rows):
        known = trace.spans[parent] if 0 <= parent < i else None
        if known is not None:  # a child begins after its parent, and may outlive it
            start += int(known.start_time or 0) + 1
        trace.add(str(i), parent=known.span_id if known is not None else None, at=(start, start + length))
    nodes = build_tree(trace.spans, repair=True)
    by_id = {node.span.span_id: node for node in nodes}
    for node in nodes:
        if node.span.parent_id is not None:
            assert node.parent is by_id[node.span.parent_id]
        else:
            enclosing = [
                other
                for other in nodes
                if _rank(other) < _rank(node) and other.end >= node.end and other.end > other.start
            ]
            assert node.parent is max(enclosing, key=_rank, default=None)
    position = {node: i for i, node in enumerate(nodes)}
    assert all(position[node.parent] < position[node] for node in nodes if node.parent is not None)


def _rank(node: Node) -> tuple[float, float, int]:
    return node.start, -node.end, node.span.sequence_id


# Rewards.


def test_a_reward_goes_to_the_last_call_before_it(trace: Recorder) -> None:
    for i in range(3):
        trace.client(f"r{i}")
    trace.reward(1.0)
    assert rewards(trace.adapt()) == [None, None, 1.0]
    assert find_final_reward(trace.spans) == 1.0


def test_a_reward_after_each_call_goes_to_that_call(trace: Recorder) -> None:
    for i in range(3):
        trace.client(f"r{i}")
        trace.reward(float(i))
    trace.reward(9.0)
    assert rewards(trace.adapt()) == [0.0, 1.0, 2.0]


def test_two_rewards_in_a_row_go_to_the_last_two_calls(trace: Recorder) -> None:
    for i in range(3):
        trace.client(f"r{i}")
    trace.reward(1.0)
    trace.reward(2.0)
    assert rewards(trace.adapt()) == [None, 2.0, 1.0]


def test_a_reward_during_a_call_goes_to_an_earlier_call(trace: Recorder) -> None:
    trace.client("r1", at=(1000, 1001))
    trace.client("r2", at=(1002, 1010))
    trace.reward(1.0, at=(1005, 1005))
    assert rewards(trace.adapt()) == [1.0, None]


def test_a_call_whose_gateway_span_ends_a_little_late_still_gets_its_reward(trace: Recorder) -> None:
    trace.gateway("r1", at=(1000, 1001))
    trace.gateway("r2", at=(1002, 1005.002))
    trace.reward(1.0, at=(1005.001, 1005.001))
    assert rewards(trace.adapt()) == [None, 1.0]


def test_with_first_sibling_a_reward_stays_in_its_part_of_the_tree(trace: Recorder) -> None:
    root = trace.add("root", at=(1000, 1100))
    one = trace.add("one", parent=root, at=(1001, 1050))
    two = trace.add("two", parent=root, at=(1002, 1051))
    trace.client("r1", parent=one, at=(1003, 1004))
    trace.client("r2", parent=two, at=(1005, 1006))
    trace.reward(1.0, parent=one, at=(1010, 1010))
    trace.reward(2.0, parent=two, at=(1011, 1011))
    trace.reward(3.0, parent=root, at=(1060, 1060))
    assert rewards(trace.adapt(TraceToTriplet(reward_match=RewardMatchPolicy.FIRST_SIBLING))) == [1.0, 2.0]
    assert rewards(trace.adapt()) == [2.0, 1.0]


def test_a_reward_with_a_link_to_a_response_id_goes_to_that_call(trace: Recorder) -> None:
    for i in range(3):
        trace.client(f"r{i}")
    trace.reward(5.0, semconv.link_attributes({"gen_ai.response.id": "r0"}))
    trace.reward(1.0)
    trace.reward(7.0, semconv.link_attributes({"gen_ai.response.id": "gone"}))
    assert rewards(trace.adapt()) == [5.0, 7.0, 1.0], "an unknown id has no effect"


def test_a_reward_with_a_link_to_a_span_id_goes_to_that_call(trace: Recorder) -> None:
    spans = [trace.client(f"r{i}") for i in range(3)]
    trace.reward(5.0, semconv.link_attributes({"span_id": spans[0], "trace_id": "0" * 32}))
    trace.reward(7.0, semconv.link_attributes({"span_id": spans[1]}))
    assert rewards(trace.adapt()) == [5.0, 7.0, None]
    trace.reward(9.0, semconv.link_attributes({"span_id": spans[1], "trace_id": "f" * 32}))
    assert rewards(trace.adapt()) == [5.0, 7.0, 9.0], "a reward that links to no call goes to the last one"


def test_a_link_to_several_calls_goes_to_the_last_of_these_calls_before_the_reward(trace: Recorder) -> None:
    for i in range(2):
        trace.client(f"r{i}")
    trace.reward(1.0, semconv.link_attributes({"trace_id": "0" * 32}))
    trace.client("r2")
    assert rewards(trace.adapt()) == [None, 1.0, None]


def test_rewards_go_only_to_selected_calls(trace: Recorder) -> None:
    for i, name in enumerate(("a", "b", "a")):
        agent = trace.add("agent", {"agent.name": name}, at=(1000 + 10 * i, 1009 + 10 * i))
        trace.client(f"r{i}", parent=agent, at=(1001 + 10 * i, 1002 + 10 * i))
    trace.reward(1.0, at=(1050, 1050))
    assert rewards(trace.adapt(TraceToTriplet(agent_match="b"))) == [1.0]


# Errors.


def test_spans_of_several_attempts_are_refused(trace: Recorder) -> None:
    trace.client("r1")
    other = trace.spans[0].model_copy(update={"attempt_id": "at-2", "span_id": "e" * 16})
    with pytest.raises(AdapterError, match=r"at-2.*ro-1.*one attempt at a time"):
        TraceToTriplet().adapt([*trace.spans, other])


def test_the_error_about_a_wrong_number_of_logprobs_names_the_call(trace: Recorder) -> None:
    trace.gateway("r1", [1, 2, 3])
    attributes = {**trace.spans[0].attributes, "logprobs": [-0.5]}
    trace.spans[0] = trace.spans[0].model_copy(update={"attributes": attributes})
    with pytest.raises(
        AdapterError, match=r"r1 \(rollout ro-1, attempt at-1, span 0{15}1\) has 3 .* 1 logprobs; the mod"
    ):
        trace.adapt()


@pytest.mark.parametrize("argument", ["llm_call_match", "agent_match"])
def test_an_invalid_regular_expression_is_refused_when_the_adapter_is_created(argument: str) -> None:
    with pytest.raises(ConfigError, match=argument):
        get_manager().create("adapter", {"name": "triplet", argument: "("})


def test_an_unknown_reward_match_policy_is_refused_with_the_known_policies() -> None:
    with pytest.raises(ConfigError, match="first_occurrence, first_sibling"):
        TraceToTriplet(reward_match="nearest")


def test_the_log_explains_once_why_an_attempt_gives_no_triplets(
    trace: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = TraceToTriplet(agent_match="solver")
    assert adapter.adapt([]) == []
    trace.add("tool")
    assert [trace.adapt(adapter), trace.adapt(adapter)] == [[], []], "the second time nothing is logged"
    trace.client("r1")
    assert trace.adapt(adapter) == []
    advice = ". `agl doctor AGENT` tells how to fix it"
    assert [record.getMessage() for record in caplog.records] == [
        "a trace without spans gives no triplets",
        "attempt at-1 of rollout ro-1 gives no triplets: none of its 1 spans is a model call" + advice,
        "attempt at-1 of rollout ro-1 gives no triplets: its model calls were left out: 1 made by agent None, which "
        "agent_match='solver' excludes" + advice,
    ]


def test_the_log_about_a_failed_attempt_without_triplets_names_the_failure(
    trace: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    trace.client(None, error=True)
    trace.add(semconv.SPAN_ROLLOUT, at=(999, 1010))
    failed = TraceStatus(status_code="ERROR", description="ConnectError: no route to host")
    trace.spans[-1] = trace.spans[-1].model_copy(update={"status": failed})
    assert trace.adapt() == []
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert record.getMessage() == (
        "attempt at-1 of rollout ro-1 failed (ConnectError: no route to host) and gives no triplets: its model calls "
        "were left out: 1 without an answer"
    )


class TestTriplets(AdapterConformance):
    @pytest.fixture(params=["triplet", "transition", "trajectory", "messages"])
    def adapter(self, request: pytest.FixtureRequest) -> Any:
        self.kind = request.param
        return get_manager().create("adapter", request.param)

    def answers(self, adapted: Any) -> list[str]:
        if self.kind == "messages":
            return [each["messages"][-1]["content"] for each in adapted]
        if self.kind == "trajectory":
            adapted = [turn.triplet for each in adapted.trajectories for turn in each.turns]
        responses = [each.action if self.kind == "transition" else each.response for each in adapted]
        return [response["raw_content"][0]["content"] for response in responses]


def test_the_adapter_is_a_component_with_settings() -> None:
    adapter = get_manager().create("adapter", {"name": "triplet", "reward_match": "first_sibling", "agent_match": "a"})
    assert isinstance(adapter, TracerTraceToTriplet)
    assert adapter.reward_match is RewardMatchPolicy.FIRST_SIBLING


def _count_lines(n_calls: int) -> int:
    """Returns how many lines run to adapt calls that client and gateway recorded, with a reward for each."""
    trace = Recorder()
    root = trace.add("root", at=(0, 1e9))
    for i in range(n_calls):
        trace.client(f"r{i}", parent=root if i % 2 else None, at=(10 * i, 10 * i + 8))
        trace.gateway(f"r{i}", parent="f" * 16, at=(10 * i + 1, 10 * i + 7))
        trace.reward(1.0, parent=root, at=(10 * i + 9, 10 * i + 9))
    lines = 0

    def count(frame: object, event: str, arg: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    others = sys.gettrace()
    sys.settrace(count)
    try:
        assert len(trace.adapt()) == n_calls
    finally:
        sys.settrace(others)
    return lines


def test_the_work_grows_linearly_with_the_number_of_calls() -> None:
    assert _count_lines(400) < 5 * _count_lines(100)


# The other adapters.


def test_the_gateway_adapter_uses_only_spans_of_the_gateway(trace: Recorder) -> None:
    trace.client("r1", at=(1000, 1002))
    trace.gateway("r1", [1], at=(1000.5, 1001.5))
    trace.client("r2")
    trace.gateway("r3", [3])
    trace.reward(1.0)
    triplets = LlmProxyTraceToTriplet().adapt(trace.spans)
    assert ids(triplets) == ["r1", "r3"]
    assert rewards(triplets) == [None, 1.0]


def test_a_wrong_clock_of_the_gateway_does_not_move_rewards(trace: Recorder) -> None:
    for i in range(3):
        trace.gateway(f"r{i}", at=(5000 + i, 5000.5 + i))
        trace.reward(float(i), at=(1000 + i, 1000 + i))
    assert rewards(LlmProxyTraceToTriplet().adapt(trace.spans)) == [0.0, 1.0, 2.0]


def test_a_reward_that_arrives_before_the_gateways_span_is_matched_by_the_client_span(trace: Recorder) -> None:
    clients = [trace.client(f"r{i}", at=(1000 + i, 1000.5 + i)) for i in range(2)]
    trace.gateway("r0", parent=clients[0], at=(5000, 5000.5))
    trace.reward(1.0, at=(1001.6, 1001.6))
    trace.gateway("r1", parent=clients[1], at=(5001, 5001.5))
    assert rewards(LlmProxyTraceToTriplet().adapt(trace.spans)) == [None, 1.0]


@pytest.mark.parametrize("role", [{}, {"gen_ai.completion.0.role": "assistant"}], ids=["streamed", "whole"])
def test_tool_calls_that_agentops_records_as_spans_are_in_the_answer(trace: Recorder, role: dict[str, str]) -> None:
    call = {
        "llm.request.type": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.prompt.0.role": "user",
        "gen_ai.prompt.0.content": "1+2?",
        "gen_ai.request.functions.0.name": "add",
        "gen_ai.request.functions.0.parameters": '{"type": "object"}',
        "gen_ai.response.id": "r1",
        "gen_ai.completion.0.finish_reason": "tool_calls",
        **role,
    }
    client = trace.add("openai.chat.completion", call, at=(1000, 1002))
    for i in range(2):
        tool = {"tool.name": "add", "tool.parameters": f'{{"a": {i}}}', "tool.call.id": f"c{i}"}
        trace.add("tool_call.add", tool, parent=client, at=(1001, 1001))
    answer = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": f"c{i}", "type": "function", "function": {"name": "add", "arguments": f'{{"a": {i}}}'}}
            for i in range(2)
        ],
    }
    (triplet,) = trace.adapt()
    assert triplet.response["raw_content"] == [answer]
    (history,) = TraceToMessages().adapt(trace.spans)
    assert history == {"messages": [{"role": "user", "content": "1+2?"}, answer], "tools": [TOOL]}


def test_chat_histories_contain_tools_tool_calls_and_answers(trace: Recorder) -> None:
    messages = [
        {"role": "system", "parts": [{"type": "text", "content": "be right"}]},
        {"role": "user", "parts": [{"type": "text", "content": "1+2?"}]},
        {
            "role": "assistant",
            "parts": [{"type": "tool_call", "id": "c1", "name": "add", "arguments": {"a": 1, "b": 2}}],
        },
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "3"}]},
    ]
    answer = {"role": "assistant", "parts": [{"type": "text", "content": "3"}], "finish_reason": "stop"}
    trace.add(
        "chat",
        {
            "gen_ai.operation.name": "chat",
            "gen_ai.response.id": "r1",
            "gen_ai.input.messages": json.dumps(messages),
            "gen_ai.output.messages": json.dumps([answer]),
            "gen_ai.tool.definitions": json.dumps([TOOL]),
        },
    )
    trace.client(None, error=True)
    trace.gateway("r2", complete=False)
    assert TraceToMessages().adapt(trace.spans) == [
        {
            "messages": [
                {"role": "system", "content": "be right"},
                {"role": "user", "content": "1+2?"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "3"},
                {"role": "assistant", "content": "3"},
            ],
            "tools": [TOOL],
        }
    ]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.dictionaries(
            st.sampled_from([*READ_ATTRIBUTES]),
            st.one_of(
                st.none(), st.integers(), st.text(max_size=5), st.lists(st.integers(), max_size=2), st.sampled_from(ODD)
            ),
            max_size=7,
        ),
        min_size=1,
        max_size=3,
    )
)
def test_attributes_of_any_form_give_triplets_or_an_adapter_error(found: list[dict[str, Any]]) -> None:
    trace = Recorder()
    for attributes in found:
        trace.add("chat", {"gen_ai.operation.name": "chat", **attributes})
    for adapter in (TraceToTriplet(), LlmProxyTraceToTriplet(), TraceToMessages()):
        with contextlib.suppress(AdapterError):
            adapter.adapt(trace.spans)
    assert all(math.isfinite(reward.value) for span in trace.spans for reward in get_rewards_from_span(span))
