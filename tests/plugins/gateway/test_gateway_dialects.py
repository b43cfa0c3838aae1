"""The Responses and Messages APIs through the gateway, with a backend that speaks Chat Completions only."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import openai
import pytest
from pydantic import BaseModel

from agentlightning import semconv
from agentlightning.adapter import TraceToTriplet
from agentlightning.types import Span
from agentlightning_plugins.gateway.dialects.dialect import Completion
from agentlightning_plugins.gateway.dialects.responses import Responses
from agentlightning_plugins.gateway.dialects.wire import read_events
from agentlightning_plugins.shared.scripted_model.server import (
    EOS,
    Answer,
    ScriptedOpenAI,
    encode,
    logprob,
    render_prompt,
)
from tests.plugins.gateway.gateway_setup import HELLO, entry, gateway

ADD: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
FULL = Answer("The sum is 3.", reasoning="Add them.", tool_calls=[("add", {"a": 1, "b": 2}), ("add", {})])
FULL_TOKENS = [*encode('Add them.The sum is 3.<tool_call>add{"a": 1, "b": 2}<tool_call>add{}'), EOS]


class Sum(BaseModel):
    total: int


def assert_tokens(span: Span, prompt: list[dict[str, Any]], token_ids: list[int]) -> None:
    data = semconv.read_token_data(span)
    assert data is not None
    assert data.prompt_token_ids == encode(render_prompt({"messages": prompt}))
    assert data.response_token_ids == token_ids
    assert data.logprobs == [logprob(token) for token in token_ids]


async def test_calls_of_the_responses_api_reach_a_chat_server_and_are_recorded_with_tokens() -> None:
    script = [Answer(FULL.content, FULL.tool_calls, extra={"weight_version": 4}, reasoning=FULL.reasoning)]
    async with ScriptedOpenAI(script) as server, gateway(server) as case:
        rollout, client = await case.start()
        whole = await client.responses.create(model="m", input="1 + 2?", instructions="Add.", temperature=0.5)
        async with client.responses.stream(model="m", input="1 + 2?", instructions="Add.") as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_response()
        spans = await case.spans(rollout)
    for answer, span in zip((whole, streamed), spans, strict=True):
        reasoning, message, *calls = answer.output
        assert reasoning.type == "reasoning"
        assert reasoning.content
        assert reasoning.content[0].text == "Add them."
        assert (message.type, answer.output_text) == ("message", "The sum is 3.")
        assert [(call.name, call.arguments) for call in calls if call.type == "function_call"] == [
            ("add", '{"a": 1, "b": 2}'),
            ("add", "{}"),
        ]
        assert answer.usage
        assert answer.usage.output_tokens == len(FULL_TOKENS)
        assert (answer.status, answer.instructions) == ("completed", "Add.")
        prompt = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 2?"}]
        assert_tokens(span, prompt, FULL_TOKENS)
        assert semconv.read_input_messages(span) == prompt
        assert span.attributes["gen_ai.response.id"] == answer.id
        assert span.attributes["agentlightning.weight_version"] == 4
        assert span.attributes["agentlightning.gateway.complete"] is True
        assert (span.name, semconv.read_finish_reasons(span)) == ("responses", ["tool_calls"])
        assert [call["id"] for call in semconv.read_output_messages(span)[0]["tool_calls"]] == [
            call.call_id for call in calls if call.type == "function_call"
        ]
    assert spans[0].attributes["gen_ai.request.temperature"] == 0.5
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-1] == "response.completed"
    assert 0 < spans[1].attributes["gen_ai.response.time_to_first_chunk"] < 5


async def test_a_request_of_the_responses_api_is_translated_to_chat() -> None:
    body: dict[str, Any] = {
        "model": "m",
        "instructions": "Be brief.",
        "input": [
            {"role": "developer", "content": "Use tools."},
            {"role": "user", "content": [{"type": "input_text", "text": "1 + 2?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a":1}'},
            {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "3"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "0"}]},
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "And this?"},
                    {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "low"},
                ],
            },
        ],
        "tools": [{"type": "function", "name": "add", "description": "a + b", "parameters": ADD, "strict": True}],
        "tool_choice": {"type": "function", "name": "add"},
        "parallel_tool_calls": False,
        "text": {"format": {"type": "json_schema", "name": "sum", "schema": ADD, "strict": True}, "verbosity": "low"},
        "reasoning": {"effort": "low"},
        "max_output_tokens": 9,
        "top_p": 0.5,
        "top_k": 3,
        "store": False,
    }
    call = {"type": "function", "function": {"name": "add"}}
    expected = {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "system", "content": "Use tools."},
            {"role": "user", "content": "1 + 2?"},
            {
                "role": "assistant",
                "content": "Wait.",
                "reasoning_content": "Hm.",
                "reasoning": "Hm.",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}},
                    {"id": "c2", "type": "function", "function": {"name": "add", "arguments": "{}"}},
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "3"},
            {"role": "tool", "tool_call_id": "c2", "content": "0"},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "And this?"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"}},
                ],
            },
        ],
        "tools": [call | {"function": {"name": "add", "description": "a + b", "parameters": ADD, "strict": True}}],
        "tool_choice": call,
        "parallel_tool_calls": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "sum", "schema": ADD, "strict": True}},
        "verbosity": "low",
        "reasoning_effort": "low",
        "max_completion_tokens": 9,
        "top_p": 0.5,
        "top_k": 3,
        "return_token_ids": True,
        "logprobs": True,
    }
    async with ScriptedOpenAI() as server, gateway(server) as case:
        rollout, client = await case.start()
        await client.post("/responses", body=body, cast_to=object)
        assert server.requests[0].body == expected
        span = await case.span(rollout)
    assert span.attributes["gen_ai.request.max_tokens"] == 9
    assert semconv.read_tools(span) == expected["tools"]
    assert semconv.find_image_urls(semconv.read_input_messages(span)) == ["data:image/png;base64,AA=="]


async def test_the_responses_api_returns_logprobs_on_request() -> None:
    async with ScriptedOpenAI([Answer("Hello")]) as server, gateway(server) as case:
        _, client = await case.start()
        for include, count in (([], 0), (["message.output_text.logprobs"], 5)):
            answer: Any = await client.responses.create(model="m", input="hi", include=include)
            assert len(answer.output[0].content[0].logprobs) >= count
            assert bool(answer.output[0].content[0].logprobs) == bool(count)


async def test_helpers_of_the_client_parse_translated_answers() -> None:
    async with ScriptedOpenAI([Answer('{"total": 3}')]) as server, gateway(server) as case:
        _, client = await case.start()
        response = await client.responses.parse(model="m", input="1 + 2?", text_format=Sum)
        assert response.output_parsed == Sum(total=3)
        chat = await client.chat.completions.parse(model="m", messages=HELLO, response_format=Sum)
        assert chat.choices[0].message.parsed == Sum(total=3)
        async with client.chat.completions.stream(model="m", messages=HELLO, response_format=Sum) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.parsed == Sum(total=3)
        sent = [request.body["response_format"]["json_schema"]["schema"] for request in server.requests]
        assert sent[0] == sent[1] == sent[2]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"previous_response_id": "resp_1"}, "'previous_response_id' needs a server that keeps responses"),
        ({"background": True}, "background: true is not supported"),
        ({"tools": [{"type": "shell"}]}, "tools of type 'shell' have no form in Chat Completions"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "items of type 'item_reference'"),
        ({"input": 3}, "'input' is 3"),
    ],
)
async def test_requests_that_chat_cannot_express_are_refused_and_recorded(more: dict[str, Any], says: str) -> None:
    async with ScriptedOpenAI() as server, gateway(server) as case:
        rollout, client = await case.start()
        with pytest.raises(openai.BadRequestError, match=says):
            await client.post("/responses", body={"model": "m", "input": "hi", **more}, cast_to=object)
        assert server.requests == []
        span = await case.span(rollout)
    assert span.attributes["agentlightning.gateway.complete"] is False
    assert span.attributes["error.type"] == "400"


async def test_limited_and_empty_answers_have_the_form_of_the_responses_api() -> None:
    async with ScriptedOpenAI([Answer("cut", finish_reason="length"), Answer("")]) as server, gateway(server) as case:
        rollout, client = await case.start()
        limited = await client.responses.create(model="m", input="hi")
        empty = await client.responses.create(model="m", input="hi")
        events = [event async for event in await client.responses.create(model="m", input="hi", stream=True)]
        spans = await case.spans(rollout)
    assert limited.status == "incomplete"
    assert limited.incomplete_details
    assert limited.incomplete_details.reason == "max_output_tokens"
    assert (empty.status, empty.output[0].type, empty.output_text) == ("completed", "message", "")
    assert [event.type for event in events][-2:] == ["response.output_item.done", "response.completed"]
    assert [semconv.read_finish_reasons(span) for span in spans] == [["length"], ["stop"], ["stop"]]


async def test_calls_of_the_messages_api_reach_a_chat_server_and_are_recorded_with_tokens() -> None:
    async with ScriptedOpenAI([FULL]) as server, gateway(server) as case:
        rollout, openai_client = await case.start()
        client = await case.anthropic_client(openai_client)
        ask: dict[str, Any] = {"model": "m", "max_tokens": 9, "system": "Add.", "messages": HELLO}
        whole = await client.messages.create(**ask)
        async with client.messages.stream(**ask) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_message()
        spans = await case.spans(rollout)
    for answer, span in zip((whole, streamed), spans, strict=True):
        assert [block.to_dict(exclude_none=True) for block in answer.content] == [
            {"type": "thinking", "thinking": "Add them.", "signature": ""},
            {"type": "text", "text": "The sum is 3."},
            *(
                {"type": "tool_use", "id": f"call-{answer.id}-0-{position}", "name": "add", "input": arguments}
                for position, arguments in enumerate([{"a": 1, "b": 2}, {}])
            ),
        ]
        assert (answer.stop_reason, answer.usage.output_tokens) == ("tool_use", len(FULL_TOKENS))
        prompt = [{"role": "system", "content": "Add."}, *HELLO]
        assert answer.usage.input_tokens == len(encode(render_prompt({"messages": prompt})))
        assert_tokens(span, prompt, FULL_TOKENS)
        assert span.attributes["gen_ai.response.id"] == answer.id
        assert span.attributes["gen_ai.request.max_tokens"] == 9
        assert (span.name, semconv.read_finish_reasons(span)) == ("messages", ["tool_calls"])
        (message,) = semconv.read_output_messages(span)
        assert (message["reasoning_content"], message["content"]) == ("Add them.", "The sum is 3.")
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"


async def test_limited_and_refused_answers_have_the_form_of_the_messages_api() -> None:
    calls = Answer(tool_calls=[("add", {"a": 1})], finish_reason="stop")
    script = [Answer("cut", finish_reason="length"), Answer(refusal="No."), calls]
    async with ScriptedOpenAI(script) as server, gateway(server) as case:
        _, client = await case.start()
        messages = (await case.anthropic_client(client)).messages
        limited, refused, called = [await messages.create(model="m", max_tokens=9, messages=HELLO) for _ in script]
    assert limited.stop_reason == "max_tokens"
    assert called.stop_reason == "tool_use"
    assert (refused.stop_reason, refused.content[0].to_dict()) == ("refusal", {"type": "text", "text": "No."})


async def test_a_request_of_the_messages_api_is_translated_to_chat() -> None:
    image = {"type": "base64", "media_type": "image/png", "data": "AA=="}
    body = {
        "model": "m",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "1 + 2?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    {"type": "text", "text": "Wait."},
                    {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
                    {"type": "tool_use", "id": "c2", "name": "add", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": "3"},
                    {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "0"}]},
                    {"type": "text", "text": "And this?"},
                    {"type": "image", "source": image},
                ],
            },
        ],
        "tools": [{"name": "add", "description": "a + b", "input_schema": ADD}],
        "tool_choice": {"type": "tool", "name": "add", "disable_parallel_tool_use": True},
        "stop_sequences": ["END"],
        "top_k": 3,
        "metadata": {"user_id": "u"},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": ADD}},
        "novel": {"x": 1},
    }
    schema = {"name": "answer", "schema": ADD, "strict": True}
    expected = {
        "model": "m",
        "max_tokens": 9,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "1 + 2?"},
            {
                "role": "assistant",
                "content": "Wait.",
                "reasoning_content": "Hm.",
                "reasoning": "Hm.",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}},
                    {"id": "c2", "type": "function", "function": {"name": "add", "arguments": "{}"}},
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "3"},
            {"role": "tool", "tool_call_id": "c2", "content": "0"},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "And this?"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
                ],
            },
        ],
        "tools": [{"type": "function", "function": {"name": "add", "description": "a + b", "parameters": ADD}}],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "parallel_tool_calls": False,
        "stop": ["END"],
        "top_k": 3,
        "user": "u",
        "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": schema},
        "return_token_ids": True,
        "logprobs": True,
    }
    async with ScriptedOpenAI() as server, gateway(server) as case:
        _, client = await case.start()
        await (await case.anthropic_client(client)).post("/v1/messages", body=body, cast_to=object)
        assert server.requests[0].body == expected


async def test_anthropics_client_gets_errors_in_the_form_of_the_messages_api() -> None:
    import anthropic

    script = [
        Answer(status=429, error="slow down"),
        Answer(status=400, error="no"),
        Answer("Hello, world", cut_after=2),
    ]
    async with ScriptedOpenAI(script) as server, gateway(server, num_retries=0) as case:
        rollout, openai_client = await case.start()
        client = await case.anthropic_client(openai_client)
        ask: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": HELLO}
        with pytest.raises(anthropic.RateLimitError, match="slow down") as limited:
            await client.messages.create(**ask)
        assert limited.value.body == {"type": "error", "error": {"type": "rate_limit_error", "message": "slow down"}}
        with pytest.raises(anthropic.BadRequestError, match="no"):
            await client.messages.create(**ask)
        with pytest.raises(anthropic.NotFoundError, match="no model 'nope'"):
            await client.messages.create(**ask | {"model": "nope"})
        with pytest.raises(anthropic.BadRequestError, match="Anthropic's own"):
            await client.messages.create(**ask, tools=[{"type": "bash_20250124", "name": "bash"}])
        with pytest.raises(anthropic.APIStatusError, match="broke off"):
            async with client.messages.stream(**ask) as stream:
                await stream.get_final_message()
        spans = await case.spans(rollout)
    assert len(spans) == 5
    assert not any(span.attributes["agentlightning.gateway.complete"] for span in spans)
    assert TraceToTriplet().adapt(spans) == []


async def test_a_translated_stream_that_breaks_off_raises_in_the_client_of_the_responses_api() -> None:
    async with ScriptedOpenAI([Answer("Hello, world", cut_after=2)]) as server, gateway(server) as case:
        rollout, client = await case.start()
        with pytest.raises(openai.APIError, match="broke off"):
            async for _ in await client.responses.create(model="m", input="hi", stream=True):
                pass
        span = await case.span(rollout)
    assert span.attributes["agentlightning.gateway.complete"] is False
    assert semconv.read_output_messages(span)[0]["content"] == "Hello, w"


async def test_a_call_is_recorded_as_incomplete_if_anthropics_client_disconnects() -> None:
    async with ScriptedOpenAI([Answer("Hello, world", chunk_delay_s=3600)]) as server, gateway(server) as case:
        rollout, client = await case.start()
        messages = (await case.anthropic_client(client)).messages
        async with messages.stream(model="m", max_tokens=9, messages=HELLO) as stream:
            async for _ in stream.text_stream:
                break
        span = await case.eventual_span(rollout)
    assert span.attributes["agentlightning.gateway.complete"] is False
    assert "disconnected" in (span.status.description or "")


async def test_tool_arguments_that_are_not_json_reach_anthropics_client() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": '}}
    choice = {"index": 0, "finish_reason": "tool_calls", "message": {"role": "assistant", "tool_calls": [call]}}
    body = json.dumps({"id": "x", "model": "m", "choices": [choice]}).encode()
    async with ScriptedOpenAI([Answer(body=body)]) as server, gateway(server) as case:
        rollout, client = await case.start()
        answer: Any = await (await case.anthropic_client(client)).messages.create(
            model="m", max_tokens=9, messages=HELLO
        )
        span = await case.span(rollout)
    assert answer.content[0].input == {"unparsed_arguments": '{"a": '}
    assert semconv.read_output_messages(span)[0]["tool_calls"][0]["function"]["arguments"] == '{"a": '


async def test_token_counting_of_the_messages_api_works_with_a_chat_server() -> None:
    async with ScriptedOpenAI([Answer("long answer")]) as server, gateway(server) as case:
        rollout, client = await case.start()
        count = await (await case.anthropic_client(client)).messages.count_tokens(model="m", messages=HELLO)
        assert count.input_tokens == len(encode(render_prompt({"messages": HELLO})))
        assert server.requests[0].body["max_tokens"] == 1
        assert TraceToTriplet().adapt(await case.spans(rollout)) == []


async def test_one_agent_can_use_every_dialect_and_all_calls_become_triplets() -> None:
    async with ScriptedOpenAI([Answer("1"), Answer("2"), Answer("3"), Answer("4")]) as server, gateway(server) as case:
        rollout, client = await case.start()
        await client.chat.completions.create(model="m", messages=HELLO)
        await client.responses.create(model="m", input="hi")
        await (await case.anthropic_client(client)).messages.create(model="m", max_tokens=9, messages=HELLO)
        await client.completions.create(model="m", prompt="hi")
        await client.embeddings.create(model="m", input="hi")
        triplets = TraceToTriplet().adapt(await case.spans(rollout))
    assert [triplet.response["token_ids"] for triplet in triplets] == [[*encode(text), EOS] for text in "1234"]


async def test_completions_with_echo_record_the_logprobs_of_the_answer_only() -> None:
    choice = {"index": 0, "text": "ab c", "finish_reason": "stop", "token_ids": [3], "prompt_token_ids": [1, 2]}
    choice["logprobs"] = {"token_logprobs": [None, -0.5, -0.25]}
    body = json.dumps({"id": "c", "object": "text_completion", "model": "m", "choices": [choice]}).encode()
    async with ScriptedOpenAI([Answer(body=body)]) as server, gateway(server) as case:
        rollout, client = await case.start()
        await client.completions.create(model="m", prompt="ab", echo=True)
        (triplet,) = TraceToTriplet().adapt(await case.spans(rollout))
    assert (triplet.response["token_ids"], triplet.response["logprobs"]) == ([3], [-0.25])


async def test_a_malformed_part_or_tool_of_a_request_does_not_hide_the_rest_of_the_request() -> None:
    image = {"type": "image_url", "image_url": "http://x/y.png"}
    messages: Any = [{"role": "user", "content": ["hello", image]}, *HELLO]
    tools: Any = [{"type": "function", "function": None}]
    async with ScriptedOpenAI([Answer(body=b'{"id": "c", "choices": []}')]) as server, gateway(server) as case:
        rollout, client = await case.start()
        await client.chat.completions.create(model="m", messages=messages, tools=tools)
        read = json.loads(str((await case.span(rollout)).attributes["gen_ai.input.messages"]))
    image_part = {"type": "uri", "modality": "image", "uri": "http://x/y.png"}
    assert read[0]["parts"] == [{"type": "text", "content": "hello"}, image_part]
    assert len(read) == 2


CALLS: list[dict[str, Any]] = [
    {"type": "function_call", "call_id": "c0", "name": "add", "arguments": '{"a":1}'},
    {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "*** Begin"},
    {"type": "local_shell_call", "call_id": "c2", "action": {"command": ["ls"]}},
    {"type": "shell_call", "call_id": "c3", "action": {"commands": ["ls"]}},
    {"type": "apply_patch_call", "call_id": "c4", "operation": {"type": "delete_file", "path": "x"}},
    {"type": "computer_call", "call_id": "c5", "action": {"type": "click"}},
]
CALLED = [
    ("c0", "add", '{"a":1}'),
    ("c1", "patch", "*** Begin"),
    ("c2", "local_shell", '{"command":["ls"]}'),
    ("c3", "shell", '{"commands":["ls"]}'),
    ("c4", "apply_patch", '{"type":"delete_file","path":"x"}'),
    ("c5", "computer", '{"type":"click"}'),
]
OUTPUTS: list[Any] = ["1", "done", "x", [{"stdout": "x"}], "gone", {"type": "computer_screenshot", "image_url": "u"}]


def calls_of(message: semconv.Message) -> list[tuple[str, str, str]]:
    return [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]]


@pytest.mark.parametrize("stream", [False, True])
async def test_every_kind_of_call_of_the_responses_api_is_recorded_as_a_tool_call(stream: bool) -> None:
    answer = {"id": "r", "object": "response", "model": "m", "status": "completed", "output": CALLS}
    results = [
        {"type": f"{call['type']}_output", "call_id": call["call_id"], "output": output}
        for call, output in zip(CALLS, OUTPUTS, strict=True)
    ]
    asked: dict[str, Any] = {"model": "m", "stream": stream, "input": [{"role": "user", "content": "hi"}]}
    asked["input"] += [*CALLS, *results]
    expected = ["1", "done", "x", '[{"stdout":"x"}]', "gone", [{"type": "image_url", "image_url": {"url": "u"}}]]
    script = [Answer(body=json.dumps(answer).encode()), Answer("ok")]
    async with ScriptedOpenAI(script) as server, gateway(server, provider="openai") as case:
        rollout, client = await case.start()
        await client.post("/responses", body=asked, cast_to=object if not stream else str)
        span = await case.span(rollout)
    async with ScriptedOpenAI() as server, gateway(server) as case:
        translated, client = await case.start()
        await client.post("/responses", body={**asked, "stream": False}, cast_to=object)
        sent = server.requests[0].body["messages"]
        spans = [span, await case.span(translated)]
    assert calls_of(semconv.read_output_messages(span)[0]) == CALLED
    assert semconv.read_finish_reasons(span) == ["tool_calls"]
    assert [message["role"] for message in sent] == ["user", "assistant", *["tool"] * 6]
    translated_calls = [CALLED[0], ("c1", "patch", '{"input":"*** Begin"}'), *CALLED[2:]]
    assert calls_of(sent[1]) == translated_calls
    assert [message["content"] for message in sent[2:]] == expected
    for each, called in zip(spans, (CALLED, translated_calls), strict=True):
        read = semconv.read_input_messages(each)
        assert calls_of(read[1]) == called
        assert [message["role"] for message in read] == [message["role"] for message in sent]


def test_every_kind_of_call_of_the_responses_api_is_read_from_a_stream_that_broke_off() -> None:
    dialect, completion = Responses(), Completion()
    whole = {"id": "r", "status": "completed", "output": CALLS}
    for event in read_events(dialect.to_events(whole))[:-1]:
        dialect.read_chunk(event, completion)
    read = [(call.id, call.name, call.arguments) for call in completion.choices[0].tool_calls.values()]
    assert read == CALLED


CUSTOM = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}
CHAT_CALLS: dict[str, tuple[dict[str, Any], tuple[Any, str, str]]] = {
    "custom": ({"tool_calls": [CUSTOM]}, ("c", "patch", "*** Begin")),
    "old": ({"function_call": {"name": "add", "arguments": '{"a":1}'}}, (None, "add", '{"a":1}')),
    "object": (
        {"tool_calls": [{"id": "c", "function": {"name": "add", "arguments": {"a": 1}}}]},
        ("c", "add", '{"a":1}'),
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", CHAT_CALLS)
async def test_every_kind_of_call_of_chat_is_recorded_and_translated_as_a_tool_call(kind: str, stream: bool) -> None:
    message, called = CHAT_CALLS[kind]
    choice = {"index": 0, "finish_reason": "tool_calls", "message": {"role": "assistant", "content": None, **message}}
    body = json.dumps({"id": "x", "object": "chat.completion", "model": "m", "choices": [choice]}).encode()
    result = {"role": "function", "name": "add", "content": "1"}
    messages: Any = [*HELLO, {"role": "assistant", "content": None, **message}, result]
    async with ScriptedOpenAI([Answer(body=body)]) as server, gateway(server) as case:
        rollout, client = await case.start()
        await client.post("/chat/completions", body={"model": "m", "messages": messages, "stream": stream}, cast_to=str)
        response: Any = await client.responses.create(model="m", input="hi")
        answer: Any = await (await case.anthropic_client(client)).messages.create(
            model="m", max_tokens=9, messages=HELLO
        )
        spans = await case.spans(rollout)
    assert [calls_of(semconv.read_output_messages(span)[0]) for span in spans] == [[called]] * 3
    read = semconv.read_input_messages(spans[0])
    assert calls_of(read[1]) == [called]
    assert (read[2]["role"], read[2]["content"]) == ("tool", "1")
    item, block = response.output[0], answer.content[0]
    assert (item.name, item.arguments) == called[1:]
    expected = {"unparsed_arguments": "*** Begin"} if kind == "custom" else {"a": 1}
    assert (block.name, block.input) == (called[1], expected)


async def test_a_websocket_is_refused_with_the_status_that_makes_clients_use_http() -> None:
    async with ScriptedOpenAI() as server, gateway(server) as case, aiohttp.ClientSession() as session:
        _, client = await case.start()
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await session.ws_connect(f"{client.base_url}responses")
    assert refused.value.status == 426


PATCH = {"type": "custom", "name": "patch", "description": "Patches.", "format": {"type": "text"}}
CRM = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [{"type": "function", "name": "find"}]}


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # older clients do not know namespaces
async def test_namespaces_custom_and_hosted_tools_of_the_responses_api_work_with_a_chat_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    more = {"type": "additional_tools", "role": "developer", "tools": [{"type": "function", "name": "late"}]}
    said = {"type": "agent_message", "author": "a", "recipient": "b", "content": [{"type": "input_text", "text": "Go"}]}
    used = {"type": "function_call", "call_id": "c0", "namespace": "crm", "name": "find", "arguments": "{}"}
    asked: dict[str, Any] = {"model": "m", "tools": [{"type": "web_search"}, PATCH, CRM], "parallel_tool_calls": True}
    asked |= {"input": [said, more, used, {"type": "function_call_output", "call_id": "c0", "output": "x"}]}
    asked |= {"tool_choice": {"type": "function", "namespace": "crm", "name": "find"}}
    answer = Answer(tool_calls=[("patch", {"input": "*** Begin"}), ("crm__find", {"id": 1}), ("patch", "no JSON")])
    async with ScriptedOpenAI([answer]) as server, gateway(server) as case:
        rollout, client = await case.start()
        whole: Any = await client.responses.create(**asked)
        async with client.responses.stream(**{**asked, "tool_choice": "auto"}) as stream:
            events: list[Any] = [event async for event in stream]
            streamed: Any = await stream.get_final_response()
        await client.responses.create(**{**asked, "input": "hi", "tools": [{"type": "web_search"}]})
        sent = [request.body for request in server.requests]
        spans = await case.spans(rollout)
    assert [tool["function"]["name"] for tool in sent[0]["tools"]] == ["patch", "crm__find", "late"]
    assert sent[0]["tools"][0]["function"]["parameters"]["required"] == ["input"]
    assert sent[0]["tool_choice"] == {"type": "function", "function": {"name": "crm__find"}}
    assert [message["role"] for message in sent[0]["messages"]] == ["user", "assistant", "tool"]
    assert calls_of(sent[0]["messages"][1]) == [("c0", "crm__find", "{}")]
    assert sent[2].keys().isdisjoint({"tools", "tool_choice", "parallel_tool_calls"})
    for response in (whole, streamed):
        first, second, third = response.output
        assert (first.type, first.name, first.input) == ("custom_tool_call", "patch", "*** Begin")
        assert (second.type, second.namespace, second.name) == ("function_call", "crm", "find")
        assert (third.type, third.input) == ("custom_tool_call", "no JSON")
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert deltas == ["*** Begin", "no JSON"]
    assert [span.attributes["agentlightning.gateway.left_out_tools"] for span in spans] == [["web_search"]] * 3
    assert caplog.text.count("offers tools that only OpenAI runs: web_search") == 1


async def test_googles_path_may_name_a_model_with_a_colon_and_other_paths_below_models_stay() -> None:
    async with ScriptedOpenAI([Answer("Hello")]) as server:
        models = [entry(server.endpoint), entry(server.endpoint, model="llama3:8b")]
        async with gateway(model_list=models) as case, aiohttp.ClientSession() as session:
            _, client = await case.start()
            url = str(client.base_url).removesuffix("/v1/") + "/v1beta/models/llama3:8b:generateContent"
            body = {"contents": [{"parts": [{"text": "hi"}]}], "generation_config": {"top_p": 0.5}}
            async with session.post(url, json=body) as response:
                answer = await response.json()
            assert (await client.models.retrieve("llama3:8b")).id == "llama3:8b"
    assert answer["candidates"][0]["content"]["parts"] == [{"text": "Hello"}]
    assert server.requests[0].body["top_p"] == 0.5
