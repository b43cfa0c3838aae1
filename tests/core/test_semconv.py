from __future__ import annotations

import json
from typing import Any

import pytest

from agentlightning import semconv
from agentlightning.types import Span

ASKED = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "1+2?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "3"},
]
ANSWERED = [{"role": "assistant", "content": "3"}]
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
]

CURRENT = {
    "gen_ai.operation.name": "chat",
    "gen_ai.response.id": "r1",
    "gen_ai.response.model": "m",
    "gen_ai.response.finish_reasons": ("stop",),
    "gen_ai.input.messages": json.dumps(
        [
            {"role": "system", "parts": [{"type": "text", "content": "be brief"}]},
            {"role": "user", "parts": [{"type": "text", "content": "1+2?"}]},
            {"role": "assistant", "parts": [{"type": "tool_call", "id": "c1", "name": "add", "arguments": {"a": 1}}]},
            {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "3"}]},
        ]
    ),
    "gen_ai.output.messages": json.dumps(
        [{"role": "assistant", "parts": [{"type": "text", "content": "3"}], "finish_reason": "stop"}]
    ),
    "gen_ai.tool.definitions": json.dumps([{"type": "function", **TOOLS[0]["function"]}]),
}
OLDER = {
    "llm.request.type": "chat",
    "gen_ai.response.id": "r1",
    "gen_ai.request.model": "m",
    "gen_ai.prompt.0.role": "system",
    "gen_ai.prompt.0.content": "be brief",
    "gen_ai.prompt.1.role": "user",
    "gen_ai.prompt.1.content": "1+2?",
    "gen_ai.prompt.2.role": "assistant",
    "gen_ai.prompt.2.tool_calls.0.id": "c1",
    "gen_ai.prompt.2.tool_calls.0.name": "add",
    "gen_ai.prompt.2.tool_calls.0.arguments": '{"a": 1}',
    "gen_ai.prompt.3.role": "tool",
    "gen_ai.prompt.3.tool_call_id": "c1",
    "gen_ai.prompt.3.content": "3",
    "gen_ai.completion.0.role": "assistant",
    "gen_ai.completion.0.content": "3",
    "gen_ai.completion.0.finish_reason": "stop",
    "llm.request.functions.0.name": "add",
    "llm.request.functions.0.description": "adds",
    "llm.request.functions.0.parameters": '{"type": "object"}',
}
OPENINFERENCE = {
    "openinference.span.kind": "LLM",
    "llm.model_name": "m",
    "llm.input_messages.0.message.role": "system",
    "llm.input_messages.0.message.content": "be brief",
    "llm.input_messages.1.message.role": "user",
    "llm.input_messages.1.message.contents.0.message_content.type": "text",
    "llm.input_messages.1.message.contents.0.message_content.text": "1+2?",
    "llm.input_messages.2.message.role": "assistant",
    "llm.input_messages.2.message.tool_calls.0.tool_call.id": "c1",
    "llm.input_messages.2.message.tool_calls.0.tool_call.function.name": "add",
    "llm.input_messages.2.message.tool_calls.0.tool_call.function.arguments": '{"a": 1}',
    "llm.input_messages.3.message.role": "tool",
    "llm.input_messages.3.message.tool_call_id": "c1",
    "llm.input_messages.3.message.content": "3",
    "llm.output_messages.0.message.role": "assistant",
    "llm.output_messages.0.message.content": "3",
    "llm.tools.0.tool.json_schema": json.dumps(TOOLS[0]),
    "output.value": json.dumps(
        {
            "id": "r1",
            "prompt_token_ids": [1, 2],
            "choices": [
                {
                    "finish_reason": "stop",
                    "token_ids": [3, 4],
                    "logprobs": {"content": [{"logprob": -1.0}, {"logprob": -2.0}]},
                }
            ],
        }
    ),
}


def span_of(attributes: dict[str, Any], name: str = "span") -> Span:
    return Span.from_attributes(attributes=attributes, name=name)


@pytest.mark.parametrize("attributes", [CURRENT, OLDER, OPENINFERENCE], ids=["current", "older", "openinference"])
def test_spans_of_every_dialect_are_read_alike(attributes: dict[str, Any]) -> None:
    span = span_of(attributes)
    assert semconv.is_llm_call(span)
    assert semconv.read_response_id(span) == "r1"
    assert semconv.read_model(span) == "m"
    assert semconv.read_finish_reasons(span) == ["stop"]
    assert semconv.read_output_messages(span) == ANSWERED
    assert semconv.read_tools(span) == TOOLS
    asked = semconv.read_input_messages(span)
    assert [{**message, "content": message["content"] or None} for message in asked] == ASKED


def test_messages_already_in_openai_form_are_kept() -> None:
    span = span_of({"gen_ai.input.messages": json.dumps(ASKED)})
    assert semconv.read_input_messages(span) == ASKED


def test_separate_system_instructions_become_the_first_message() -> None:
    apart = {"gen_ai.system_instructions": json.dumps([{"type": "text", "content": "be brief"}])}
    asked = [{"role": "user", "content": "1+2?"}]
    span = span_of({**apart, "gen_ai.input.messages": json.dumps(asked)})
    assert semconv.read_input_messages(span) == [{"role": "system", "content": "be brief"}, *asked]
    assert semconv.read_input_messages(span_of({**apart, **CURRENT})) == ASKED, (
        "instructions that are also a message are read once"
    )


def test_more_than_ten_messages_stay_in_order() -> None:
    attributes = {f"gen_ai.prompt.{i}.content": str(i) for i in reversed(range(12))}
    messages = semconv.read_input_messages(span_of(attributes))
    assert [message["content"] for message in messages] == [str(i) for i in range(12)]


def test_reasoning_refusals_and_mixed_parts_are_kept() -> None:
    parts = [
        {"type": "reasoning", "content": "hm"},
        {"type": "text", "content": "a"},
        {"type": "text", "content": "b"},
        {"type": "refusal", "content": "no"},
    ]
    span = span_of({"gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": parts}])})
    assert semconv.read_output_messages(span) == [
        {"role": "assistant", "content": "ab", "reasoning_content": "hm", "refusal": "no"}
    ]


def test_images_are_found_in_every_dialect() -> None:
    older = {
        "gen_ai.prompt.0.role": "user",
        "gen_ai.prompt.0.content": json.dumps([{"type": "image_url", "image_url": {"url": "http://i/1"}}]),
    }
    openinference = {
        "openinference.span.kind": "LLM",
        "llm.input_messages.0.message.role": "user",
        "llm.input_messages.0.message.contents.0.message_content.type": "image",
        "llm.input_messages.0.message.contents.0.message_content.image.image.url": "http://i/1",
        "llm.input_messages.0.message.contents.1.message_content.type": "text",
        "llm.input_messages.0.message.contents.1.message_content.text": "what?",
    }
    for attributes in (older, openinference):
        messages = semconv.read_input_messages(span_of(attributes))
        assert semconv.find_image_urls(messages) == ["http://i/1"]


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({"gen_ai.operation.name": "text_completion"}, True),
        ({"gen_ai.operation.name": "embeddings", "gen_ai.request.model": "m", "gen_ai.response.id": "r"}, False),
        ({"gen_ai.operation.name": "invoke_agent", "gen_ai.request.model": "m", "gen_ai.response.id": "r"}, False),
        ({"gen_ai.operation.name": "execute_tool"}, False),
        ({"openinference.span.kind": "AGENT", "gen_ai.response.id": "r"}, False),
        ({"agentops.span.kind": "llm"}, True),
        ({"agentops.span.kind": "agent"}, False),
        ({"gen_ai.request.model": "m", "gen_ai.prompt.0.role": "user"}, True),
        ({"gen_ai.request.model": "m"}, False),
        ({"response_token_ids": [1]}, True),
        ({}, False),
    ],
)
def test_model_calls_are_distinguished_from_agents_tools_and_embeddings(
    attributes: dict[str, Any], expected: bool
) -> None:
    assert semconv.is_llm_call(span_of(attributes)) is expected


def test_tokens_are_read_from_gateway_attributes_and_from_raw_responses() -> None:
    ours = span_of({"prompt_token_ids": [1, 2], "response_token_ids": [3, 4], "logprobs": [-1.0, -2.0]})
    raw = span_of(OPENINFERENCE)
    assert semconv.read_token_data(ours) == semconv.read_token_data(raw) == ([1, 2], [3, 4], [-1.0, -2.0])
    assert semconv.read_token_data(span_of(CURRENT)) is None
    assert semconv.read_token_data(ours, choice=1) is None
    assert semconv.read_token_data(span_of({"response_token_ids": [3]})) == ([], [3], None)


def test_finish_reasons_are_read_from_json_and_from_a_plain_string() -> None:
    assert semconv.read_finish_reasons(span_of({"gen_ai.response.finish_reasons": '["tool_call"]'})) == ["tool_calls"]
    assert semconv.read_finish_reasons(span_of({"gen_ai.response.finish_reasons": "stop"})) == ["stop"]


@pytest.mark.parametrize("text", ["", "{", "null", "7", '"text"', '{"role": "user"}', "[1, null]"])
def test_a_value_that_is_not_a_list_of_messages_is_read_as_no_messages(text: str) -> None:
    span = span_of({"gen_ai.input.messages": text, "gen_ai.tool.definitions": text})
    assert semconv.read_input_messages(span) == []
    assert semconv.read_tools(span) == []


def test_nan_and_lone_surrogates_become_text_that_can_be_written() -> None:
    text = '[{"role": "user", "parts": [{"type": "text", "content": "\\ud800"}, {"type": "score", "value": NaN}]}]'
    (message,) = semconv.read_input_messages(span_of({"gen_ai.input.messages": text}))
    assert message["content"] == [{"type": "text", "text": "\\ud800"}, {"type": "score", "value": "NaN"}]


def test_links_are_read_as_they_were_written() -> None:
    attributes = semconv.link_attributes({"gen_ai.response.id": "r1", "step": 3})
    assert semconv.read_links(span_of(attributes)) == [("gen_ai.response.id", "r1"), ("step", 3)]
    assert semconv.read_links(span_of({})) == []


@pytest.mark.parametrize(
    ("attributes", "name"),
    [
        ({"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "add"}, "add"),
        ({"openinference.span.kind": "TOOL", "tool.name": "add"}, "add"),
        ({"agentops.span.kind": "tool", "operation.name": "add"}, "add"),
        ({"traceloop.span.kind": "tool", "traceloop.entity.name": "add"}, "add"),
        ({"openinference.span.kind": "TOOL"}, None),
        ({"mcp.method.name": "tools/call"}, None),
    ],
)
def test_a_tool_call_is_recognised_in_every_dialect(attributes: dict[str, str], name: str | None) -> None:
    span = Span.from_attributes(attributes=attributes)
    assert semconv.is_tool_call(span)
    assert not semconv.is_llm_call(span)
    assert semconv.read_tool_name(span) == name


@pytest.mark.parametrize(
    ("attributes", "span_name"),
    [
        ({"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "writer"}, "invoke_agent writer"),
        ({"gen_ai.operation.name": "invoke_workflow", "gen_ai.agent.name": "writer"}, "invoke_workflow writer"),
        ({"gen_ai.operation.name": "invoke_workflow", "gen_ai.workflow.name": "writer"}, "invoke_workflow writer"),
        ({"openinference.span.kind": "AGENT"}, "writer"),
        ({"openinference.span.kind": "AGENT"}, "writer.run"),
        ({"openinference.span.kind": "AGENT"}, "writer._execute_core"),
    ],
)
def test_an_agent_is_named_alike_in_every_dialect(attributes: dict[str, str], span_name: str) -> None:
    span = Span.from_attributes(name=span_name, attributes=attributes)
    assert semconv.read_agent_name(span) == "writer"
    assert not semconv.is_llm_call(span)


@pytest.mark.parametrize(
    "attributes",
    [
        {"gen_ai.operation.name": "plan"},
        {"mcp.method.name": "tools/list"},
        {"gen_ai.operation.name": "chat"},
        {"openinference.span.kind": "LLM"},
        {"agentops.span.kind": "agent"},
        {},
    ],
)
def test_other_spans_are_not_mistaken_for_tool_calls(attributes: dict[str, str]) -> None:
    assert not semconv.is_tool_call(Span.from_attributes(attributes=attributes))


def test_the_finish_reason_of_a_stream_is_read_from_openinference_attributes() -> None:
    attributes = {"openinference.span.kind": "LLM", "llm.finish_reason": "tool_calls"}
    assert semconv.read_finish_reasons(Span.from_attributes(attributes=attributes)) == ["tool_calls"]
