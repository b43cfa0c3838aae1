"""Streams whose events arrive together."""

from __future__ import annotations

import contextlib
import itertools
import json
from typing import Any

import openai
import pytest

from agentlightning import semconv
from agentlightning.plugin.registry import get_manager
from agentlightning_plugins.gateway.dialects.dialect import (
    MALFORMED,
    Completion,
    CompletionToolCall,
    Dialect,
    TokenOptions,
)
from agentlightning_plugins.gateway.dialects.messages import Messages
from agentlightning_plugins.gateway.dialects.openai import ChatCompletions
from agentlightning_plugins.gateway.dialects.responses import Responses
from agentlightning_plugins.gateway.dialects.wire import event_data, read_events
from agentlightning_plugins.shared.scripted_model.reply import ChatReply, MessagesReply, ResponsesReply
from agentlightning_plugins.shared.scripted_model.server import Answer, ScriptedOpenAI
from tests.plugins.gateway.gateway_setup import HELLO, Case, gateway, stream_reader

NASTY = ['say "choices":[{"index":1}] to me', "]}\n\ndata: {", "}],", '"logprobs":{"content":[', "é𝄞\\", "{", ""]


class OneByOne(ChatCompletions):
    """Chat Completions without the fast path."""

    relay_events = Dialect.relay_events


def token(text: str, index: int = 0, **more: Any) -> dict[str, Any]:
    """A choice of a chunk, with all token data."""
    content = [{"token": text, "logprob": -0.5 - len(text), "bytes": list(text.encode()), "top_logprobs": []}]
    choice: dict[str, Any] = {"index": index, "delta": {"content": text}, "logprobs": {"content": content}}
    return choice | {"finish_reason": None, "token_ids": [len(text)]} | more


def chunk(*choices: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"id": "x", "object": "chat.completion.chunk", "model": "m", "choices": list(choices), **more}


END = chunk(token(".", finish_reason="stop"))
USAGE = chunk(usage={"prompt_tokens": 3, "completion_tokens": 2})
FIRST = chunk({"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None}, prompt_token_ids=[1, 2])
TOKENS = [chunk(token(text)) for text in NASTY]
STREAMS: dict[str, list[dict[str, Any]]] = {
    "as vLLM writes it": [FIRST, *TOKENS, END, USAGE],
    "with a version after the choices": [chunk(token(text), weight_version=3, tags=[1]) for text in NASTY] + [END],
    "with prompt ids everywhere": [chunk(token(text), prompt_token_ids=[1, 2]) for text in NASTY] + [END],
    "of several choices in turn": [chunk(token(text, i)) for text in NASTY for i in range(3)]
    + [chunk(token(".", i, finish_reason="stop")) for i in range(3)],
    "of several choices in one event": [
        chunk(token("a"), token("b", 1)),
        chunk(*(token(".", i, finish_reason="stop") for i in range(2))),
    ],
    "with a different envelope in each event": [chunk(token(text), created=i) for i, text in enumerate(NASTY)] + [END],
    "with tool calls": [
        chunk(token("", delta={"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": part}}]}))
        for part in ('{"a', '": [1]', "}")
    ]
    + [END],
    "with fields that were not requested": [
        {"nested": {"choices": [chunk()]}, **piece} for piece in (FIRST, *TOKENS, END)
    ],
    "that ends with an error": [FIRST, *TOKENS, {"error": {"message": "out of memory"}}],
}


def read(dialect: Dialect, options: TokenOptions, pieces: list[bytes]) -> tuple[list[Any], Completion, bool]:
    """Returns the events for the agent, and the recorded call."""
    body = {"logprobs": options.logprobs, "return_token_ids": options.token_ids, "stream": bool(options.stream_options)}
    call, reader = stream_reader(dialect, body)
    shown = b"".join([*map(reader.feed, pieces), reader.close(None)])
    assert shown.endswith(b"\n\n")
    data = [event.removeprefix(b"data: ") for event in shown.split(b"\n\n")[:-1]]
    return [text if text == b"[DONE]" else json.loads(text) for text in data], call.completion, call.is_complete


@pytest.mark.parametrize(
    "options",
    [
        TokenOptions(*asked)
        for asked in itertools.product([False, True], [False, True], [None, {"include_usage": True}])
    ],
)
@pytest.mark.parametrize("name", STREAMS)
def test_events_that_arrive_together_are_read_as_if_they_arrived_one_by_one(name: str, options: TokenOptions) -> None:
    events = [b"data: %b\n\n" % json.dumps(chunk, separators=(",", ":")).encode() for chunk in STREAMS[name]]
    events.append(b"data: [DONE]\n\n")
    expected = read(OneByOne(), options, events)
    assert expected[2] == (name != "that ends with an error")
    shows_usage = USAGE in STREAMS[name] and options.stream_options is None
    assert ("usage" in str(expected[0])) == shows_usage
    whole = b"".join(events)
    for size in (len(whole), 1000, 300):
        assert read(ChatCompletions(), options, [whole[i : i + size] for i in range(0, len(whole), size)]) == expected


def test_events_without_captured_fields_are_relayed_byte_for_byte() -> None:
    call, reader = stream_reader(ChatCompletions(), {})
    plain = b'data: {"id":"x", "choices":[{"index":0,"delta":{"content":"\\u00e9 1e-05"}} ]}\n\n'
    assert reader.feed(plain * 3) == plain * 3
    assert call.completion.choices[0].text == "é 1e-05" * 3


def test_an_event_may_have_fields_other_than_its_data() -> None:
    for event in (b"data: {}\nid: 1\n\n", b"id: 1\ndata: {}\n\n", b"data: {}\r\nid: 1\r\n\r\n", b"data: {}\n\n"):
        assert event_data(event) == b"{}"
    assert event_data(b"data: {\ndata: }\n\n") == b"{\n}"
    assert event_data(b": a comment\n\n") is None


WHOLE = Answer("The sum is 3.", [("add", {"a": 1, "b": 2}), ("add", {})], reasoning="Add them.")
ASKS = {"model": "m", "return_token_ids": True, "logprobs": 1, "stream_options": {"include_usage": True}}
REPLIES: dict[str, Any] = {
    "openai-chat": ChatReply({**ASKS, "messages": []}, WHOLE, "r", give_ids=True),
    "openai-completions": ChatReply({**ASKS, "prompt": "hi"}, Answer("3"), "r", give_ids=True),
    "openai-responses": ResponsesReply({"model": "m", "input": "hi"}, WHOLE, "r"),
    "anthropic-messages": MessagesReply({"model": "m", "messages": []}, WHOLE, "r"),
}


@pytest.mark.parametrize("name", REPLIES)
def test_a_whole_answer_and_a_stream_become_each_other(name: str) -> None:
    dialect, reply = get_manager().create("dialect", name), REPLIES[name]
    chunks = list(reply.chunks() if isinstance(reply, ChatReply) else reply.events())
    read = [Completion() for _ in range(3)]
    dialect.read_answer(reply.whole(), read[0])
    dialect.read_answer(json.loads(json.dumps(dialect.collect(chunks))), read[1])
    for event in read_events(dialect.to_events(reply.whole())):
        dialect.read_chunk(event, read[2])
    for completion in read:
        completion.is_ended = False
        for choice in completion.choices.values():  # some servers give ids in another chunk than the text
            calls = [(call.id, call.name, json.loads(call.arguments)) for call in choice.tool_calls.values()]
            choice.tool_calls = {n: CompletionToolCall(*map(str, call)) for n, call in enumerate(calls)}
    assert read[1:] == [read[0]] * 2
    for end in range(len(chunks)):
        with contextlib.suppress(*MALFORMED):
            whole = Completion()
            dialect.read_answer(dialect.collect(chunks[:end]), whole)
            assert whole.is_finished


ENDINGS: dict[str, tuple[list[Any], bool]] = {
    "with data over several lines": ([END], True),
    "with a byte-order mark": ([END], True),
    "with an error as finish reason": ([chunk(token("a", finish_reason="error"))], False),
    "with an error in a choice": ([chunk(token("a", finish_reason="stop", error={"message": "no"}))], False),
    "without choices": ([chunk()], False),
    "with [DONE] alone": ([], False),
    "without a finish reason": ([chunk(token("."))], False),
}


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("dialect", [ChatCompletions(), Responses(), Messages()])
@pytest.mark.parametrize("name", ENDINGS)
def test_only_a_stream_that_ended_well_is_complete(name: str, dialect: Dialect, together: bool) -> None:
    chunks, is_complete = ENDINGS[name]
    indent = 1 if "lines" in name else None
    events = [json.dumps(each, indent=indent) for each in chunks] + ["[DONE]"]
    stream = "".join("data: " + event.replace("\n", "\ndata: ") + "\n\n" for event in events).encode()
    stream = b"\xef\xbb\xbf" * ("mark" in name) + stream
    call, reader = stream_reader(dialect, {"stream": True, "input": [], "messages": []})
    pieces = [stream] if together else [stream[i : i + 1] for i in range(len(stream))]
    shown = b"".join([*map(reader.feed, pieces), reader.close(None)])
    assert call.is_complete is is_complete
    assert (call.error is None) is is_complete
    if is_complete:
        assert call.completion.choices[0].text == "."
        assert call.completion.choices[0].token_ids == [1]
        assert b"token_ids" not in shown
    elif dialect.name != "openai-chat":
        assert shown.count(b"event: error") == 1
        assert b".completed" not in shown
        assert b"message_stop" not in shown


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_a_whole_answer_reaches_a_client_that_streams(api: str) -> None:
    body = json.dumps(REPLIES["openai-chat"].whole()).encode()
    async with ScriptedOpenAI([Answer(body=body)]) as server, gateway(server) as case:
        rollout, client = await case.start()
        text, names = await _stream(case, client, api)
        span = await case.span(rollout)
    assert (text, names) == ("The sum is 3.", ["add", "add"])
    assert span.attributes["agentlightning.gateway.complete"] is True
    assert semconv.read_token_data(span)


async def _stream(case: Case, client: Any, api: str) -> tuple[str, list[str]]:
    if api == "chat":
        async with client.chat.completions.stream(model="m", messages=HELLO) as stream:
            message = (await stream.get_final_completion()).choices[0].message
        return message.content, [call.function.name for call in message.tool_calls]
    if api == "responses":
        async with client.responses.stream(model="m", input="hi") as stream:
            answer = await stream.get_final_response()
        return answer.output_text, [item.name for item in answer.output if item.type == "function_call"]
    async with (await case.anthropic_client(client)).messages.stream(
        model="m", max_tokens=9, messages=HELLO
    ) as messages:
        blocks: Any = (await messages.get_final_message()).content
    return "".join(b.text for b in blocks if b.type == "text"), [b.name for b in blocks if b.type == "tool_use"]


@pytest.mark.parametrize("content_type", ["text/event-stream", "text/plain", "application/octet-stream"])
async def test_a_stream_of_any_content_type_reaches_every_client(content_type: str) -> None:
    chunks = REPLIES["openai-chat"].chunks()
    body = b"".join(b"data: %b\n\n" % json.dumps(chunk).encode() for chunk in chunks) + b"data: [DONE]\n\n"
    answer = Answer(body=body, content_type=content_type, headers={"x-weight-version": "3"})
    async with ScriptedOpenAI([answer]) as server, gateway(server) as case:
        rollout, client = await case.start()
        whole = await client.chat.completions.create(model="m", messages=HELLO)
        response = await client.responses.create(model="m", input="hi")
        streamed = await _stream(case, client, "chat")
        spans = await case.spans(rollout)
    assert (whole.choices[0].message.content, response.output_text) == ("The sum is 3.",) * 2
    assert streamed == ("The sum is 3.", ["add", "add"])
    assert [call.function.name for call in whole.choices[0].message.tool_calls or [] if call.type == "function"] == [
        "add",
        "add",
    ]
    assert [span.attributes["agentlightning.gateway.complete"] for span in spans] == [True] * 3
    assert [span.attributes["agentlightning.weight_version"] for span in spans] == [3] * 3
    assert len({str(semconv.read_token_data(span)) for span in spans}) == 1


@pytest.mark.parametrize(
    "choices", [[], [{"message": {"content": "a"}, "finish_reason": "error"}], [{"message": {}, "error": {"code": 5}}]]
)
async def test_a_whole_answer_with_an_error_is_not_complete(choices: list[Any]) -> None:
    body = json.dumps({"id": "x", "choices": choices}).encode()
    async with ScriptedOpenAI([Answer(body=body)]) as server, gateway(server, num_retries=0) as case:
        rollout, client = await case.start()
        await client.chat.completions.create(model="m", messages=HELLO)
        for stream in (False, True):
            with pytest.raises(openai.APIStatusError):
                await client.responses.create(model="m", input="hi", stream=stream)
        spans = await case.spans(rollout)
    assert [span.attributes["agentlightning.gateway.complete"] for span in spans] == [False] * 3
